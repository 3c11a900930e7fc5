"""`mla generate` and `mla logits` as a user meets them: what they print, write and refuse.

A refusal exits with 2, prints one line that begins with "mla: " on stderr and nothing on stdout,
and leaves no file behind.
"""
import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest

MLA = MODELS = None


def run(*words):
    return subprocess.run([MLA, *words], capture_output=True, timeout=300)


class Commands(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.target = os.path.join(MODELS, "tiny", "target")
        self.variant = os.path.join(MODELS, "variants", "v2_grouped")
        with open(os.path.join(MODELS, "tiny", "golden.json"), encoding="utf-8") as file:
            self.case = json.load(file)["cases"][0]

    def path(self, name, content=None):
        path = os.path.join(self.folder.name, name)
        if content is not None:
            with open(path, "wb") as file:
                file.write(content)
        return path

    def refuse(self, *words, says):
        done = run(*words)
        text = done.stderr.decode()
        self.assertEqual((done.returncode, done.stdout), (2, b""), text)
        self.assertTrue(text.startswith("mla: ") and text.count("\n") == 1, text)
        self.assertIn(says, text)

    def generate(self, *words):
        done = run("generate", "--json", *words)
        self.assertEqual((done.returncode, done.stderr), (0, b""), done.stderr)
        self.assertEqual(done.stdout.count(b"\n"), 1)
        return json.loads(done.stdout)

    def test_text_streams_and_json_agree(self):
        words = ["--model", self.target, "--prompt", self.case["prompt"], "--max-tokens", "40"]
        plain = run("generate", *words)
        self.assertEqual(plain.returncode, 0)
        told = self.generate(*words)
        self.assertEqual(plain.stdout.decode(), told["text"] + "\n")
        self.assertEqual(told["prompt_ids"], self.case["prompt_ids"])
        self.assertEqual(told["ids"], self.case["greedy"][:40])
        self.assertEqual(told["prefill_tokens"], len(self.case["prompt_ids"]))
        self.assertEqual(told["decode_tokens"], 39)
        self.assertGreater(told["prefill_seconds"], 0)
        self.assertGreater(told["decode_seconds"], 0)
        self.assertIn("decode", told["solutions"])
        self.assertIn("prefill", told["solutions"])

    def test_prompt_spellings(self):
        ids = self.case["prompt_ids"]
        text = self.path("prompt.txt", self.case["prompt"].encode())
        listed = self.path("list.json", json.dumps(ids).encode())
        named = self.path("named.json", json.dumps({"prompt_ids": ids, "more": 1}).encode())
        spellings = [("--prompt-file", text), ("--ids-file", listed), ("--ids-file", named),
                     ("--ids", ",".join(map(str, ids)))]
        for option, value in spellings:
            told = self.generate("--model", self.target, option, value, "--max-tokens", "3")
            self.assertEqual((told["prompt_ids"], told["ids"]), (ids, self.case["greedy"][:3]))

    def test_ids_only_model(self):
        told = self.generate("--model", self.variant, "--ids", "1,2,3", "--max-tokens", "4")
        self.assertIsNone(told["text"])
        done = run("generate", "--model", self.variant, "--ids", "1,2,3", "--max-tokens", "4")
        self.assertEqual(done.stdout.decode().split(), [str(i) for i in told["ids"]])
        self.refuse("generate", "--model", self.variant, "--prompt", "x", "--max-tokens", "4",
                    says="ids")

    def test_sampling(self):
        words = ["--model", self.target, "--prompt", "A", "--max-tokens", "30",
                 "--temperature", "1.0", "--top-p", "0.9", "--seed"]
        first, again, other = (self.generate(*words, seed)["ids"] for seed in ("5", "5", "6"))
        self.assertEqual(first, again)
        self.assertNotEqual(first, other)

    def test_forced_solutions(self):
        words = ["--model", self.target, "--prompt", "A", "--max-tokens", "5", "--solution"]
        told = self.generate(*words, "c")
        self.assertTrue(all(name.endswith("_c") for name in told["solutions"].values()), told)
        told = self.generate(*words, "decode_c")
        self.assertEqual(told["solutions"]["decode"], "decode_c")
        self.refuse("generate", *words, "decode_nothing", says="decode_nothing")

    def test_refusals(self):
        start = ["generate", "--model", self.target]
        end = ["--max-tokens", "3"]
        self.refuse(*start, "--prompt", "x", says="--max-tokens")
        self.refuse(*start, *end, says="--prompt")
        self.refuse(*start, *end, "--prompt", "x", "--ids", "1", says="exactly one")
        self.refuse(*start, *end, "--ids", "1,999", says="999")
        self.refuse(*start, *end, "--ids", "1,x", says='"x"')
        self.refuse(*start, *end, "--ids", "1,-2", says="-2")
        self.refuse(*start, *end, "--ids", "", says="--ids")
        self.refuse(*start, "--ids", "1", "--max-tokens", "4097", says="max_position_embeddings")
        self.refuse(*start, *end, "--prompt", "x", "--top-p", "0", says="--top-p")
        self.refuse(*start, *end, "--prompt", "x", "--temperature", "nan", says="--temperature")
        self.refuse(*start, *end, "--prompt", "x", "--kv-dtype", "i32", says="--kv-dtype")
        self.refuse(*start, *end, "--prompt", "x", "--page-size", "0", says="--page-size")
        self.refuse(*start, *end, "--prompt", "x", "--chunk-tokens", "0", says="--chunk-tokens")
        self.refuse(*start, *end, "--prompt", "x", "--device", "cuda", says="--device")
        self.refuse(*start, *end, "--prompt-file", self.path("gone"), says="gone")
        for content in [b"{}", b"[]", b"[1,2.5]", b'["1"]', b"[1", b'{"prompt_ids":7}']:
            self.refuse(*start, *end, "--ids-file", self.path("bad.json", content), says="bad.json")
        self.refuse("generate", "--model", self.folder.name, "--prompt", "x", *end,
                    says="config.json")

    def test_ds656_needs_its_dims(self):
        self.refuse("generate", "--model", self.variant, "--ids", "1", "--max-tokens", "2",
                    "--kv-dtype", "ds656", says="ds656")

    def test_logits(self):
        out = self.path("out.safetensors")
        done = run("logits", "--model", self.target, "--ids", "256,65,66", "--out", out, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["tokens"], 3)
        with open(out, "rb") as file:
            data = file.read()
        header = json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])
        self.assertEqual((header["logits"]["dtype"], header["logits"]["shape"]), ("F32", [3, 258]))
        experts = header["experts"]
        self.assertEqual((experts["dtype"], experts["shape"]), ("I32", [2, 3, 2]))
        self.assertEqual(os.listdir(self.folder.name), ["out.safetensors"])

    def test_logits_refusals(self):
        out = self.path("out.safetensors")
        self.refuse("logits", "--model", self.target, "--ids", "1", says="--out")
        self.refuse("logits", "--model", self.target, "--ids", "1", "--out", self.path("no/x"),
                    says="--out")
        self.refuse("logits", "--model", self.target, "--ids", "258", "--out", out, says="258")
        self.refuse("logits", "--model", self.target, "--ids", "1", "--out", out,
                    "--max-tokens", "3", says="--max-tokens")
        self.assertEqual(os.listdir(self.folder.name), [])


def main():
    global MLA, MODELS
    parser = argparse.ArgumentParser()
    parser.add_argument("--mla", required=True)
    parser.add_argument("--models", required=True)
    options, rest = parser.parse_known_args()
    MLA, MODELS = options.mla, options.models
    unittest.main(argv=[sys.argv[0], *rest])


if __name__ == "__main__":
    main()
