"""What a generated token costs outside the weights: toy models, one row, many kinds of request.

Three candidates take turns: our loop, transformers' loop over the same compiled steps, and eager.
A request whose tokens are not eager's is not timed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from rm_abstract.bench import method

PROMPT = 8


@dataclass(frozen=True)
class Request:
    """Arguments of `generate`; `streamed` puts a streamer beside them that counts."""

    name: str
    arguments: dict[str, Any]
    streamed: bool = False


REQUESTS = (
    Request("greedy", {"do_sample": False}),
    Request("greedy, streamer", {"do_sample": False}, streamed=True),
    Request("greedy, max_time", {"do_sample": False, "max_time": 600.0}),
    Request("greedy, repetition penalty", {"do_sample": False, "repetition_penalty": 1.1}),
    Request("sampled", {"do_sample": True, "top_k": 0}),
    Request("sampled, top-k 50", {"do_sample": True, "top_k": 50}),
    Request("sampled, top-p 0.9", {"do_sample": True, "top_k": 0, "top_p": 0.9}),
)


class Counting:
    """A streamer that counts what it is given."""

    def __init__(self) -> None:
        self.tokens = 0

    def put(self, value: Any) -> None:
        self.tokens += value.numel()

    def end(self) -> None:
        pass


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=2, n_positions=1024,
                   bos_token_id=1, eos_token_id=None)
    )  # fmt: skip


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(vocab_size=32000, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                    num_attention_heads=2, eos_token_id=None)
    )  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {"GPT-2, 100 tokens": gpt2, "Llama, 32000 tokens": llama}


@contextlib.contextmanager
def as_transformers_loops() -> Iterator[None]:
    """transformers' own loop, each forward still routed."""
    from rm_abstract.generation import token_loop

    with mock.patch.object(token_loop, "why_not", lambda *_: "the benchmark compares"):
        yield


def generated(model: Any, request: Request, tokens: int) -> tuple[list[int], float]:
    """What one call of `generate` returns and its seconds; the same seed every time."""
    import torch

    ids = torch.arange(3, 3 + PROMPT)[None]
    streamer = Counting() if request.streamed else None
    torch.manual_seed(0)
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        pad_token_id=0,
        streamer=streamer,
        **request.arguments,
    )
    seconds = time.perf_counter() - start
    if streamer is not None and streamer.tokens != PROMPT + tokens:
        raise ValueError(f"[bench] expected {tokens} streamed tokens, got {streamer.tokens}")
    return out[0, PROMPT:].tolist(), seconds


def run(model_name: str, request: Request, tokens: int, rounds: int) -> dict[str, Any]:
    """Microseconds a token of the candidates: of calls of `tokens` and a quarter of that, the
    difference, so that the prompt and what a call costs once do not count."""
    import torch

    import rm_abstract

    torch.manual_seed(0)
    model = MODELS[model_name]().eval()
    expected, _ = generated(model, request, tokens)
    few = max(1, tokens // 4)
    taken: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        rm_abstract.init(compile_options={"prompt_lookup": "off"})  # steps are what is timed
        stack.callback(rm_abstract.shutdown)
        rm_abstract.accelerate(model)
        ways: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
            "rm_abstract": contextlib.nullcontext,
            "transformers' loop": as_transformers_loops,
            "eager": rm_abstract.disabled,
        }
        for name, way in ways.items():
            for _ in range(3):  # captures, whose first call is eager
                with way():
                    got, _ = generated(model, request, tokens)
            if got != expected:
                raise ValueError(f"[bench] expected eager's tokens of {name}, got others: {got}")
            taken[name] = []
        for _ in range(rounds):
            for name, way in ways.items():
                with way():
                    long = min(generated(model, request, tokens)[1] for _ in range(3))
                    short = min(generated(model, request, few)[1] for _ in range(3))
                taken[name].append((long - short) / (tokens - few) * 1e6)
        if not rm_abstract.explain(model).to_dict()["routed"]:
            raise RuntimeError("[bench] expected routed calls, got eager ones")
    return {
        "model": model_name,
        "request": request.name,
        "us": {name: vars(method.Estimate.of(values)) for name, values in taken.items()},
    }


HEADER = "| model | asked for | rm_abstract us | transformers' loop us | eager us |\n|" + "---|" * 5


def markdown(result: dict[str, Any]) -> str:
    cells = [result["model"], result["request"]]
    cells += [f"{v['median']:.0f} ({v['low']:.0f}-{v['high']:.0f})" for v in result["us"].values()]
    return f"| {' | '.join(cells)} |"
