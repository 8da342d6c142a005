"""Faults between two tokens: the device holds the keys and values, and may take them along."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from npu_support import worker_pids
from test_npu_faults import Later
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria

import rm_abstract as rm

STRICT = "error:capture,compile,device,correctness,cache"


@pytest.fixture(autouse=True)
def own_cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_CACHE_DIR", str(shared_cache))


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RM_SIM_COMPILE_S", "0")
    torch.manual_seed(0)
    yield
    rm.shutdown()


def llama() -> Any:
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, vocab_size=64, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config).eval()


def inputs_of(rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 63, (rows, 6))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


class After(StoppingCriteria):  # type: ignore[misc]
    """Does something once so many tokens were made; stops nothing."""

    def __init__(self, count: int, action: Callable[[], None]) -> None:
        self._left, self._action = count, action

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            self._action()
        return torch.zeros(len(ids), dtype=torch.bool)


def generate(model: Any, inputs: Any, action: Callable[[], None] = lambda: None) -> Any:
    return model.generate(
        **inputs, max_new_tokens=12, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, stopping_criteria=[After(5, action)],
    )  # fmt: skip


def expected_of(model: Any, inputs: Any) -> list[list[int]]:
    with rm.disabled():
        return list(generate(model, inputs).sequences.tolist())


def served(model: Any) -> int:
    return sum(row["calls"] for row in rm.explain(model).to_dict()["models"][0]["entries"])


def codes(model: Any) -> set[str]:
    reasons = rm.explain(model).to_dict()["models"][0]["reasons"]
    return {reason["code"] for reason in reasons}


def test_a_generation_goes_on_on_the_next_worker_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Later(tmp_path, monkeypatch, "run_crash")
    rm.init("sim:0", fallback=STRICT)
    model, inputs = llama(), inputs_of()
    expected = expected_of(model, inputs)
    generate(model, inputs)
    before, pids = served(model), worker_pids()
    found = generate(model, inputs, later.happen_once)
    assert later.happened and found.sequences.tolist() == expected
    assert served(model) == before + 12  # no step was left to the original
    assert found.past_key_values.residence.replays == 1
    assert set(worker_pids()) != set(pids)


def test_a_worker_killed_between_two_tokens_is_replaced(tmp_path: Path) -> None:
    rm.init("sim:0", fallback=STRICT)
    model, inputs = llama(), inputs_of()
    expected = expected_of(model, inputs)
    generate(model, inputs)

    def kill() -> None:
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)

    for beams in (1, 2):
        with rm.disabled():
            right = model.generate(**inputs, max_new_tokens=12, num_beams=beams, pad_token_id=0)
        for _ in range(2):
            found = model.generate(
                **inputs, max_new_tokens=12, num_beams=beams, pad_token_id=0,
                stopping_criteria=[After(5, kill)],
            )  # fmt: skip
            assert found.tolist() == right.tolist()
    found = generate(model, inputs, kill)
    assert found.sequences.tolist() == expected
    keys = found.past_key_values.layers[0].keys
    with rm.disabled():
        right = generate(model, inputs).past_key_values.layers[0].keys
    visible = keys.shape[2] - 4  # the first row's padding holds anything
    torch.testing.assert_close(keys[:, :, -visible:], right[:, :, -visible:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fault", "code"), [("run_hang", "RM308"), ("device_lost", "RM407"), ("run_error", "RM307")]
)
def test_the_original_goes_on_when_the_device_does_not(
    fault: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Later(tmp_path, monkeypatch, fault)
    rm.init("sim:0", compile_options={"execute_timeout_s": 1})
    model, inputs = llama(), inputs_of()
    expected = expected_of(model, inputs)
    generate(model, inputs)
    start = time.monotonic()
    with pytest.warns(rm.RoutingWarning, match=code):
        found = generate(model, inputs, later.happen_once)
    assert time.monotonic() - start < 60
    assert later.happened and found.sequences.tolist() == expected
    assert code in codes(model)


def test_a_device_that_stays_lost_leaves_the_generation_to_the_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rm.init("sim:0")
    model, inputs = llama(), inputs_of()
    expected = expected_of(model, inputs)
    generate(model, inputs)

    def lose() -> None:
        monkeypatch.setenv("RM_SIM_FAULT", "device_lost")  # seen by workers started from now on
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)

    with pytest.warns(rm.RoutingWarning, match="RM407"):
        assert generate(model, inputs, lose).sequences.tolist() == expected


def test_wrong_numbers_of_a_token_are_caught_before_any_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_CACHE_DIR", str(tmp_path / "cache"))  # the verdict is remembered
    later = Later(tmp_path, monkeypatch, "wrong_numbers")
    rm.init("sim:0")
    model, inputs = llama(), inputs_of()
    expected = expected_of(model, inputs)

    def soon() -> None:
        later.happen_once()

    criteria = [After(1, soon)]  # after the prompt, which is compared on its first call
    with pytest.warns(rm.RoutingWarning, match="RM501"):
        found = model.generate(
            **inputs, max_new_tokens=12, do_sample=False, pad_token_id=0,
            stopping_criteria=criteria,
        )  # fmt: skip
    assert found.tolist() == expected and "RM501" in codes(model)
    assert generate(model, inputs).sequences.tolist() == expected


def test_too_little_memory_for_a_cache_leaves_it_to_the_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RM_SIM_MEMORY", str(200_000))
    rm.init("sim:0")
    model = llama()
    inputs = {"input_ids": torch.randint(1, 63, (2, 6))}
    expected = expected_of(model, inputs)
    generate(model, inputs)
    found = model.generate(**{"input_ids": inputs["input_ids"].repeat(16, 1)}, max_new_tokens=200)
    assert found.shape == (32, 206) and "RM305" in codes(model)
    assert generate(model, inputs).sequences.tolist() == expected


def test_content_that_came_from_no_tokens_is_a_typed_error_when_it_is_lost() -> None:
    rm.init("sim:0", fallback=STRICT)
    model = llama()
    inputs = {"input_ids": torch.randint(1, 63, (1, 6))}
    cache = [generate(model, inputs).past_key_values for _ in range(2)][1]
    cache.layers[0].keys = cache.layers[0].keys * 2  # the user's own idea
    following = torch.ones(1, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(2):  # the original runs the first call of this form
            model(input_ids=following, past_key_values=cache)
        assert cache.residence.on_device
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(rm.ExecutionError, match="lost") as caught:
            model(input_ids=following, past_key_values=cache)
    assert caught.value.code == "RM303"
    assert generate(model, inputs).sequences.tolist() == expected_of(model, inputs)


def test_a_cache_outlives_its_session() -> None:
    rm.init("sim:0", fallback=STRICT)
    model, inputs = llama(), {"input_ids": torch.randint(1, 63, (1, 6))}
    cache = [generate(model, inputs).past_key_values for _ in range(2)][1]
    assert cache.residence.on_device
    rm.shutdown()
    right = generate(model, inputs).past_key_values
    torch.testing.assert_close(cache.layers[1].keys, right.layers[1].keys, rtol=1e-4, atol=1e-4)


def test_a_conversation_moves_with_the_session_to_another_device() -> None:
    rm.init("sim:0", fallback=STRICT)
    model, inputs = llama(), {"input_ids": torch.randint(1, 63, (1, 6))}

    def talk(between: Callable[[], None]) -> list[list[int]]:
        first = generate(model, inputs)
        between()
        ids = torch.cat([first.sequences, inputs["input_ids"]], 1)
        following = {"input_ids": ids, "past_key_values": first.past_key_values}
        return list(generate(model, following).sequences.tolist())

    with rm.disabled():
        expected = talk(lambda: None)
    for device in ("sim:0", "cpu", "sim:0"):
        assert talk(lambda device=device: rm.switch_device(device)) == expected
