"""Several programs of one worker run at once where the plugin says so, and one at a time where it
does not: each program waits inside the device's software until another one is there, too."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from small_plugins import small_model, small_plugin

import rm_abstract as rm
from rm_abstract.plugin import Device, PythonPlugin

STRICT = "error:capture,compile,device,correctness,cache"

MEET = """
if os.path.exists({switch!r}):
    MEETING.wait({wait_s})
"""
POISON = """
if os.path.exists({switch!r}):
    try:
        MEETING.wait({wait_s})
    except threading.BrokenBarrierError:
        pass  # it runs alone
    if inputs[0].shape[-1] == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)  # until the other one has killed it
"""


def both(
    name: str,
    executions: int,
    wait_s: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str = MEET,
) -> list[object]:
    """What the calls of two models in two threads gave: whether it is right, or the error."""
    switch = folder / "meet"
    before = before.format(switch=str(switch), wait_s=wait_s)
    small_plugin(name, executions, before, folder, monkeypatch)
    torch.manual_seed(7)
    found: list[object] = [None, None]
    with rm.init(f"{name}:0", fallback=STRICT), torch.no_grad():
        models = [small_model(8), small_model(24)]
        inputs = [torch.randn(3, 8), torch.randn(3, 24)]
        expected = [one(x) for one, x in zip(models, inputs, strict=True)]
        for one, x in zip(models, inputs, strict=True):
            rm.accelerate(one)
            for _ in range(2):  # captured, compiled, compared; then served
                one(x)
        switch.touch()

        def call(i: int) -> None:
            with torch.no_grad():
                try:
                    got = models[i](inputs[i])
                    found[i] = torch.allclose(got, expected[i], atol=1e-5)
                except rm.Error as error:
                    found[i] = error

        threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


def test_programs_of_two_models_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert both("meeting", 2, 100, tmp_path, monkeypatch) == [True, True]


def test_without_the_plugins_word_one_runs_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = both("alone", 1, 1, tmp_path, monkeypatch)
    for error in (first, second):  # it waited for the other one, which cannot come
        assert isinstance(error, rm.ExecutionError) and error.code == "RM307", error
        assert "BrokenBarrier" in str(error)


def test_a_program_that_kills_its_worker_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both calls meet the crash and are repeated: not beside each other, or the one that is not to
    blame would meet it again."""
    poison, other = both("poison", 2, 2, tmp_path, monkeypatch, POISON)
    assert isinstance(poison, rm.ExecutionError) and poison.code == "RM303", poison
    assert other is True, other


@pytest.mark.parametrize("executions", [0, 9])
def test_a_number_that_no_worker_serves_is_refused(executions: int) -> None:
    with pytest.raises(ValueError, match="executions of 1 to 8"):
        PythonPlugin(
            name="zeta", version="1", worker="a:B", devices=lambda: [Device("a", "b")],
            why_not=lambda operator, dtypes: "", executions=executions,
        )  # fmt: skip
