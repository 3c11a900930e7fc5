"""`mla logits` against the golden logits.

f32: norm of the difference over the norm, over all positions, at most 1e-5, for each family that
takes f32. bf16 and quantised caches: the median over positions of the per-position relative error.
Routing flips (positions whose set of experts differs from the f32 run's) are counted and printed:
they explain outliers and are no failure.
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile

from golden_ids import families
from safetensors_io import read

QUANTISED = [  # name, options, bound of the median
    ("bf16", ["--dtype", "bf16"], 2e-2),
    ("f32 with e4m3 cache", ["--kv-dtype", "e4m3"], 7e-2),
    ("f32 with e5m2 cache", ["--kv-dtype", "e5m2"], 15e-2),
    ("f32 with ds656 cache", ["--kv-dtype", "ds656"], 7e-2),
]


def cases(models):
    tiny_dir = os.path.join(models, "tiny")
    tiny = json.load(open(os.path.join(tiny_dir, "golden.json"), encoding="utf-8"))
    golden = read(os.path.join(tiny_dir, "golden_logits.safetensors"))
    target, draft = os.path.join(tiny_dir, "target"), os.path.join(tiny_dir, "draft")
    result = []
    for i in range(4):
        result.append((f"case{i}", target, tiny["cases"][i]["prompt_ids"], golden[f"case{i}.logits"]))
    result.append(("draft.case0", draft, tiny["cases"][0]["prompt_ids"], golden["draft.case0.logits"]))
    result.append(("long", target, tiny["long"]["prompt_ids"], golden["long.logits_last16"]))
    variants = os.path.join(models, "variants")
    for name in sorted(os.listdir(variants)):
        ids = json.load(open(os.path.join(variants, name, "golden.json"), encoding="utf-8"))["prompt_ids"]
        logits = read(os.path.join(variants, name, "golden_logits.safetensors"))["logits"]
        result.append((name, os.path.join(variants, name), ids, logits))
    return result


def logits(mla, case, extra):
    _, model, ids, (shape, _) = case
    with tempfile.TemporaryDirectory() as folder:
        ids_file, out = os.path.join(folder, "ids.json"), os.path.join(folder, "out.safetensors")
        with open(ids_file, "w", encoding="utf-8") as file:
            json.dump({"prompt_ids": ids}, file)
        command = [mla, "logits", "--model", model, "--ids-file", ids_file, "--out", out] + extra
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"exit {done.returncode}: {done.stderr.strip()}")
        tensors = read(out)
    (rows, vocab), values = tensors["logits"]
    if rows != len(ids) or vocab != shape[1]:
        raise RuntimeError(f"logits has shape [{rows}, {vocab}]")
    return values[(rows - shape[0]) * vocab:], tensors.get("experts")


def errors(values, golden):
    (rows, vocab), want = golden
    per_row, all_difference, all_norm = [], 0.0, 0.0
    for r in range(rows):
        difference = norm = 0.0
        for i in range(r * vocab, (r + 1) * vocab):
            difference += (values[i] - want[i]) ** 2
            norm += want[i] ** 2
        per_row.append(math.sqrt(difference / norm))
        all_difference += difference
        all_norm += norm
    return math.sqrt(all_difference / all_norm), statistics.median(per_row), max(per_row)


def flips(experts, reference):
    if experts is None or reference is None:
        return None
    (layers, tokens, chosen), values = experts
    count = 0
    for i in range(layers * tokens):
        span = slice(i * chosen, (i + 1) * chosen)
        count += sorted(values[span]) != sorted(reference[1][span])
    return count, layers * tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mla", required=True)
    parser.add_argument("--models", required=True)
    options = parser.parse_args()
    failures = 0
    exact = families(options.mla)
    for case in cases(options.models):
        reference = None
        for family in exact:
            if case[0] == "long" and family == "c" and len(exact) > 1:
                continue
            try:
                values, experts = logits(options.mla, case, ["--solution", family])
            except RuntimeError as fault:
                print(f"FAILED {case[0]} f32 {family}: {fault}")
                failures += 1
                continue
            reference = reference or experts
            whole, _, _ = errors(values, case[3])
            ok = whole <= 1e-5
            failures += not ok
            print(f"{'ok    ' if ok else 'FAILED'} {case[0]}: f32 {family}: {whole:.2e} (bound 1e-5)")
        for name, extra, bound in QUANTISED:
            if "ds656" in name and json.load(open(os.path.join(case[1], "config.json"), encoding="utf-8"))[
                    "kv_lora_rank"] != 512:
                continue
            try:
                values, experts = logits(options.mla, case, extra)
            except RuntimeError as fault:
                print(f"FAILED {case[0]} {name}: {fault}")
                failures += 1
                continue
            _, median, worst = errors(values, case[3])
            ok = median <= bound
            failures += not ok
            flipped = flips(experts, reference)
            told = "" if flipped is None else f", routing flips {flipped[0]} of {flipped[1]}"
            print(f"{'ok    ' if ok else 'FAILED'} {case[0]}: {name}: median {median:.2e} (bound {bound:.1e}), "
                  f"worst {worst:.2e}{told}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
