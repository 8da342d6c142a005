"""Model load to first output in a fresh process: eager against a warm compile cache, interleaved.

Every sample is a new process that imports torch and transformers, then times `from_pretrained` plus
the first call. The cache is filled by two processes before anything is timed (the second publishes
nothing); a sample that captured or compiled is an error, not a slow sample.

    python benchmarks/warm_start.py [--rounds 5]
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
import torch, transformers
from transformers import AutoModel, AutoModelForCausalLM
mode, kind, folder, length = sys.argv[1:5]
if mode == "ours":
    import rm_abstract
    rm_abstract.init()
start = time.perf_counter()
loader = AutoModelForCausalLM if kind == "generate" else AutoModel
model = loader.from_pretrained(folder, dtype=torch.float32).eval()
ids = torch.arange(int(length)).remainder(200)[None] + 5
with torch.no_grad():
    if kind == "generate":
        model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
    else:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
seconds = time.perf_counter() - start
result = {"seconds": seconds}
if mode == "ours":
    report = rm_abstract.explain().to_dict()
    result["cache"] = [e["cache"] for m in report["models"] for e in m["entries"]]
    result["capture_ms"] = sum(e["capture_ms"] for m in report["models"] for e in m["entries"])
print(json.dumps(result))
"""


def sample(mode: str, case: tuple[str, str, int], cache: str) -> dict:
    kind, folder, length = case
    env = {**os.environ, "RM_CACHE_DIR": cache, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CHILD, mode, kind, folder, str(length)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def make_cases(folder: Path) -> dict[str, tuple[str, str, int]]:
    import torch
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    BertModel(BertConfig()).save_pretrained(folder / "bert")
    GPT2LMHeadModel(GPT2Config()).save_pretrained(folder / "gpt2")
    tiny = Path(__file__).parent.parent / "examples" / "models" / "tiny_llama"
    return {
        "BERT-base 1x128": ("encode", str(folder / "bert"), 128),
        "GPT-2 small, first token of 16": ("generate", str(folder / "gpt2"), 16),
        "trained Llama, first token of 16": ("generate", str(tiny), 16),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as work:
        cache = str(Path(work) / "cache")
        print("| load to first output | eager ms | warm cache ms | ratio |\n|---|---|---|---|")
        for name, case in make_cases(Path(work)).items():
            for _ in range(2):
                sample("ours", case, cache)
            seconds: dict[str, list[float]] = {"eager": [], "ours": []}
            for _ in range(rounds):
                for mode, samples in seconds.items():
                    got = sample(mode, case, cache)
                    if mode == "ours" and (set(got["cache"]) != {"hit"} or got["capture_ms"]):
                        raise RuntimeError(f"{name}: expected only cache hits, got {got}")
                    samples.append(got["seconds"])
            eager, ours = (statistics.median(seconds[m]) * 1e3 for m in ("eager", "ours"))
            ratios = [o / e for e, o in zip(seconds["eager"], seconds["ours"], strict=True)]
            print(f"| {name} | {eager:.0f} | {ours:.0f} | {statistics.median(ratios):.2f} |")


if __name__ == "__main__":
    main()
