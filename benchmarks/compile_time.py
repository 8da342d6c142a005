"""Compile time: a first call without a cache, and a call of sizes that are new.

Each sample is a new process with an empty cache. Of its first call: the capture (torch.export and
the importer), our passes, and planning, which is everything that is made for the call's concrete
sizes (kernels chosen, memory planned, constants computed). Then calls of other sizes, which plan
again.

    python benchmarks/compile_time.py [--rounds 3] [--only BERT]

ResNet-50 is that of transformers (its classifier left out).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

CHILD = """
import json, sys, time
import torch, transformers
import rm_abstract
from rm_abstract import _core
name, threads, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(threads)
torch.manual_seed(0)
passes = []
run_passes = _core.ir.run_passes

def timed(*args, **named):
    start = time.perf_counter()
    try:
        return run_passes(*args, **named)
    finally:
        passes.append((time.perf_counter() - start) * 1e3)

_core.ir.run_passes = timed
if name == "BERT-base":
    made = transformers.BertModel(transformers.BertConfig())
    sizes = [torch.arange(n).remainder(200)[None] + 5 for n in (128, 96, 57)]
else:
    made = transformers.ResNetModel(transformers.ResNetConfig())
    sizes = [torch.randn(n, 3, 224, 224) for n in (2, 3, 4)]
made.save_pretrained(folder)
rm_abstract.init()
model = type(made).from_pretrained(folder).eval()
calls = []
for x in sizes:
    print("call", file=sys.stderr, flush=True)
    start = time.perf_counter()
    with torch.no_grad():
        model(x)
    calls.append((time.perf_counter() - start) * 1e3)
entries = [e for m in rm_abstract.explain().to_dict()["models"] for e in m["entries"]]
print(json.dumps({
    "calls": calls,
    "passes": sum(passes),
    "capture": sum(e["capture_ms"] for e in entries),
    "compile": sum(e["compile_ms"] for e in entries),
    "entries": len(entries),
}))
"""

PLANNED = re.compile(r"instance: .*\), ([0-9.]+) ms")


def sample(name: str, threads: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as weights:
        env = {**os.environ, "RM_CACHE_DIR": cache, "RM_LOG": "plan=debug", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", CHILD, name, str(threads), weights]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    planned: list[float] = []
    for line in done.stderr.splitlines():
        if line == "call":
            planned.append(0.0)
        elif planned and (match := PLANNED.search(line)):
            planned[-1] += float(match[1])
    return {
        "first call": found["calls"][0],
        "capture": found["capture"],
        "passes": found["passes"],
        "planning": planned[0],
        "new sizes planned": max(planned[1:]),
        "entries": found["entries"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="models whose names contain this")
    asked = parser.parse_args()
    names = [n for n in ("BERT-base", "ResNet-50") if asked.only in n]
    head = ("first call", "capture", "passes", "planning", "new sizes planned", "entries")
    print("| model, ms | " + " | ".join(head) + " |\n|---|" + "---|" * len(head))
    for name in names:
        runs = [sample(name, asked.threads) for _ in range(asked.rounds)]
        cells = (f"{statistics.median(r[k] for r in runs):.0f}" for k in head)
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
