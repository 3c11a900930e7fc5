"""The `mla` command from outside: exit statuses, messages, JSON, and operators on files.

    python3 test_cli.py <mla command> [unittest arguments]

Needs nothing but the standard library. References are plain Python in double precision.
"""
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import unittest

import tensorfile
from tensorfile import bf16_bits, bf16_value, e4m3_bits, e4m3_value, f32

MLA = "mla"
OPERATORS = ["decode", "prefill", "extend", "merge", "write", "gather", "rope", "rope_write",
             "absorb", "project", "pack"]
ABSURD = 2147480000
NAN = float("nan")


def run(*arguments, environment=None):
    env = dict(os.environ)
    env.pop("MLA_SOLUTION", None)
    env.update(environment or {})
    return subprocess.run([MLA, *map(str, arguments)], stdin=subprocess.DEVNULL, env=env,
                          capture_output=True, text=True, timeout=300)


def normals(count, seed):
    generator = random.Random(seed)
    return [f32(generator.gauss(0.0, 1.0)) for _ in range(count)]


def rows_of(values, width):
    return [values[i:i + width] for i in range(0, len(values), width)]


def attend(query, keys, values, scale, cap=0.0, k_scale=1.0):
    """One row of attention: (output, natural log of the sum)."""
    if not keys:
        return [0.0] * (len(values[0]) if values else 0), -math.inf
    scores = []
    for key in keys:
        score = scale * k_scale * sum(a * b for a, b in zip(query, key))
        scores.append(cap * math.tanh(score / cap) if cap > 0 else score)
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    out = [k_scale * sum(w * value[i] for w, value in zip(weights, values)) / total
           for i in range(len(values[0]))]
    return out, top + math.log(total)


class CommandTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.input = os.path.join(self.folder.name, "in.safetensors")
        self.output = os.path.join(self.folder.name, "out.safetensors")

    def refuse(self, *arguments, says=None, environment=None):
        """Exit 2, nothing on stdout, one line on stderr."""
        result = run(*arguments, environment=environment)
        self.assertEqual(result.returncode, 2, (arguments, result.stderr))
        self.assertEqual(result.stdout, "")
        lines = result.stderr.splitlines()
        self.assertEqual(len(lines), 1, result.stderr)
        self.assertTrue(lines[0].startswith("mla: "), lines[0])
        self.assertNotIn("\x1b", lines[0])
        if says:
            self.assertIn(says, lines[0])

    def json_of(self, *arguments, environment=None):
        result = run(*arguments, environment=environment)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(len(result.stdout.splitlines()), 1)
        return json.loads(result.stdout)

    def op(self, name, tensors, metadata, *arguments):
        tensorfile.write(self.input, tensors, metadata)
        result = run("op", name, "--in", self.input, "--out", self.output, *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout, "")
        return tensorfile.read(self.output)

    def refuse_op(self, name, tensors, metadata, *arguments, says=None):
        tensorfile.write(self.input, tensors, metadata)
        self.refuse("op", name, "--in", self.input, "--out", self.output, *arguments, says=says)
        self.assertFalse(os.path.exists(self.output), "a refused op left an output file")

    def close(self, got, want, bound=1e-5):
        self.assertEqual(len(got), len(want))
        for a, b in zip(got, want):
            if math.isinf(b):
                self.assertEqual(a, b)
        pairs = [(a, b) for a, b in zip(got, want) if not math.isinf(b)]
        difference = math.sqrt(sum((a - b) ** 2 for a, b in pairs))
        reference = math.sqrt(sum(b * b for _, b in pairs))
        self.assertLessEqual(difference, bound * max(reference, 1e-30), "norm over norm")


class Arguments(CommandTest):
    def test_help_and_version(self):
        for arguments in [("--help",), ("help",), ("--version",), ("list", "--help"),
                          ("why", "--help"), ("why", "decode", "--help"), ("info", "--help"),
                          ("op", "--help"), ("bench", "--help"), ("generate", "--help"),
                          ("logits", "--help")]:
            result = run(*arguments)
            self.assertEqual(result.returncode, 0, (arguments, result.stderr))
            self.assertTrue(result.stdout.strip())
            self.assertEqual(result.stderr, "")

    def test_bad_commands(self):
        self.refuse(says="mla --help")
        self.refuse("no-such-command", says="no-such-command")
        self.refuse("--nonsense")

    def test_bad_options(self):
        self.refuse("list", "--nonsense", says="--nonsense")
        self.refuse("list", "--json=1", says="--json")
        self.refuse("list", "stray", says="stray")
        self.refuse("list", "--op", "no-such-op", says="no-such-op")
        self.refuse("list", "-j")
        self.refuse("why", says="decode")
        self.refuse("why", "nothing")
        self.refuse("why", "decode", "--heads", says="--heads")
        self.refuse("why", "decode", "--heads", "0", says="--heads")
        self.refuse("why", "decode", "--heads", "4x", says="4x")
        self.refuse("why", "decode", "--heads", " 4")
        self.refuse("why", "decode", "--heads", "99999999999999999999")
        self.refuse("why", "decode", "--dtype", "float", says="bf16")
        self.refuse("why", "decode", "--dtype", "ds656", says="--dtype")
        self.refuse("why", "prefill", "--kv-dtype", "ds656", says="ds656")
        self.refuse("why", "decode", "--device", "tpu", says="cpu")
        self.refuse("why", "decode", "--solution", "no-such-family", says="no-such-family")
        self.refuse("op", says="decode")
        self.refuse("op", "nothing")
        self.refuse("op", "decode", says="--in")
        self.refuse("op", "decode", "--in", "x")
        self.refuse("op", "decode", "--in", self.input, "--out", self.output, "--threads", "0")
        self.refuse("bench", "nothing")
        self.refuse("bench", "decode", "--rounds", "0", says="--rounds")
        self.refuse("bench", "decode", "--heads", "16,x", says="x")
        self.refuse("bench", "decode", "--heads", ",", says="--heads")
        self.refuse("bench", "decode", "--lengths", "loguniform:5:1", says="loguniform")
        self.refuse("bench", says="operator")
        self.refuse("bench", "--against", "f.csv", says="--device cuda")
        self.refuse("bench", "decode", "--device", "cpu", "--extra", says="--device cuda")
        self.refuse("bench", "decode", "--device", "cpu,cuda", says="--device")
        self.refuse("bench", "decode", "--device", "cuda", "--extra", says="--against")
        self.refuse("bench", "decode", "--device", "cuda", "--cold", says="--cold")
        self.refuse("bench", "--device", "cuda", "--against", "/no/such/file",
                    says="/no/such/file")
        self.refuse("bench", "decode", "--heads", "4", "--device", "cuda", "--against", "f.csv",
                    says="--against")
        self.refuse("bench", "all", "--device", "cuda", "--against", "f.csv", says="--against")
        self.refuse("list", "--device", "tpu", says="tpu")
        self.refuse("info", "--device", "cuda:4096", says="cuda:4096")
        self.refuse("bench", "decode", "--lengths", "/no/such/file", says="/no/such/file")
        self.refuse("info", "--nonsense")
        self.refuse("generate", "--max-tokens", "1", says="--model")
        self.refuse("logits", says="--model")

    def test_control_characters_are_not_echoed(self):
        self.refuse("list", "--op", "a\x1b[31mred\nline")

    def test_output_that_cannot_be_written(self):
        if not os.path.exists("/dev/full"):
            self.skipTest("no /dev/full here")
        with open("/dev/full", "w") as full:
            result = subprocess.run([MLA, "list"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(result.returncode, 1)
        self.assertEqual(len(result.stderr.splitlines()), 1)


class Descriptions(CommandTest):
    def test_info(self):
        info = self.json_of("info", "--json")
        for key in ["version", "commit", "compiler", "cpu", "cpu_features", "cores", "threads",
                    "caches_bytes", "devices", "solutions", "solutions_here"]:
            self.assertIn(key, info)
        self.assertGreater(info["solutions_here"], 0)
        self.assertEqual(info["devices"][0]["device"], "cpu")
        self.assertEqual(len(info["devices"]) == 1, info["cuda_reason"] != "")
        self.assertIn(info["version"], run("--version").stdout)
        self.assertIn(info["version"], run("info").stdout)

    def test_list(self):
        listed = self.json_of("list", "--json")["solutions"]
        names = [row["name"] for row in listed]
        self.assertEqual(len(names), len(set(names)), "names are unique")
        for row in listed:
            self.assertIn(row["op"], OPERATORS)
            self.assertIs(type(row["runs_here"]), bool)
            self.assertTrue(row["formats"] and row["family"] and row["features"], row)
            self.assertTrue(row["runs_here"] or row["reason"], "a reason for what does not run")
        for family in {row["family"] for row in listed if row["device"] == "cpu"}:
            covered = {row["op"] for row in listed if row["family"] == family}
            self.assertEqual(covered, set(OPERATORS), "family %s covers every operator" % family)
        text = run("list").stdout
        for name in names:
            self.assertIn(name, text)
        some = self.json_of("list", "--op", "merge", "--json")["solutions"]
        self.assertEqual({row["op"] for row in some}, {"merge"})

    def test_the_readme_tells_what_is_listed(self):
        listed = self.json_of("list", "--json")["solutions"]
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "README.md")
        with open(path) as file:
            lines = [line.strip() for line in file]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        at = next(i for i, row in enumerate(cells) if row[0] == "operator")
        families = cells[at][1:]
        here = {row["family"] for row in listed if row["device"] == "cpu"}
        self.assertLessEqual(here, set(families))
        told = {(row[0], family) for row in cells[at + 2:at + 2 + len(OPERATORS)]
                for family, cell in zip(families, row[1:]) if cell == "yes" and family in here}
        self.assertEqual(told, {(row["op"], row["family"]) for row in listed
                                if row["device"] == "cpu"})

    def test_list_and_info_work_under_a_bad_environment(self):
        bad = {"MLA_SOLUTION": "no-such-family"}
        self.json_of("list", "--json", environment=bad)
        self.json_of("info", "--json", environment=bad)
        self.refuse("why", "decode", says="no-such-family", environment=bad)

    def test_why(self):
        for operator in OPERATORS:
            answer = self.json_of("why", operator, "--dtype", "f32", "--json")
            kinds = [verdict["verdict"] for verdict in answer["verdicts"]]
            self.assertEqual(kinds.count("chosen"), 1, (operator, answer))
            for verdict in answer["verdicts"]:
                if verdict["verdict"] == "rejected":
                    self.assertTrue(verdict["reason"], verdict)
                else:
                    self.assertGreater(verdict["cost_us"], 0.0, verdict)
            chosen = answer["chosen"]
            self.assertIn(chosen, run("why", operator, "--dtype", "f32").stdout)

    def test_why_names_a_forced_solution(self):
        answer = self.json_of("why", "decode", "--dtype", "f32", "--solution", "c", "--json")
        families = {v["name"]: v["family"] for v in answer["verdicts"]}
        self.assertEqual(families[answer["chosen"]], "c")
        answer = self.json_of("why", "decode", "--dtype", "f32", "--json",
                              environment={"MLA_SOLUTION": "c"})
        self.assertEqual(families[answer["chosen"]], "c")

    def test_why_compares_the_two_ways_of_a_prefix(self):
        prefix = self.json_of("why", "extend", "--dtype", "f32", "--json")["prefix"]
        for way in ["absorbed", "expanded"]:
            self.assertGreater(prefix[way]["cost_us"], 0.0)
            for step in prefix[way]["steps"]:
                self.assertTrue(step["solution"], step)


# Small shapes with everything that tends to go wrong: pages in no order, unused slots NaN, unused
# table entries absurd, an empty request.
HEADS, RANK, ROPE, PAGE = 3, 8, 4, 4
WIDTH = RANK + ROPE
LENGTHS = [6, 0, 9]
TABLE = [[3, 1, ABSURD, ABSURD], [ABSURD] * 4, [5, 2, 6, ABSURD]]
PAGES = 7


def make_cache(seed, width=WIDTH):
    """(rows of each request, the cache's values in [PAGES, PAGE, width] with NaN elsewhere)"""
    cache = [NAN] * (PAGES * PAGE * width)
    requests = []
    for index, length in enumerate(LENGTHS):
        rows = rows_of(normals(length * width, seed + index), width)
        requests.append(rows)
        for i, row in enumerate(rows):
            slot = TABLE[index][i // PAGE] * PAGE + i % PAGE
            cache[slot * width:(slot + 1) * width] = row
    return requests, cache


def flat(table):
    return [entry for row in table for entry in row]


class Decode(CommandTest):
    def problem(self, q_len=1):
        self.requests, cache = make_cache(1)
        self.query = normals(3 * q_len * HEADS * WIDTH, 9)
        tensors = {"q": ("F32", [3, q_len, HEADS, WIDTH], self.query),
                   "kv_cache": ("F32", [PAGES, PAGE, WIDTH], cache),
                   "page_table": ("I32", [3, 4], flat(TABLE)),
                   "cache_seqlens": ("I32", [3], LENGTHS)}
        return tensors, {"softmax_scale": 0.3, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE}

    def reference(self, q_len=1, bound=None, **options):
        out, lse = [], []
        queries = rows_of(self.query, WIDTH)
        for request, keys in enumerate(self.requests):
            for token in range(q_len):
                seen = bound(len(keys), token) if bound else len(keys) - q_len + 1 + token
                visible = keys[:max(seen, 0)]
                for head in range(HEADS):
                    query = queries[(request * q_len + token) * HEADS + head]
                    row, total = attend(query, visible, [k[:RANK] for k in visible], 0.3, **options)
                    out += row if visible else [0.0] * RANK
                    lse.append(total)
        return out, lse

    def check(self, result, reference, bound=1e-5):
        tensors, metadata = result
        out, lse = reference
        self.assertEqual(tensors["out"][0], "F32")
        self.close(tensors["out"][2], out, bound)
        self.close(tensors["lse"][2], lse, bound)
        self.assertTrue(metadata["solution"])

    def test_round_trip(self):
        tensors, metadata = self.problem()
        result = self.op("decode", tensors, metadata)
        self.check(result, self.reference())
        self.assertEqual(result[0]["out"][1], [3, 1, HEADS, RANK])
        self.assertEqual(result[0]["lse"][1], [3, 1, HEADS])
        self.assertEqual(result[1]["op"], "decode")

    def test_every_family_agrees(self):
        tensors, metadata = self.problem(q_len=2)
        listed = self.json_of("list", "--op", "decode", "--json")["solutions"]
        for row in listed:
            if row["runs_here"] and row["device"] == "cpu" and "f32" in row["formats"]:
                answer = self.json_of("why", "decode", "--dtype", "f32", "--solution", row["name"],
                                      "--json")
                if answer["chosen"] != row["name"]:
                    continue
                result = self.op("decode", tensors, metadata, "--solution", row["name"])
                self.check(result, self.reference(q_len=2))
                self.assertEqual(result[1]["solution"], row["name"])

    def test_verify_draft_and_non_causal(self):
        tensors, metadata = self.problem(q_len=2)
        self.check(self.op("decode", tensors, metadata), self.reference(2))
        self.check(self.op("decode", tensors, dict(metadata, seqlen_offset="verify")),
                   self.reference(2))
        self.check(self.op("decode", tensors, dict(metadata, seqlen_offset=-3)),
                   self.reference(2, bound=lambda n, j: n - 3 + j))
        self.check(self.op("decode", tensors, dict(metadata, is_causal=0)),
                   self.reference(2, bound=lambda n, j: n))

    def test_logit_cap_and_switches(self):
        tensors, metadata = self.problem()
        self.check(self.op("decode", tensors, dict(metadata, logit_cap=0.5)),
                   self.reference(cap=0.5))
        result, _ = self.op("decode", tensors, dict(metadata, return_lse=0))
        self.assertNotIn("lse", result)
        result, _ = self.op("decode", tensors, dict(metadata, out_format="bf16"))
        self.assertEqual(result["out"][0], "BF16")
        self.close([bf16_value(b) for b in result["out"][2]], self.reference()[0], 4e-3)

    def test_other_ways_to_say_the_same(self):
        tensors, metadata = self.problem()
        want = self.op("decode", tensors, metadata)[0]
        cache = tensors["kv_cache"][2]
        same = [dict(tensors, page_table=("I64", [3, 4], flat(TABLE))),
                dict(tensors, kv_cache=("F32", [PAGES, PAGE, 1, WIDTH], cache)),
                dict(tensors, out=("F32", [1], [1.0]))]
        for variant in same:
            self.assertEqual(self.op("decode", variant, metadata)[0], want)
        for shape in [[PAGES * PAGE, WIDTH], [PAGES * PAGE, 1, WIDTH]]:
            variant = dict(tensors, kv_cache=("F32", shape, cache))
            self.assertEqual(self.op("decode", variant, dict(metadata, page_size=PAGE))[0], want)
        for key in ["kv_lora_rank", "qk_rope_head_dim"]:
            fewer = {k: v for k, v in metadata.items() if k != key}
            self.assertEqual(self.op("decode", tensors, fewer)[0], want)
        split = dict(tensors)
        split["q"] = ("F32", [3, 1, HEADS, RANK],
                      flat(row[:RANK] for row in rows_of(self.query, WIDTH)))
        split["q_rope"] = ("F32", [3, 1, HEADS, ROPE],
                           flat(row[RANK:] for row in rows_of(self.query, WIDTH)))
        self.check(self.op("decode", split, {"softmax_scale": 0.3}), self.reference())
        split = dict(tensors)
        split["kv_cache"] = ("F32", [PAGES, PAGE, RANK],
                             flat(row[:RANK] for row in rows_of(cache, WIDTH)))
        split["kv_cache_rope"] = ("F32", [PAGES, PAGE, ROPE],
                                  flat(row[RANK:] for row in rows_of(cache, WIDTH)))
        self.check(self.op("decode", split, {"softmax_scale": 0.3}), self.reference())

    def test_bits_of_narrow_formats(self):
        tensors, metadata = self.problem()
        rounded = [bf16_bits(x) for x in self.query]
        self.query = [bf16_value(b) for b in rounded]
        codes = [0x7f if x != x else e4m3_bits(x) for x in tensors["kv_cache"][2]]
        self.requests = [[[e4m3_value(e4m3_bits(x)) for x in row] for row in rows]
                         for rows in self.requests]
        shape = tensors["kv_cache"][1]
        self.query, exact = self.query, self.reference(k_scale=0.5)
        for q_dtype, cache_dtype in [("BF16", "F8_E4M3"), ("U16", "U8")]:
            tensors["q"] = (q_dtype, [3, 1, HEADS, WIDTH], rounded)
            tensors["kv_cache"] = (cache_dtype, shape, codes)
            extra = dict(metadata, k_scale=0.5, out_format="f32")
            if q_dtype == "U16":
                extra.update(q_format="bf16", kv_cache_format="e4m3")
            self.check(self.op("decode", tensors, extra), exact, bound=6e-3)
        del extra["q_format"]
        self.refuse_after_output("decode", tensors, extra, says="q_format")

    def refuse_after_output(self, *arguments, **options):
        os.remove(self.output)
        self.refuse_op(*arguments, **options)

    def test_refusals(self):
        tensors, metadata = self.problem()

        def without(table, key):
            return {k: v for k, v in table.items() if k != key}

        for key in ["q", "kv_cache", "page_table", "cache_seqlens"]:
            self.refuse_op("decode", without(tensors, key), metadata, says=key)
        self.refuse_op("decode", tensors, without(metadata, "softmax_scale"), says="softmax_scale")
        for bad in ["0", "abc", "", "1e", "nan", "inf", "0.3 "]:
            self.refuse_op("decode", tensors, dict(metadata, softmax_scale=bad))
        for key, bad in [("logit_cap", "-1"), ("logit_cap", "nan"), ("k_scale", "2"),
                         ("is_causal", "maybe"), ("seqlen_offset", "x"), ("page_size", "3"),
                         ("page_size", "0"), ("kv_lora_rank", "7"), ("out_format", "i32"),
                         ("q_format", "bf16"), ("q_format", "nothing"), ("softmaxscale", "1"),
                         ("op", "prefill"), ("return_lse", "2")]:
            self.refuse_op("decode", tensors, dict(metadata, **{key: bad}))
        self.refuse_op("decode", dict(tensors, extra=("F32", [1], [0.0])), metadata, says="extra")
        self.refuse_op("decode", dict(tensors, q=("F64", *tensors["q"][1:])), metadata,
                       says="F64, which no operator takes")
        self.refuse_op("decode", dict(tensors, cache_seqlens=("I32", [3], [6, 0, 17])), metadata)
        self.refuse_op("decode", dict(tensors, cache_seqlens=("I32", [3], [6, -1, 9])), metadata)
        self.refuse_op("decode", dict(tensors, page_table=("I64", [3, 4], [2 ** 40] * 12)), metadata)
        self.refuse_op("decode", dict(tensors, page_table=("I32", [3, 4], [PAGES] * 12)), metadata)
        self.refuse_op("decode", tensors, metadata, "--solution", "no-such", says="no-such")
        self.refuse_op("decode", tensors, metadata, "--solution", "prefill_c,no-such")
        self.refuse_op("decode", tensors, metadata, "--device", "cuda:99")

    def test_files(self):
        missing = os.path.join(self.folder.name, "missing.safetensors")
        self.refuse("op", "decode", "--in", missing, "--out", self.output, says="missing")
        for blob in [b"", b"\0" * 7, b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}trailing"]:
            with open(self.input, "wb") as file:
                file.write(blob)
            self.refuse("op", "decode", "--in", self.input, "--out", self.output)
        tensors, metadata = self.problem()
        tensorfile.write(self.input, tensors, metadata)
        self.refuse("op", "decode", "--in", self.input, "--out",
                    os.path.join(self.folder.name, "no", "such", "folder"))

    def test_damaged_files(self):
        """Whatever a byte of the header becomes, the command answers or refuses; it never dies."""
        tensors, metadata = self.problem()
        tensorfile.write(self.input, tensors, dict(metadata, page_size=PAGE, seqlen_offset=-1))
        with open(self.input, "rb") as file:
            whole = file.read()
        length = tensorfile.struct.unpack("<Q", whole[:8])[0]
        generator = random.Random(11)
        for trial in range(60):
            blob = bytearray(whole)
            for _ in range(generator.choice([1, 1, 2, 8])):
                at = generator.randrange(8 + length)
                blob[at] = generator.choice(b"0123456789[]{},:\"-eE.\x00\xff") if trial % 2 \
                    else generator.randrange(256)
            with open(self.input, "wb") as file:
                file.write(blob)
            result = run("op", "decode", "--in", self.input, "--out", self.output)
            self.assertIn(result.returncode, (0, 2), (trial, result.stderr))
            self.assertEqual(len(result.stderr.splitlines()), result.returncode // 2, result.stderr)

    def test_ragged_extend(self):
        tensors, metadata = self.problem()
        self.query = normals(7 * HEADS * WIDTH, 5)
        tensors["q"] = ("F32", [7, HEADS, WIDTH], self.query)
        tensors["cu_seqlens_q"] = ("I32", [4], [0, 3, 3, 7])
        out, lse = [], []
        queries = rows_of(self.query, WIDTH)
        token = 0
        for keys, count in zip(self.requests, [3, 0, 4]):
            for i in range(count):
                visible = keys[:len(keys) - count + 1 + i]
                for head in range(HEADS):
                    row, total = attend(queries[token * HEADS + head], visible,
                                        [k[:RANK] for k in visible], 0.3)
                    out += row
                    lse.append(total)
                token += 1
        self.check(self.op("extend", tensors, metadata), (out, lse))
        self.check(self.op("decode", tensors, metadata), (out, lse))

    def test_ds656(self):
        heads = 2
        generator = random.Random(3)
        rows, values = [], []
        for _ in range(5):
            latent = [generator.gauss(0.0, 1.0) for _ in range(512)]
            rope = [bf16_bits(generator.gauss(0.0, 1.0)) for _ in range(64)]
            row, value = [], []
            scales = [f32(max(map(abs, latent[i:i + 128])) / 448.0) for i in range(0, 512, 128)]
            row += [e4m3_bits(x / scales[i // 128]) for i, x in enumerate(latent)]
            value += [e4m3_value(c) * scales[i // 128] for i, c in enumerate(row)]
            for scale in scales:
                row += list(tensorfile.struct.pack("<f", scale))
            for bits in rope:
                row += [bits & 255, bits >> 8]
            value += [bf16_value(bits) for bits in rope]
            rows.append(row)
            values.append(value)
        cache = [255] * (3 * 4 * 656)
        for i, row in enumerate(rows):
            slot = [2, 1][i // 4] * 4 + i % 4
            cache[slot * 656:(slot + 1) * 656] = row
        query = normals(heads * 576, 4)
        result = self.op("decode", {"q": ("F32", [1, 1, heads, 576], query),
                                    "kv_cache": ("U8", [3, 4, 656], cache),
                                    "page_table": ("I32", [1, 2], [2, 1]),
                                    "cache_seqlens": ("I32", [1], [5])}, {"softmax_scale": 0.07})
        out, lse = [], []
        for head in rows_of(query, 576):
            row, total = attend(head, values, [v[:512] for v in values], 0.07)
            out += row
            lse.append(total)
        self.check(result, (out, lse))


class OtherOperators(CommandTest):
    def test_prefill(self):
        heads, kv_heads, width, v_dim = 4, 2, 6, 5
        q_lens, kv_lens = [3, 0, 2], [3, 2, 4]
        q, k, v = normals(5 * heads * width, 1), normals(9 * 2 * width, 2), normals(9 * 2 * v_dim, 3)
        tensors = {"q": ("F32", [5, heads, width], q), "k": ("F32", [9, kv_heads, width], k),
                   "v": ("F32", [9, kv_heads, v_dim], v),
                   "cu_seqlens_q": ("I32", [4], [0, 3, 3, 5]),
                   "cu_seqlens_kv": ("I64", [4], [0, 3, 5, 9])}
        queries, keys, values = rows_of(q, width), rows_of(k, width), rows_of(v, v_dim)
        for causal in [True, False]:
            out, lse = [], []
            token = first = 0
            for q_len, kv_len in zip(q_lens, kv_lens):
                for i in range(q_len):
                    seen = min(i + 1 + max(kv_len - q_len, 0), kv_len) if causal else kv_len
                    for head in range(heads):
                        at = [(first + j) * kv_heads + head // 2 for j in range(seen)]
                        row, total = attend(queries[token * heads + head], [keys[j] for j in at],
                                            [values[j] for j in at], 0.4)
                        out += row
                        lse.append(total)
                    token += 1
                first += kv_len
            result, _ = self.op("prefill", tensors, {"softmax_scale": 0.4,
                                                     "is_causal": int(causal)})
            self.close(result["out"][2], out)
            self.close(result["lse"][2], lse)

    def test_merge(self):
        n, heads, width = 3, 2, 4
        outs = [normals(n * heads * width, i) for i in range(3)]
        lses = [normals(n * heads, 10 + i) for i in range(3)]
        lses[0][0] = lses[1][1] = -math.inf
        for state in range(3):
            lses[state][5] = -math.inf
        tensors = {}
        for i, letter in enumerate("abc"):
            tensors["out_" + letter] = ("F32", [n, heads, width], outs[i])
            tensors["lse_" + letter] = ("F32", [n, heads], lses[i])
        out, lse = [], []
        for row in range(n * heads):
            top = max(l[row] for l in lses)
            weights = [math.exp(l[row] - top) if l[row] > -math.inf else 0.0 for l in lses]
            total = sum(weights)
            for i in range(width):
                at = row * width + i
                out.append(sum(w * o[at] for w, o in zip(weights, outs)) / total if total else 0.0)
            lse.append(top + math.log(total) if total else -math.inf)
        result, _ = self.op("merge", tensors, {})
        self.close(result["out"][2], out)
        self.close(result["lse"][2], lse)
        numbered = {name.replace("_a", "_0").replace("_b", "_1").replace("_c", "_2"): value
                    for name, value in tensors.items()}
        self.assertEqual(self.op("merge", numbered, {})[0], result)
        os.remove(self.output)
        del tensors["lse_b"]
        self.refuse_op("merge", tensors, {}, says="out_b")
        self.refuse_op("merge", {}, {}, says="out_a")
        gap = {name: value for name, value in numbered.items() if not name.endswith("_1")}
        self.refuse_op("merge", gap, {})

    def test_write_and_gather(self):
        latent, rope = normals(4 * RANK, 1), normals(4 * ROPE, 2)
        before = normals(2 * PAGE * WIDTH, 3)
        slots = [5, -1, 2, 7]
        tensors = {"latent": ("F32", [4, RANK], latent), "rope": ("F32", [4, 1, ROPE], rope),
                   "slots": ("I64", [4], slots),
                   "kv_cache": ("F32", [2, PAGE, WIDTH], before)}
        want = list(before)
        for i, slot in enumerate(slots):
            if slot >= 0:
                want[slot * WIDTH:(slot + 1) * WIDTH] = \
                    latent[i * RANK:(i + 1) * RANK] + rope[i * ROPE:(i + 1) * ROPE]
        result, _ = self.op("write", tensors, {})
        self.assertEqual(result["kv_cache"], ("F32", [2, PAGE, WIDTH], want))
        flat_cache = dict(tensors, kv_cache=("F32", [2 * PAGE, WIDTH], before))
        result, _ = self.op("write", flat_cache, {})
        self.assertEqual(result["kv_cache"], ("F32", [2 * PAGE, WIDTH], want))
        back, _ = self.op("gather", {"kv_cache": ("F32", [2, PAGE, WIDTH], want),
                                     "slots": ("I32", [4], slots)}, {"kv_lora_rank": RANK})
        blank = lambda values, width: [0.0 if i // width == 1 else x for i, x in enumerate(values)]
        self.assertEqual(back["latent"], ("F32", [4, RANK], blank(latent, RANK)))
        self.assertEqual(back["rope"], ("F32", [4, ROPE], blank(rope, ROPE)))
        os.remove(self.output)
        self.refuse_op("write", dict(tensors, slots=("I64", [4], [0, 1, 2, 8])), {})
        self.refuse_op("gather", {"kv_cache": ("F32", [2, PAGE, WIDTH], want),
                                  "slots": ("I32", [4], slots)}, {}, says="kv_lora_rank")

    def test_write_to_fp8(self):
        latent = normals(2 * WIDTH, 1)
        latent[0], latent[1] = 1e6, -1e6
        result, _ = self.op("write", {"latent": ("F32", [2, WIDTH], latent),
                                      "slots": ("I32", [2], [1, 3]),
                                      "kv_cache": ("F8_E4M3", [1, PAGE, WIDTH], [0] * 48)},
                            {"kv_lora_rank": RANK, "k_scale": 0.5})
        codes = [e4m3_bits(x / 0.5) for x in latent]
        want = [0] * WIDTH + codes[:WIDTH] + [0] * WIDTH + codes[WIDTH:]
        self.assertEqual(result["kv_cache"], ("F8_E4M3", [1, PAGE, WIDTH], want))

    def rotation(self, width, positions):
        half = width // 2
        angles = [[0.3 * p * (i + 1) for i in range(half)] for p in range(8)]
        cos = [f32(math.cos(a)) for row in angles for a in row]
        sin = [f32(math.sin(a)) for row in angles for a in row]

        def turn(row, position, interleaved=True):
            out = list(row)
            for i in range(half):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                c, s = cos[position * half + i], sin[position * half + i]
                out[a] = row[a] * c - row[b] * s
                out[b] = row[b] * c + row[a] * s
            return out

        tensors = {"cos": ("F32", [8, half], cos), "sin": ("F32", [8, half], sin),
                   "positions": ("I64", [len(positions)], positions)}
        return tensors, turn

    def test_rope(self):
        positions = [5, 0, 7]
        tables, turn = self.rotation(4, positions)
        x = normals(3 * 2 * 4, 1)
        tensors = dict(tables, x=("F32", [3, 2, 4], x))
        for interleaved in [True, False]:
            want = [value for i, row in enumerate(rows_of(x, 4))
                    for value in turn(row, positions[i // 2], interleaved)]
            result, _ = self.op("rope", tensors, {"is_interleaved": int(interleaved)})
            self.close(result["out"][2], want)
        os.remove(self.output)
        self.refuse_op("rope", dict(tensors, positions=("I32", [3], [0, 8, 0])), {})

    def test_rope_write(self):
        positions = [2, 6]
        tables, turn = self.rotation(ROPE, positions)
        q_pe, k_pe = normals(2 * HEADS * ROPE, 1), normals(2 * ROPE, 2)
        latent, slots = normals(2 * RANK, 3), [3, 0]
        tensors = dict(tables, q_pe=("F32", [2, HEADS, ROPE], q_pe),
                       latent=("F32", [2, RANK], latent), k_pe=("F32", [2, ROPE], k_pe),
                       slots=("I32", [2], slots),
                       kv_cache=("F32", [1, PAGE, WIDTH], [0.0] * (PAGE * WIDTH)))
        result, _ = self.op("rope_write", tensors, {})
        want = [value for i, row in enumerate(rows_of(q_pe, ROPE))
                for value in turn(row, positions[i // HEADS])]
        self.close(result["q_pe_out"][2], want)
        keys = [turn(row, positions[i]) for i, row in enumerate(rows_of(k_pe, ROPE))]
        self.close(result["k_pe_out"][2], keys[0] + keys[1])
        cache = [0.0] * (PAGE * WIDTH)
        for i, slot in enumerate(slots):
            cache[slot * WIDTH:(slot + 1) * WIDTH] = latent[i * RANK:(i + 1) * RANK] + keys[i]
        self.close(result["kv_cache"][2], cache)

    def test_absorb_and_project(self):
        tokens, nope, v_dim = 2, 5, 6
        q, w_uk = normals(tokens * HEADS * nope, 1), normals(HEADS * nope * RANK, 2)
        result, _ = self.op("absorb", {"q_nope": ("F32", [tokens, HEADS, nope], q),
                                       "w_uk": ("F32", [HEADS, nope, RANK], w_uk)}, {})
        want = [sum(q[(t * HEADS + h) * nope + n] * w_uk[(h * nope + n) * RANK + r]
                    for n in range(nope))
                for t in range(tokens) for h in range(HEADS) for r in range(RANK)]
        self.close(result["out"][2], want)
        latent, w_uv = normals(tokens * HEADS * RANK, 3), normals(HEADS * RANK * v_dim, 4)
        gate = normals(tokens * HEADS * v_dim, 5)
        tensors = {"latent": ("F32", [tokens, HEADS, RANK], latent),
                   "w_uv": ("F32", [HEADS, RANK, v_dim], w_uv)}
        want = [sum(latent[(t * HEADS + h) * RANK + r] * w_uv[(h * RANK + r) * v_dim + v]
                    for r in range(RANK))
                for t in range(tokens) for h in range(HEADS) for v in range(v_dim)]
        result, _ = self.op("project", tensors, {})
        self.close(result["out"][2], want)
        tensors["gate"] = ("F32", [tokens, HEADS * v_dim], gate)
        result, _ = self.op("project", tensors, {})
        self.close(result["out"][2], [x / (1.0 + math.exp(-g)) for x, g in zip(want, gate)])

    def test_pack(self):
        tokens, nope, v_dim = 3, 4, 5
        k_nope, k_pe = normals(tokens * HEADS * nope, 1), normals(tokens * ROPE, 2)
        v = normals(tokens * HEADS * v_dim, 3)
        result, _ = self.op("pack", {"k_nope": ("F32", [tokens, HEADS, nope], k_nope),
                                     "k_pe": ("F32", [tokens, 1, ROPE], k_pe),
                                     "v": ("F32", [tokens, HEADS, v_dim], v)}, {})
        want = []
        for i, row in enumerate(rows_of(k_nope, nope)):
            want += row + k_pe[i // HEADS * ROPE:(i // HEADS + 1) * ROPE]
        self.assertEqual(result["k_out"], ("F32", [tokens, HEADS, nope + ROPE], want))
        self.assertEqual(result["v_out"], ("F32", [tokens, HEADS, v_dim], v))


class Bench(CommandTest):
    KEYS = ["op", "solution", "device", "device_name", "heads", "kv_heads", "batch", "q_len",
            "kv_len", "lengths", "page_size", "dtype", "kv_dtype", "causal", "threads", "cold",
            "rounds", "us_min", "us_median", "us_p95", "gflops", "gbps", "floor_us",
            "ceiling_gflops", "ceiling_gbps", "share_of_ceiling", "verified", "commit", "compiler"]

    def bench(self, *arguments):
        result = run("bench", *arguments, "--rounds", 2, "--seconds", 0.01, "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        for row in rows:
            for key in self.KEYS:
                self.assertIn(key, row)
            self.assertTrue(row["verified"])
            self.assertLessEqual(row["us_min"], row["us_median"])
            self.assertLessEqual(row["us_median"], row["us_p95"])
        return rows

    def test_every_operator(self):
        for operator in OPERATORS:
            rows = self.bench(operator, "--heads", 4, "--q-len", 3, "--kv-len", 70, "--batch", 2)
            self.assertEqual([row["op"] for row in rows], [operator])

    def test_lists_and_lengths(self):
        rows = self.bench("decode", "--heads", "2,4", "--kv-dtype", "bf16,e4m3,ds656", "--kv-len",
                          100, "--cold=0")
        self.assertEqual([(row["heads"], row["kv_dtype"]) for row in rows],
                         [(h, f) for h in [2, 4] for f in ["bf16", "e4m3", "ds656"]])
        path = os.path.join(self.folder.name, "lengths.txt")
        with open(path, "w") as file:
            file.write("[5, 0, 130]\n")
        row, = self.bench("decode", "--heads", 2, "--lengths", path)
        self.assertEqual((row["lengths"], row["batch"], row["kv_len"]), ([5, 0, 130], 3, 130))
        row, = self.bench("decode", "--heads", 2, "--batch", 5, "--lengths", "loguniform:3:90:7")
        self.assertEqual(len(row["lengths"]), 5)
        self.assertTrue(all(3 <= length <= 90 for length in row["lengths"]))

    def test_plot(self):
        path = os.path.join(self.folder.name, "roof.svg")
        self.bench("decode", "--heads", "1,8", "--kv-len", 128, "--plot", path)
        with open(path) as file:
            text = file.read()
        self.assertTrue(text.startswith("<svg") and text.rstrip().endswith("</svg>"))


if __name__ == "__main__":
    MLA = os.path.abspath(sys.argv.pop(1))
    unittest.main()
