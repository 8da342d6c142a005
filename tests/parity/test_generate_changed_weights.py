"""A callback of `generate` changes the model: the tokens behind it are those of the changed one."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, StoppingCriteriaList

import rm_abstract as rm

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 128,
}  # fmt: skip
IDS = torch.arange(9)[None] * 7 % 90 + 5
AT = 6  # the token behind which the model is another one: the loop runs without calls by then


@pytest.fixture(params=["cpu", "sim:0"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """A routed model whose programs are there, and one that is never routed."""
    torch.manual_seed(0)
    plain: Any = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    plain.generation_config.pad_token_id, plain.generation_config.eos_token_id = 0, None
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(5)  # tokens that differ
    model = copy.deepcopy(plain)
    rm.init(request.param)
    rm.accelerate(model)
    for _ in range(3):
        generated(model)
    yield model, plain
    rm.shutdown()


def generated(model: Any, **more: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(
        **{"input_ids": IDS, "max_new_tokens": 16, "do_sample": False, **more}
    )
    return found


def attention(model: Any) -> Any:
    return model.model.layers[0].self_attn


def replaced(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().roll(3, 0))


def transposed(model: Any) -> None:
    attention(model).v_proj.weight.data = attention(model).v_proj.weight.data.t()


def hooked(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: -output)


CHANGES: dict[str, Callable[[Any], None]] = {
    "another parameter": replaced,
    ".data transposed": transposed,
    ".data scaled": lambda model: attention(model).v_proj.weight.data.mul_(-2),
    "a hook": hooked,
}


class Changing:
    """A streamer, a stopping criterion and a logits processor that changes the model once."""

    def __init__(self, model: Any, change: Callable[[Any], None]) -> None:
        self._model, self._change, self._seen = model, change, 0

    def _act(self) -> None:
        self._seen += 1
        if self._seen == AT:
            self._change(self._model)

    def put(self, value: torch.Tensor) -> None:
        self._act()

    def end(self) -> None:
        pass


class Criterion(Changing):
    def __call__(self, ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        self._act()
        return torch.zeros(ids.shape[0], dtype=torch.bool)


class Processor(Changing):
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._act()
        return scores


def callbacks(kind: str, model: Any, change: Callable[[Any], None]) -> dict[str, Any]:
    if kind == "streamer":
        return {"streamer": Changing(model, change)}
    if kind == "criterion":
        return {"stopping_criteria": StoppingCriteriaList([Criterion(model, change)])}
    return {"logits_processor": LogitsProcessorList([Processor(model, change)])}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", ["streamer", "criterion", "processor"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_tokens_behind_a_change_are_those_of_the_changed_model(
    change: Callable[[Any], None], kind: str, pair: tuple[Any, Any]
) -> None:
    model, plain = pair
    with rm.disabled():
        before = generated(plain)
        expected = generated(plain, **callbacks(kind, plain, change))
    assert not torch.equal(before, expected)
    assert torch.equal(generated(model, **callbacks(kind, model, change)), expected)
    with rm.disabled():
        after = generated(plain)
    assert torch.equal(generated(model), after)


def test_rows_of_threads_are_those_of_the_changed_model(pair: tuple[Any, Any]) -> None:
    """Two threads share their steps; one of them has a callback that changes the model."""
    model, plain = pair
    found: list[torch.Tensor] = []
    other = threading.Thread(target=lambda: generated(model, max_new_tokens=60))
    other.start()
    found.append(generated(model, **callbacks("streamer", model, replaced)))
    other.join()
    with rm.disabled():
        expected = generated(plain, **callbacks("streamer", plain, replaced))
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize("pair", ["sim:0"], indirect=True)
def test_a_cache_of_the_model_before_a_change_is_lost_with_its_device(
    pair: tuple[Any, Any],
) -> None:
    """Feeding its tokens to the model of now would make other keys and values."""
    model, _ = pair

    def change_and_kill(model: Any) -> None:
        attention(model).v_proj.weight.data.mul_(-2)
        for pool in rm.session.current()._workers.values():
            for pid in pool.alive():
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(rm.ExecutionError) as caught:
        generated(model, **callbacks("streamer", model, change_and_kill))
    assert caught.value.code in ("RM303", "RM407")
