"""Continue Python code with a small Llama: an ordinary Transformers script, without rm_abstract.

python examples/generate_text.py                        as it is
python -m rm_abstract examples/generate_text.py         the same script, compiled
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CHECKPOINT = Path(__file__).parent / "models" / "tiny_llama"
# Of unequal lengths on purpose: batched generation pads them on the left.
PROMPTS = [
    "    def __init__(self, ",
    "import os\nimport sys\n\n\ndef main():\n    ",
    "class Reader:\n    def read(self, size):\n        if size ",
    "try:\n    import ",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=5, help="timed calls after the first")
    parser.add_argument("--json", type=Path, help="also write tokens and times to this file")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)

    times_ms = []
    for _ in range(1 + args.repeat):
        start = time.perf_counter()
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=args.max_new_tokens)
        times_ms.append(1e3 * (time.perf_counter() - start))

    for text in tokenizer.batch_decode(tokens, skip_special_tokens=True):
        print(f"{text}\n{'-' * 72}")
    median_ms = statistics.median(times_ms[1:])
    new_tokens = (tokens.shape[1] - inputs["input_ids"].shape[1]) * len(PROMPTS)
    rate = 1e3 * new_tokens / median_ms
    print(f"first call {times_ms[0]:.0f} ms, then {median_ms:.0f} ms: {rate:.0f} tokens a second")
    if args.json:
        result = {"tokens": tokens.tolist(), "first_ms": times_ms[0], "median_ms": median_ms}
        args.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
