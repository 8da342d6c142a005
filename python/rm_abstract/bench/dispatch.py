"""What a call costs besides its kernels: attached but unrouted, routed, and launching one operator.

Models are as small as they get, so that nothing but the way of a call is measured. Candidates take
turns within a round, as everywhere.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rm_abstract.bench import method

if TYPE_CHECKING:
    import torch

CALLS = 200  # a sample: a clock is read every so many calls


@dataclass(frozen=True)
class Candidate:
    name: str
    against: str  # what it is compared with
    call: Callable[[], object]


def many(call: Callable[[], object]) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(CALLS):
            call()

    return repeated


def null_module() -> torch.nn.Module:
    """One addition: the smallest program that is worth routing."""
    import torch

    class Null(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weight

    return Null().train(False)


def deep_module(layers: int = 12) -> torch.nn.Module:
    """A toy encoder of many steps, to see what one step of a plan costs."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=100,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    model: Any = BertModel(config, add_pooling_layer=False)
    evaluated: torch.nn.Module = model.eval()
    return evaluated


def routed(module: torch.nn.Module, call: Callable[[], object]) -> int:
    """Compiles by calling; returns the steps of the program. Raises when calls stay eager."""
    import rm_abstract

    for _ in range(3):
        call()
    report = rm_abstract.explain(module).to_dict()
    if not report["routed"]:
        raise RuntimeError(f"[bench] expected a routed call, got eager:\n{report}")
    return int(report["models"][0]["entries"][0]["nodes"])


def run(rounds: int, round_seconds: float) -> dict[str, Any]:
    """Microseconds a call of every candidate with their 95 % intervals."""
    import torch

    import rm_abstract

    with torch.no_grad(), contextlib.ExitStack() as stack:
        x, y = torch.ones(8), torch.ones(8)
        stock, unrouted, null = null_module(), null_module(), null_module()
        toy, ids = deep_module(), torch.arange(4)[None]
        start = time.perf_counter()
        rm_abstract.init(compile_options={"when_slower": "compiled"})  # a program is timed
        init_ms = (time.perf_counter() - start) * 1e3
        stack.callback(rm_abstract.shutdown)
        for module in (unrouted, null, toy):
            rm_abstract.accelerate(module)
        steps = routed(null, lambda: null(x))
        deep_steps = routed(toy, lambda: toy(input_ids=ids))

        def disabled() -> None:
            with rm_abstract.disabled():
                for _ in range(CALLS):
                    unrouted(x)

        timings = method.interleave(
            {
                "torch.add": many(lambda: torch.add(x, y)),
                "stock module": many(lambda: stock(x)),
                "attached, unrouted": disabled,
                "routed, 1 step": many(lambda: null(x)),
                "routed, many steps": many(lambda: toy(input_ids=ids)),
            },
            rounds=rounds,
            round_seconds=round_seconds,
        )
    micro = {name: timing.estimate.scaled(1e6 / CALLS) for name, timing in timings.items()}
    stock_us, add_us = micro["stock module"].median, micro["torch.add"].median
    return {
        "init_ms": init_ms,
        "steps": {"routed, 1 step": steps, "routed, many steps": deep_steps},
        "us": {name: vars(estimate) for name, estimate in micro.items()},
        "attached_over_stock_us": micro["attached, unrouted"].median - stock_us,
        "routed_over_add": micro["routed, 1 step"].median / add_us,
        "us_a_step": (micro["routed, many steps"].median - micro["routed, 1 step"].median)
        / max(1, deep_steps - steps),
    }


def rows(result: dict[str, Any]) -> str:
    """The table alone."""
    lines = ["| call | us | steps |", "|---|---|---|"]
    for name, value in result["us"].items():
        steps = result["steps"].get(name, "")
        span = f"{value['median']:.2f} ({value['low']:.2f}-{value['high']:.2f})"
        lines.append(f"| {name} | {span} | {steps} |")
    return "\n".join(lines)


def markdown(result: dict[str, Any]) -> str:
    lines = [
        rows(result),
        "",
        f"init() {result['init_ms']:.1f} ms; attached but unrouted adds "
        f"{result['attached_over_stock_us']:.2f} us to a stock call; a routed call is "
        f"{result['routed_over_add']:.2f} x torch.add; a further step takes "
        f"{result['us_a_step']:.2f} us",
    ]
    return "\n".join(lines)
