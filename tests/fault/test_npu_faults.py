"""Everything that can go wrong with a device and its compiler: the right error, the right answer,
and a process that goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from npu_support import (
    Encoder,
    Running,
    alive,
    call_of,
    npu,
    python_environment,
    run,
    worker_pids,
)

import rm_abstract as rm
from rm_abstract.hooks import recovery

HEAVY = os.environ.get("RM_HEAVY") == "1"


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_SIM_COMPILE_S", "0")


STRICT = "error:capture,compile,device,correctness,cache"

COMPILE_FAULTS = {
    "compile_error": (rm.CompileError, "RM301", "E1042"),
    "compile_crash": (rm.CompileError, "RM303", "simulated crash"),
    "out_of_memory": (rm.CompileError, "RM305", "device memory"),
    "corrupt_artefact": (rm.CompileError, "RM602", "damaged"),
    "run_error": (rm.ExecutionError, "RM307", "device error"),
    "run_crash": (rm.ExecutionError, "RM303", "simulated crash"),
    "device_lost": (rm.ExecutionError, "RM407", "the device"),
    "wrong_numbers": (rm.ParityError, "RM501", "differs by"),
    "version_skew": (rm.DeviceUnavailableError, "RM403", "compiler=0.9"),
    "start_crash": (rm.CompileError, "RM303", "signal 6"),
}


@pytest.mark.parametrize("fault", sorted(COMPILE_FAULTS))
def test_a_fault_of_the_device_is_the_right_error(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, code, text = COMPILE_FAULTS[fault]
    monkeypatch.setenv("RM_SIM_FAULT", fault)
    with npu(fallback=STRICT):
        result = run(calls=1)
    assert [type(e) for e in result.errors] == [kind], result.errors
    assert result.errors[0].code == code
    assert text in str(result.errors[0])


@pytest.mark.parametrize("fault", sorted(COMPILE_FAULTS))
def test_a_fault_of_the_device_leaves_the_model_running_eager(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_SIM_FAULT", fault)
    with npu():
        result = run(calls=3)
    assert result.right and len(result.outputs) == 3
    assert result.routed == 0
    assert COMPILE_FAULTS[fault][1] in result.codes
    assert sum(COMPILE_FAULTS[fault][1] in line for line in result.warned) == 1


def test_a_compiler_that_hangs_is_given_up_after_the_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RM_SIM_FAULT", "compile_hang")
    with npu(compile_options={"timeout_s": 0.5}):
        start = time.monotonic()
        result = run(calls=2)
        assert time.monotonic() - start < 60
    assert result.right and "RM302" in result.codes


def test_a_model_the_device_has_no_operators_for_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with npu(fallback=STRICT):
        result = run(calls=1, model=Running(), inputs={"x": torch.ones(2, 4)})
    assert result.errors[0].code == "RM304"
    assert "cumsum" in str(result.errors[0])


def test_wrong_numbers_are_never_served_and_a_users_module_is_compared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RM_SIM_FAULT", "wrong_numbers")
    with npu():
        assert run(calls=2).routed == 0
    monkeypatch.delenv("RM_SIM_FAULT")
    with npu():  # the model is the user's code: compared again, and right now (decision 0021)
        assert run(calls=2).right


class Later:
    """A fault that is switched on from now on, once."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
        self._switch = folder / "happened"
        self._switch.touch()
        monkeypatch.setenv("RM_SIM_FAULT", fault)
        monkeypatch.setenv("RM_SIM_FAULT_ONCE", str(self._switch))

    def happen_once(self) -> None:
        self._switch.unlink()

    @property
    def happened(self) -> bool:
        return self._switch.exists()


def test_a_crash_while_serving_is_served_by_the_next_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Later(tmp_path, monkeypatch, "run_crash")
    with npu(fallback=STRICT):
        first = run(calls=3)
        before = worker_pids()
        later.happen_once()
        result = run(calls=3)
        assert later.happened
        assert set(worker_pids()) != set(before)
    assert first.right and first.routed == 2
    assert result.right and not result.errors and result.routed == 2


@pytest.mark.parametrize("pause_s", [0.0, 3600.0])
def test_a_model_comes_back_to_a_device_that_is_whole_again(
    pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "FIRST_S", pause_s)
    model, inputs = Encoder().eval(), call_of()
    with npu(), torch.no_grad():
        rm.accelerate(model)
        for _ in range(3):
            expected = model(**inputs)
        monkeypatch.setenv("RM_SIM_FAULT", "run_crash")
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)
        with pytest.warns(rm.RoutingWarning, match="RM303"):
            torch.testing.assert_close(model(**inputs), expected)
        monkeypatch.delenv("RM_SIM_FAULT")
        before = rm.explain(model).routed
        for _ in range(4):
            torch.testing.assert_close(model(**inputs), expected)
        # The call after the pause is the original's still: it looks whether the model is as it was.
        assert rm.explain(model).routed == before + (0 if pause_s else 3)


def test_a_hang_while_serving_is_given_up_and_the_call_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Later(tmp_path, monkeypatch, "run_hang")
    with npu(compile_options={"execute_timeout_s": 1}):
        assert run(calls=2).routed == 1
        later.happen_once()
        start = time.monotonic()
        result = run(calls=2)
        assert time.monotonic() - start < 60
    assert result.right and "RM308" in result.codes


def test_a_worker_somebody_kills_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with npu(fallback=STRICT):
        assert run(calls=2).routed == 1
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)
        result = run(calls=2)
    assert result.right and not result.errors and result.routed == 1


def test_a_damaged_artefact_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Later(tmp_path, monkeypatch, "corrupt_artefact")
    later.happen_once()
    with npu(fallback=STRICT) as session:
        result = run(calls=2)
        assert session.compile_cache().counters()["corrupt"] >= 1
    assert later.happened
    assert result.right and result.routed == 1


def test_workers_end_with_the_session_and_a_new_one_starts_others() -> None:
    with npu():
        run(calls=2)
        pids = worker_pids()
        assert len(pids) == 2  # one compiles, one executes
    assert not [pid for pid in pids if alive(pid)]
    with npu():
        assert run(calls=2).right


def test_a_forked_child_runs_eager_and_leaves_the_workers_alone() -> None:
    model, inputs = Encoder().eval(), call_of()
    with npu(), torch.no_grad():
        rm.accelerate(model)
        for _ in range(2):
            expected = model(**inputs)
        pids = worker_pids()
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            torch.set_num_threads(1)  # fork does not copy torch's thread pool
            right = torch.allclose(model(**inputs), expected, atol=1e-5)
            os._exit(0 if right and worker_pids() == [] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert worker_pids() == pids
        routed = rm.explain(model).routed
        model(**inputs)
        assert rm.explain(model).routed == routed + 1


SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
from npu_support import npu, run, worker_pids
with npu(verbose=1):
    print("ready", flush=True)
    {body}
"""


def start_script(body: str, **environment: str) -> subprocess.Popen[str]:
    source = SCRIPT.format(tests=str(Path(__file__).parent), body=body)
    return subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**python_environment(), **environment},
    )


def workers_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, IndexError):
            continue
        if entry.name.isdigit() and int(stat[1]) == pid:
            found.append(int(entry.name))
    return found


def wait_for_workers(pid: int, count: int) -> list[int]:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if len(found := workers_of(pid)) >= count:
            return found
        time.sleep(0.05)
    raise AssertionError("the workers did not start")


def gone_within(pids: list[int], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", ["", "compile_hang"])
def test_ctrl_c_while_compiling_returns_within_two_seconds(fault: str) -> None:
    script = start_script("run()", RM_SIM_COMPILE_S="120", RM_SIM_FAULT=fault)
    workers = wait_for_workers(script.pid, 1)
    time.sleep(3.0)  # the compilation has begun
    start = time.monotonic()
    script.send_signal(signal.SIGINT)
    _, errors = script.communicate(timeout=60)
    took_s = time.monotonic() - start  # the interpreter's end included
    assert took_s < (3 if HEAVY else 30)  # a busy machine takes a while; compiling takes 120
    assert "KeyboardInterrupt" in errors
    assert gone_within(workers, 2 if HEAVY else 30)


@pytest.mark.sampled(2, of="npu scripts")
def test_workers_end_when_the_script_is_killed() -> None:
    script = start_script(
        "run(); print(*worker_pids(), flush=True); import time; time.sleep(60)",
        RM_SIM_COMPILE_S="0",
    )
    assert script.stdout is not None
    assert script.stdout.readline() == "ready\n"
    workers = [int(pid) for pid in script.stdout.readline().split()]
    assert len(workers) == 2
    script.kill()
    script.communicate()
    assert gone_within(workers, 30)


@pytest.mark.sampled(2, of="npu scripts")
def test_progress_is_told_on_stderr_and_the_second_time_the_cache() -> None:
    script = start_script("print(run().right)", RM_SIM_COMPILE_S="1")
    output, errors = script.communicate(timeout=120)
    assert output.split() == ["ready", "True"]
    assert "Compiling Encoder for sim:0 [" in errors and "lowering" in errors
    again = start_script("print(run().routed)", RM_SIM_COMPILE_S="1")
    output, errors = again.communicate(timeout=120)
    assert output.split() == ["ready", "2"]
    assert "Compiling" not in errors
    assert "Loading compiled model from cache" in errors


@pytest.mark.sampled(2, of="npu scripts")
def test_the_users_process_never_imports_the_workers_side() -> None:
    script = start_script(
        "run(); import sys; print('rm_abstract.worker.__main__' in sys.modules)",
        RM_SIM_COMPILE_S="0",
    )
    output, errors = script.communicate(timeout=120)
    assert output.split() == ["ready", "False"], errors


def test_other_sizes_after_a_fault_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with npu():
        assert run(calls=2, inputs=call_of(2, 6)).right
        assert run(calls=2, inputs=call_of(3, 20)).right
