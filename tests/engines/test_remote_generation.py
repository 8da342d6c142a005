"""Generation in another process: the frame, its faults, and transformers' meaning of every token.

The worker here computes with PyTorch (eager_worker.py); test_vllm.py has the same with vLLM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import rm_abstract as rm
from rm_abstract.generation.remote import process as processes
from rm_abstract.generation.remote import worker_side
from rm_abstract.generation.vllm import engine as vllm_engine
from rm_abstract.generation.vllm import options as vllm_options
from rm_abstract.kv.names import cache_name

PROGRAM = Path(__file__).parent / "eager_worker.py"
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def use_eager_worker(patch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, str(PROGRAM), worker_side.__file__]
    patch.setattr(vllm_engine.Vllm, "command", lambda self: command)
    known = ["fail", "max_model_len", "wrong", *vllm_options.OURS]
    patch.setattr(vllm_options, "names", lambda _: known)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.saved("llama", tmp_path_factory.mktemp("models") / "llama", 11)


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One session and one model for the tests that leave both as they are."""
    from transformers import AutoModelForCausalLM

    with pytest.MonkeyPatch.context() as patch:
        use_eager_worker(patch)
        cache = tmp_path_factory.mktemp("cache")
        with rm.init("cpu", inference_engine="vllm", fallback="allow", cache_dir=cache):
            yield AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> Iterator[Any]:
    """Makes a session with engine_options, and a model in it."""
    from transformers import AutoModelForCausalLM

    if rm.is_initialized():
        pytest.fail("another session is open")
    use_eager_worker(monkeypatch)

    def make(options: dict[str, Any] | None = None, **given: Any) -> Any:
        given = {"fallback": "allow", **given}
        rm.init("cpu", inference_engine="vllm", engine_options=options, **given)
        return AutoModelForCausalLM.from_pretrained(folder)

    yield make
    rm.shutdown()


def expected(model: Any, inputs: Any, **options: Any) -> torch.Tensor:
    with rm.disabled():
        return model.generate(**inputs, **options)


def record(model: Any) -> dict[str, Any]:
    """Of the engine; zeros before its first generation (tests may run in any process)."""
    found = rm.explain(model).models[0]["generation_engine"]
    return {"requests": 0, "starts": 0, "declined": {}, "crashes": [], **found}


# ---- one session for all: first, so that it is closed before the others start -----------


def test_greedy_tokens_of_padded_rows_are_transformers_own(served: Any, seed: int) -> None:
    inputs = models.prompts(5, seed)
    before = record(served)["requests"]
    want = expected(served, inputs, **GREEDY)
    assert torch.equal(served.generate(**inputs, **GREEDY), want)
    found = record(served)
    assert found["requests"] == before + 1 and found["starts"] == 1
    assert found["checked"].startswith("log probabilities of 8 tokens")
    assert "vllm 0 on cpu: " in str(rm.explain(served))


def test_rows_end_each_for_itself_and_are_padded(served: Any, seed: int) -> None:
    inputs = models.prompts(4, seed)
    tokens = expected(served, inputs, **GREEDY)[:, inputs["input_ids"].shape[1] :]
    ends = [int(tokens[0, 2]), int(tokens[1, 5])]
    for options in (
        {"eos_token_id": ends, "pad_token_id": 0},
        {"eos_token_id": ends[0], "min_new_tokens": 7},
        {"suppress_tokens": ends},
        {"bad_words_ids": [[ends[0]], [ends[1]]]},
    ):
        want = expected(served, inputs, **GREEDY, **options)
        requests = record(served)["requests"]
        assert torch.equal(served.generate(**inputs, **GREEDY, **options), want), options
        assert record(served)["requests"] == requests + 1, options


def test_streamers_and_criteria_see_what_transformers_shows_them(served: Any, seed: int) -> None:
    from transformers import StoppingCriteria, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

    class Kept(BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen.append(value.tolist())

        def end(self) -> None:
            self.seen.append("end")

    class After(StoppingCriteria):
        def __init__(self) -> None:
            self.asked: list[Any] = []

        def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.asked.append(ids.tolist())
            rows = torch.arange(ids.shape[0])
            return torch.tensor(len(self.asked)) > 3 + 2 * rows

    seen, asked = [], []
    for run in (served.generate, lambda **given: expected(served, given, **{})):
        inputs = models.prompts(3, seed)
        criterion = After()
        ids = run(**inputs, **GREEDY, stopping_criteria=StoppingCriteriaList([criterion]))
        asked.append((criterion.asked, ids.tolist()))
        inputs, streamer = models.prompts(1, seed), Kept()
        run(**inputs, **GREEDY, streamer=streamer)
        seen.append(streamer.seen)
    assert seen[0] == seen[1] and asked[0] == asked[1]


@pytest.mark.sampled(4, of="remote engines")
def test_what_it_does_not_do_runs_elsewhere_and_is_named(served: Any, seed: int) -> None:
    from transformers import DynamicCache, LogitsProcessorList

    def mine(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    inputs = models.prompts(2, seed)
    mask = torch.ones_like(
        inputs["attention_mask"]
    )  # rows of one length, by some seeds: not a flipped mask
    mask[0, -1] = 0
    right = {**inputs, "attention_mask": mask}
    requests = record(served)["requests"]
    for given, name in (
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"past_key_values": DynamicCache()}, cache_name()),
        ({"logits_processor": LogitsProcessorList([mine])}, "function"),
        ({"max_new_tokens": 300}, "max_model_len is 256"),
        ({"num_beams": 2}, "beam search"),
        (right, "attention_mask"),
    ):
        served.generate(**{**inputs, **GREEDY, **given})
        declined = record(served)["declined"]
        assert any(name in why for why in declined), (name, declined)
    assert record(served)["requests"] == requests


@pytest.mark.sampled(4, of="remote engines")
def test_threads_generate_at_once(served: Any, seed: int) -> None:
    inputs = [models.prompts(1 + i % 2, seed + i) for i in range(12)]
    want = [expected(served, one, **GREEDY) for one in inputs]
    got: list[Any] = [None] * len(inputs)

    def work(number: int) -> None:
        got[number] = served.generate(**inputs[number], **GREEDY)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_changed_weights_reach_the_engine(served: Any, seed: int) -> None:
    inputs = models.prompts(3, seed)
    old = served.generate(**inputs, **GREEDY)
    weight = served.model.layers[0].mlp.down_proj.weight
    kept = weight.detach().clone()
    starts = record(served)["starts"]
    try:
        with torch.no_grad():
            weight.mul_(-3)
        want = expected(served, inputs, **GREEDY)
        assert not torch.equal(want, old)
        assert torch.equal(served.generate(**inputs, **GREEDY), want)
    finally:
        weight.data.copy_(kept)  # a write that counts no version
    assert torch.equal(served.generate(**inputs, **GREEDY), old)
    assert record(served)["starts"] == starts


def test_another_structure_is_not_the_engines(served: Any, seed: int) -> None:
    inputs = models.prompts(1, seed)
    handle = served.model.layers[1].register_forward_hook(lambda module, args, output: None)
    try:
        requests = record(served)["requests"]
        served.generate(**inputs, **GREEDY)
        assert record(served)["requests"] == requests
        assert "a hook of model.layers.1" in record(served)["declined"]
    finally:
        handle.remove()
    want = expected(served, inputs, **GREEDY)
    assert torch.equal(served.generate(**inputs, **GREEDY), want)
    assert record(served)["requests"] == requests + 1


@pytest.mark.sampled(4, of="remote engines")
def test_a_killed_worker_is_a_typed_error_and_the_next_call_works(served: Any, seed: int) -> None:
    inputs = models.prompts(1, seed)
    want = served.generate(**inputs, **GREEDY)
    pid = record(served)["pid"]
    scratch = next(p.scratch for p in processes.running() if p.pid == pid)
    killer = models.KillsAtTheFifthToken(pid)
    with pytest.raises(rm.ExecutionError, match="signal 9") as error:
        served.generate(
            **inputs, max_new_tokens=230, do_sample=False, eos_token_id=-1, streamer=killer
        )
    assert killer.killed and time.monotonic() - killer.killed < 60
    assert error.value.code == "RM303"
    assert torch.equal(served.generate(**inputs, **GREEDY), want)
    assert not scratch.exists() and len(record(served)["crashes"]) == 1


def test_a_child_made_by_fork_leaves_the_worker_to_its_parent(served: Any, seed: int) -> None:
    inputs = models.prompts(1, seed)
    want = served.generate(**inputs, **GREEDY)
    child = os.fork()
    if child == 0:
        os._exit(0 if not list(processes.running()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(served.generate(**inputs, **GREEDY), want)


@pytest.mark.sampled(4, of="remote engines")
def test_memory_of_the_engine_is_told_emptied_and_given_back(served: Any, seed: int) -> None:
    inputs = models.prompts(1, seed)
    want = served.generate(**inputs, **GREEDY)
    (row,) = rm.memory.stats()["models"]
    pid = record(served)["pid"]
    assert row["processes"][pid] > 10 << 20
    rm.memory.empty_cache()
    assert torch.equal(served.generate(**inputs, **GREEDY), want)
    rm.memory.unload(served)
    assert not list(processes.running()) and not os.path.exists(f"/proc/{pid}")
    assert torch.equal(served.generate(**inputs, **GREEDY), want)
    assert record(served)["pid"] != pid


# ---- sessions of their own -----------------------------------------------------------------------


@pytest.fixture
def alone(served: Any) -> Iterator[None]:
    """Ends the common session: the tests below have their own."""
    rm.shutdown()
    yield


@pytest.mark.sampled(4, of="remote engines")
def test_an_engine_that_cannot_start_or_computes_otherwise_is_not_used(
    alone: None, start: Any, seed: int
) -> None:
    inputs = models.prompts(2, seed)
    for options, word in (
        ({"fail": "no such kernel"}, "no such kernel"),
        ({"wrong": True}, "differ from PyTorch"),
    ):
        model = start(options)
        want = expected(model, inputs, **GREEDY)
        for _ in range(2):
            assert torch.equal(model.generate(**inputs, **GREEDY), want)
        found = record(model)
        assert any(word in why for why in found["declined"]) and found["starts"] == 1
        assert not list(processes.running())
        rm.shutdown()
    model = start({"fail": "no such kernel"}, fallback="error")
    with pytest.raises(rm.Error, match="no such kernel") as error:
        model.generate(**inputs, **GREEDY)
    assert error.value.code == "RM331"


@pytest.mark.sampled(4, of="remote engines")
def test_engines_are_switched_live_and_end_with_idleness_and_with_the_session(
    alone: None, start: Any, seed: int
) -> None:
    inputs = models.prompts(2, seed)
    model = start({"idle_timeout_s": 0.5})
    want = expected(model, inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY), want)
    until = time.monotonic() + 60
    while list(processes.running()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not list(processes.running())
    assert torch.equal(model.generate(**inputs, **GREEDY), want)
    (worker,) = processes.running()
    rm.init("cpu", inference_engine="native", fallback="allow")
    assert not worker.alive and not worker.scratch.exists()
    assert torch.equal(model.generate(**inputs, **GREEDY), want)
    with pytest.raises(OSError):
        os.kill(worker.pid, 0)


def test_an_engine_that_waits_for_ever_is_given_up_without_a_deadline() -> None:
    command = [sys.executable, str(PROGRAM), worker_side.__file__]
    one = processes.EngineProcess("eager", command, dict(os.environ), stall_s=5)
    with pytest.raises(rm.ExecutionError, match="neither computed") as error:
        one.request("call", float("inf"), name="hang", arguments={})
    assert error.value.code == "RM309" and "in call" in str(error.value)  # the stack says where
    assert not one.alive
    one.close()


def test_shared_memory_of_a_killed_group_is_removed(tmp_path: Path) -> None:
    """Also when the tracker that would do it is killed with everything else."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\n"
        "from multiprocessing import shared_memory\n"
        "held = shared_memory.SharedMemory(create=True, size=4096)\n"
        "print(held.name, flush=True)\n"
        "time.sleep(600)\n"
    )
    one = processes.EngineProcess("shm", [sys.executable, str(program)], dict(os.environ))
    until = time.monotonic() + 60
    while not one.log_tail() and time.monotonic() < until:
        time.sleep(0.02)
    segment = Path("/dev/shm") / one.log_tail()
    assert segment.exists()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and b"resource_tracker" in Path(f"/proc/{name}/cmdline").read_bytes():
                if os.getpgid(int(name)) == one.pid:
                    os.kill(int(name), signal.SIGKILL)
    one.close()
    assert not segment.exists()


@pytest.mark.sampled(4, of="remote engines")
def test_a_user_that_is_killed_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    """The worker sees its socket close and removes itself and its folder."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from rm_abstract.generation.remote import process, worker_side\n"
        f"command = [sys.executable, {str(PROGRAM)!r}, worker_side.__file__]\n"
        "one = process.EngineProcess('vllm', command, dict(os.environ))\n"
        f"one.request('start', 60, model={str(folder)!r}, arguments={{}}, device='cpu')\n"
        "print(one.pid, one.scratch, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    pid, scratch = done.stdout.split()
    until = time.monotonic() + 60
    while (os.path.exists(f"/proc/{pid}") or os.path.exists(scratch)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(scratch) and not os.path.exists(f"/proc/{pid}")
