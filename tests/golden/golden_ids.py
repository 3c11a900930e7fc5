"""Greedy ids of `mla generate` in f32 against the golden files.

Every prompt and every variant runs with each chunk size and each page size, and each family that
takes f32 meets each of both at least once (pairwise); the long prompt runs with chunk 64, 1000 and
whole and a chunk capacity of 256 in each family. --soak runs the full product.
"""
import argparse
import concurrent.futures
import json
import os
import subprocess
import sys

CHUNKS = [1, 7, 64, 1000, 0]  # 0 = the whole prompt at once
PAGES = [1, 16, 64, 100]


def families(mla):
    listed = json.loads(subprocess.run([mla, "list", "--json"], check=True, capture_output=True).stdout)
    rows = listed["solutions"] if isinstance(listed, dict) else listed
    found = []
    for row in rows:
        if row["op"] == "decode" and row["runs_here"] and "f32" in row["formats"]:
            if row["family"] not in found and row.get("device", "cpu") == "cpu":
                found.append(row["family"])
    return found


def cases(models):
    tiny = json.load(open(os.path.join(models, "tiny", "golden.json"), encoding="utf-8"))
    target, draft = os.path.join(models, "tiny", "target"), os.path.join(models, "tiny", "draft")
    result = []
    for i, case in enumerate(tiny["cases"]):
        result.append((f"case{i}", target, case["prompt_ids"], case["greedy"]))
        if "draft_greedy" in case:
            result.append((f"draft{i}", draft, case["prompt_ids"], case["draft_greedy"]))
    variants = os.path.join(models, "variants")
    for name in sorted(os.listdir(variants)):
        golden = json.load(open(os.path.join(variants, name, "golden.json"), encoding="utf-8"))
        result.append((name, os.path.join(variants, name), golden["prompt_ids"], golden["greedy"]))
    long_case = ("long", target, tiny["long"]["prompt_ids"], tiny["long"]["greedy"])
    return result, long_case


def plan(short, long_case, all_families, soak):
    jobs = []
    for i, case in enumerate(short):
        for c, chunk in enumerate(CHUNKS):
            for p, page in enumerate(PAGES):
                if case[0].startswith("draft") and not soak and (c * len(PAGES) + p) % 8 != i % 8:
                    continue  # the drafts share one round of the grid
                chosen = all_families if soak else [all_families[(c + p + i) % len(all_families)]]
                jobs += [(case, family, chunk, page, 0) for family in chosen]
    for family in all_families:
        for c, chunk in enumerate([64, 1000, 0]):
            pages = PAGES if soak else [PAGES[(c + all_families.index(family)) % len(PAGES)]]
            jobs += [(long_case, family, chunk, page, 256) for page in pages]
    if soak:
        jobs += [(long_case, family, chunk, 64, 0) for family in all_families for chunk in (7, 333)]
    return jobs


def run(mla, job):
    (name, model, prompt, golden), family, chunk, page, capacity = job
    command = [mla, "generate", "--model", model, "--ids", ",".join(map(str, prompt)), "--max-tokens",
               str(len(golden)), "--page-size", str(page), "--solution", family, "--json"]
    if name != "long":
        command += ["--threads", "1"]  # several runs share the cores; the long prompt uses all
    if chunk:
        command += ["--chunk-tokens", str(chunk)]
    if capacity:
        command += ["--chunk-capacity", str(capacity)]
    label = f"{name} family {family} chunk {chunk or 'whole'} page {page} capacity {capacity or 'default'}"
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        return label, f"exit {done.returncode}: {done.stderr.strip()}"
    answer = json.loads(done.stdout)
    if answer["prompt_ids"] != prompt:
        return label, "prompt_ids differ"
    if answer["ids"] != golden:
        first = next((i for i, (a, b) in enumerate(zip(answer["ids"], golden)) if a != b),
                     min(len(answer["ids"]), len(golden)))
        return label, f"ids differ from token {first} of {len(golden)} ({len(answer['ids'])} came)"
    return label, None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mla", required=True)
    parser.add_argument("--models", required=True)
    parser.add_argument("--soak", action="store_true")
    parser.add_argument("--part", default="all", choices=["all", "short", "long"])
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    names = families(options.mla)
    if not names:
        sys.exit("no family takes f32 here")
    short, long_case = cases(options.models)
    jobs = plan(short, long_case, names, options.soak)
    if options.part != "all":
        jobs = [job for job in jobs if (job[0][0] == "long") == (options.part == "long")]
    failures = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for label, fault in pool.map(lambda job: run(options.mla, job), jobs):
            if fault:
                failures += 1
                print(f"FAILED {label}: {fault}", flush=True)
    print(f"{len(jobs) - failures} of {len(jobs)} runs gave the golden ids (families: {' '.join(names)})")
    sys.exit(1 if failures or not jobs else 0)


if __name__ == "__main__":
    main()
