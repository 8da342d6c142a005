"""What a served call costs with gradients enabled, against eager and against `torch.no_grad()`.

Prints eager / served for both modes and the share of the speed-up that is left with gradients
enabled. Candidates alternate in one process; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import transformers as hf

import rm_abstract as rm


def build(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    if name == "minilm-shape":
        config = hf.BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        )
        return hf.BertModel(config).eval(), {"input_ids": torch.randint(0, 30000, (1, 32))}
    if name == "bert-base":
        return hf.BertModel(hf.BertConfig()).eval(), {
            "input_ids": torch.randint(0, 30000, (1, 128))
        }
    config = hf.GPT2Config(n_layer=6, n_embd=384, n_head=6)
    return hf.GPT2LMHeadModel(config).eval(), {"input_ids": torch.randint(0, 30000, (1, 32))}


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--models", default="minilm-shape,bert-base,gpt2-small")
    options = parser.parse_args()
    rm.init("cpu")
    for name in options.models.split(","):
        model, inputs = build(name)
        rm.accelerate(model)

        def eager(model: torch.nn.Module = model, inputs: dict = inputs) -> None:
            with rm.disabled():
                model(**inputs)

        def served(model: torch.nn.Module = model, inputs: dict = inputs) -> None:
            model(**inputs)

        def without(call: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                with torch.no_grad():
                    call()

            return run

        calls = [eager, served, without(eager), without(served)]
        for call in calls * 3:
            call()
        times: list[list[float]] = [[] for _ in calls]
        for round_ in range(options.rounds):
            for i in range(len(calls)):
                k = (i + round_) % len(calls)
                times[k].append(timed(calls[k]))
        eager_grad, with_grad, eager_off, with_off = (statistics.median(t) * 1e3 for t in times)
        grad, off = eager_grad / with_grad, eager_off / with_off
        print(
            f"{name}: gradients enabled {eager_grad:.2f} -> {with_grad:.2f} ms ({grad:.2f}x), "
            f"no_grad {eager_off:.2f} -> {with_off:.2f} ms ({off:.2f}x), share {grad / off:.2f}"
        )


if __name__ == "__main__":
    main()
