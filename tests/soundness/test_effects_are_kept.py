"""A forward with an effect has exactly eager's effects, at every call, and the user's objects never
hold a stand-in of torch.export's.
"""

from __future__ import annotations

import cProfile
import io
import itertools
import queue
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from soundness import Base, X, quiet, routed, same_as_eager
from torch import nn

CALLS = 5


class WritesToStdout(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.stdout.write("called\n")
        return self.inner(x)


class Prints(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("called")
        return self.inner(x)


class PrintsThroughMap(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        list(map(print, ["called"]))
        return self.inner(x)


@pytest.mark.parametrize("kind", [WritesToStdout, Prints, PrintsThroughMap])
@pytest.mark.parametrize("profiled", [False, True])
def test_text_is_written_at_every_call(
    kind: type[nn.Module], profiled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = kind().eval()
    profiler = cProfile.Profile()
    if profiled:
        profiler.enable()
    for _ in range(CALLS):
        quiet(lambda: model(X))
    profiler.disable()
    assert capsys.readouterr().out == "called\n" * CALLS


class KeepsIn(Base):
    """Gives what it computed to `keep`, a way out of forward that a test chooses."""

    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.results = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.inner(x))
        self.results.put(y)
        return y


class Collector:
    """A place of the user's own, behind two objects."""

    def __init__(self) -> None:
        self.inside: dict[str, list[torch.Tensor]] = {"all": []}

    def put(self, value: torch.Tensor) -> None:
        self.inside["all"].append(value)

    def values(self) -> list[torch.Tensor]:
        return self.inside["all"]


@pytest.mark.parametrize("make", [queue.Queue, queue.SimpleQueue, Collector])
def test_a_queue_gets_one_real_tensor_a_call(make: Callable[[], Any]) -> None:
    keep = make()
    model = KeepsIn(keep).eval()
    outputs = [quiet(lambda: model(X)) for _ in range(CALLS)]
    if isinstance(keep, Collector):
        values = keep.values()
    else:
        values = [keep.get_nowait() for _ in range(keep.qsize())]
    assert [type(v) for v in values] == [torch.Tensor] * CALLS
    assert all(torch.equal(a, b) for a, b in zip(values, outputs, strict=True))


class Counts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.count = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + next(self.count)


def test_a_counter_of_itertools_counts_every_call() -> None:
    model = Counts().eval()
    with torch.no_grad():
        base = model.inner(X)
    for i in range(CALLS):
        torch.testing.assert_close(quiet(lambda: model(X)), base + i)


class WritesToAFile(Base):
    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.stream = stream

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stream.write("x")
        return self.inner(x)


def test_a_file_gets_a_line_a_call(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as stream:
        model = WritesToAFile(stream).eval()
        for _ in range(CALLS):
            quiet(lambda: model(X))
    assert (tmp_path / "log").read_text() == "x" * CALLS


def test_a_text_buffer_gets_a_line_a_call() -> None:
    stream = io.StringIO()
    model = WritesToAFile(stream).eval()
    for _ in range(CALLS):
        quiet(lambda: model(X))
    assert stream.getvalue() == "x" * CALLS


class SavesThroughALibrary(Base):
    path = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with open(self.path, "ab") as stream:
            torch.save(y, stream)
        return y


class WritesThroughPathlib(Base):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (self.folder / "touched").touch(exist_ok=False)
        return self.inner(x)


def test_files_written_through_a_library_are_written_at_every_call(tmp_path: Path) -> None:
    model = WritesThroughPathlib(tmp_path).eval()
    for _ in range(CALLS):
        quiet(lambda: model(X))
        (tmp_path / "touched").unlink()


class Draws(Base):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.draw()


OWN = random.Random(3)


@pytest.mark.parametrize(
    "draw",
    [random.random, OWN.random, lambda: float(torch.rand(()))],
    ids=["python", "own", "torch"],
)
def test_random_streams_are_used_as_in_eager(draw: Callable[[], float]) -> None:
    model = Draws(draw).eval()

    def run() -> list[torch.Tensor]:
        random.seed(1)
        OWN.seed(1)
        torch.manual_seed(1)
        return [quiet(lambda: model(X)) for _ in range(CALLS)]

    import rm_abstract as rm

    with rm.disabled():
        expected = run()
    torch.testing.assert_close(run(), expected)


class ReseedsTorch(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return self.inner(x)


def test_a_forward_that_seeds_torch_seeds_it_at_every_call() -> None:
    model = ReseedsTorch().eval()
    for _ in range(CALLS):
        torch.manual_seed(1)
        quiet(lambda: model(X))
        first = torch.rand(())
        torch.manual_seed(7)
        assert torch.equal(first, torch.rand(()))


class Pure(Base):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return torch.relu(self.inner(x))


def test_a_profiler_delays_compiling_and_no_longer() -> None:
    model = Pure().eval()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(3):
        quiet(lambda: model(X))
    profiler.disable()
    for _ in range(3):
        same_as_eager(model, X)
    assert routed(model) == 2


def test_a_capture_leaves_another_threads_eager_calls_alone() -> None:
    class Slow(Pure):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.lock:
                y = self.parts(x)
            return y[: x.shape[0]]

    model = Slow().eval()
    import rm_abstract as rm

    with rm.disabled(), torch.no_grad():
        expected = model(X)
    failures: list[BaseException] = []
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            try:
                with rm.disabled(), torch.no_grad():
                    torch.testing.assert_close(model(X), expected)
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        torch.testing.assert_close(quiet(lambda: model(X)), expected, rtol=1e-4, atol=1e-5)
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert routed(model) >= 1
