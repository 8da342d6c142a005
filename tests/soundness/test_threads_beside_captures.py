"""A capture changes nothing for other threads: what they warn, log and print meanwhile comes
through, and what they save of the process's state before it and put back after it is theirs."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from soundness import Base, X, quiet, routed
from torch.export import _trace as trace_of_export

from rm_abstract.guards import oracle, sources

LOG = "torch.fx.experimental.symbolic_shapes"


class Scaled(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x)) * 2


def in_thread(work: Callable[[], Any]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.fixture
def during_export(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """What is put into this list is done in the middle of the next torch.export."""
    todo: list[Callable[[], Any]] = []
    stock = torch.export.export

    def export(*args: Any, **kwargs: Any) -> Any:
        while todo:
            todo.pop()()
        return stock(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", export)
    return todo


def captured(model: Base, calls: int = 3) -> None:
    for _ in range(calls):
        quiet(lambda: model(X))
    assert routed(model) == 2


def test_another_threads_warnings_come_through(during_export: list[Callable[[], Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)

        def warn() -> None:
            with pytest.raises(UserWarning, match="of the user"):
                warnings.warn("of the user", UserWarning, stacklevel=1)

        during_export.append(lambda: in_thread(warn))
        captured(Scaled().eval())
    assert not during_export


def test_warnings_of_the_capture_itself_are_not_shown(
    during_export: list[Callable[[], Any]],
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        during_export.append(lambda: warnings.warn("of torch", UserWarning, stacklevel=1))
        captured(Scaled().eval())
    assert not during_export
    assert not [w for w in caught if "of torch" in str(w.message)]


def test_filters_saved_in_the_middle_of_a_capture_are_put_back_whole(
    during_export: list[Callable[[], Any]],
) -> None:
    """Python's own catch_warnings puts back the filters it found: were these the capture's, the
    user's thread would never warn again."""
    theirs = warnings.catch_warnings()
    during_export.append(lambda: in_thread(theirs.__enter__))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        captured(Scaled().eval())
        in_thread(lambda: theirs.__exit__(None, None, None))
        with pytest.raises(UserWarning, match="later"):
            warnings.warn("later", UserWarning, stacklevel=1)


def test_another_thread_logs_and_prints_what_it_would(
    during_export: list[Callable[[], Any]],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def say(who: str) -> None:
        logging.getLogger(LOG).warning("logged by %s", who)
        vars(trace_of_export).get("print", print)(f"printed by {who}")

    during_export.append(lambda: in_thread(lambda: say("the user")))
    during_export.append(lambda: say("the capture"))
    level = logging.getLogger(LOG).level
    captured(Scaled().eval())
    assert not during_export
    assert "logged by the user" in caplog.text and "logged by the capture" not in caplog.text
    assert capsys.readouterr().out == "printed by the user\n"
    assert logging.getLogger(LOG).level == level and "print" not in vars(trace_of_export)


def test_dynamo_is_not_asked_while_torch_export_is_at_work(
    during_export: list[Callable[[], Any]],
) -> None:
    """Both set torch.compiler's flags and put back what they found: of two at once the one that
    ends last may leave them set, and every later call of the process stays in PyTorch."""
    model, other = Scaled().eval(), Scaled().eval()
    found = sources.of_module(other)
    assert not oracle.uncovered(other, (X,), {}, found)  # imports and warms dynamo
    asking = threading.Thread(target=lambda: oracle.uncovered(other, (X,), {}, found))
    waited: list[bool] = []

    def ask() -> None:
        asking.start()
        asking.join(2.0)  # without the lock it ends in much less
        waited.append(asking.is_alive())

    during_export.append(ask)
    quiet(lambda: model(X))
    asking.join()
    assert waited == [True]
    assert not torch.compiler._is_compiling_flag and not torch.compiler._is_exporting_flag
    captured(model, calls=2)
