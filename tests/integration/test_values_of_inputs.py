"""Calls whose sizes and branches follow from the values of a few integers (decision 0239): they are
compiled for these values, and other values are noticed however they came about."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rm_abstract as rm
from rm_abstract.engines import first_call


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    torch.manual_seed(0)
    rm.init("cpu")
    yield
    rm.shutdown()


class Split(torch.nn.Module):
    """Sums rows in parts whose lengths a tensor says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        parts = torch.split(self.linear(x), lengths.tolist())
        return torch.stack([part.sum(0) for part in parts])


class Branch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        for _ in range(int(n[0])):
            x = self.linear(x).relu()
        return x * 2 if (n > 2).any() else x


class Marked(torch.nn.Module):
    """Rows that a mask chooses, which is made from lengths and from the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, until: torch.Tensor) -> torch.Tensor:
        chosen = torch.arange(x.shape[0]) < until[0]
        chosen[until[1] :] = False
        return self.linear(x)[chosen].cumsum(0)


class Repeated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(9, 6)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        counts = counts.clone()
        counts += 1
        places = torch.arange(len(counts)).repeat_interleave(counts)
        return self.table(places) + x.repeat_interleave(counts, 0)


class Counting(torch.nn.Module):
    """As many steps as a length says that is added to the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        for _ in range((more * x.shape[0]).tolist()[0]):
            x = self.linear(x).tanh()
        return x


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 6)


def agree(model: torch.nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        with rm.disabled():
            wanted = model(*inputs)
        got = model(*inputs)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    return wanted


def told(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = rm.explain(model).to_dict()["models"][0]
    return found


def routed(model: Any) -> int:
    return int(told(model)["routed"])


CASES = [
    (Split, [[3, 4], [4, 3], [1, 6]], 7),
    (Branch, [[2, 0], [3, 0], [2, 5]], 4),
    (Marked, [[3, 9], [4, 9], [4, 2]], 5),
    (Repeated, [[1, 2, 0], [0, 0, 0], [2, 2, 2]], 3),
    (Counting, [[1], [2], [0]], 3),
]


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize(("made", "values", "count"), CASES)
def test_other_values_are_noticed_and_known_ones_served(
    made: Callable[[], torch.nn.Module], values: list[list[int]], count: int, kind: torch.dtype
) -> None:
    model = rm.accelerate(made().eval())
    given = torch.tensor(values[0], dtype=kind)
    for _ in range(3):
        agree(model, rows(count), given)
    assert routed(model) == 2
    for other in values[1:]:
        given.copy_(torch.tensor(other))  # in place: the same tensor
        agree(model, rows(count), given)
        agree(model, rows(count), given)
    for again in values:
        before = routed(model)
        agree(model, rows(count), torch.tensor(again, dtype=kind))
        assert routed(model) == before + 1
    given.data[0] = values[0][0]
    given.numpy()[1:] = values[0][1:]  # writes that no version counts
    agree(model, rows(count), given)
    assert str(values[0]) in told(model)["entries"][0]["signature"]


def test_a_size_that_was_read_with_the_values_is_a_condition_too() -> None:
    for made, value, sizes in ((Marked, [4, 9], (5, 3, 8)), (Counting, [1], (3, 4, 2))):
        model = rm.accelerate(made().eval())
        given = torch.tensor(value)
        for size in (*sizes, *sizes, *sizes):
            agree(model, rows(size), given)
        assert routed(model) == 6


def test_only_so_many_values_are_compiled_for() -> None:
    model = rm.accelerate(Split().eval())
    most = first_call.MOST_BY_VALUES
    for first in range(1, most + 4):
        agree(model, rows(12), torch.tensor([first, 12 - first]))
    assert len(told(model)["entries"]) == most
    (reason,) = [r for r in told(model)["reasons"] if r["code"] == "RM121"]
    assert reason["calls"] == 3 and "lengths" in reason["detail"]
    before = routed(model)
    agree(model, rows(12), torch.tensor([1, 11]))
    assert routed(model) == before + 1


def test_values_are_compared_under_strict_guards_and_by_several_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rm.shutdown()
    monkeypatch.setenv("RM_GUARD", "strict")
    rm.init("cpu")
    model = rm.accelerate(Split().eval())
    cases = [torch.tensor([n, 9 - n]) for n in (2, 3, 7)]
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for turn in range(12):
                agree(model, rows(9), cases[(turn + number) % 3])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert routed(model) > 0


def test_what_the_values_are_wrong_for_raises_what_eager_raises() -> None:
    model = rm.accelerate(Split().eval())
    for _ in range(2):
        agree(model, rows(7), torch.tensor([3, 4]))
    with pytest.raises(RuntimeError, match="split_with_sizes"), torch.no_grad():
        model(rows(7), torch.tensor([3, 5]))
    agree(model, rows(7), torch.tensor([3, 4]))
    assert routed(model) == 2


SCRIPT = """
    import sys, torch
    sys.path.insert(0, {folder!r})
    from test_values_of_inputs import Marked, Split, rm
    rm.init("cpu")
    torch.manual_seed(3)
    model, marked = Split().eval(), Marked().eval()
    rm.accelerate(model)
    rm.accelerate(marked)
    x = torch.randn(7, 6)
    with torch.no_grad():
        for lengths in ([3, 4], [5, 2], [5, 2], [1, 6]):
            given = torch.tensor(lengths)
            with rm.disabled():
                wanted = model(x, given), marked(x, given)
            got = model(x, given), marked(x, given)
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    entries = [e for row in rm.explain().to_dict()["models"] for e in row["entries"]]
    print(sum(e["cache"] == "hit" and "=[" in e["signature"] for e in entries))
"""


def test_another_process_takes_the_programs_of_its_values(tmp_path: Path) -> None:
    script = textwrap.dedent(SCRIPT.format(folder=os.path.dirname(__file__)))
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "RM_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(int(done.stdout.split()[-1]))
    assert found == [0, 6]


class Chosen(torch.nn.Module):
    """Leaves out pictures that are empty, as Idefics 3 does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 5)

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        full = (pixels == 0).sum(-1) != pixels.shape[-1]
        counts = full.view(2, -1).sum(1)
        return self.linear(pixels[full]).split(counts.tolist())


def test_rows_that_a_mask_chose_are_checked_by_the_program() -> None:
    model = rm.accelerate(Chosen().eval())
    wanted = got = ()
    for turn in range(9):
        pixels = rows(6)
        if turn in (3, 5):
            pixels[turn] = 0
        with torch.no_grad():
            with rm.disabled():
                wanted = model(pixels)
            got = model(pixels)
        assert len(got) == len(wanted)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert routed(model) == 6
    reasons = {r["code"]: r["calls"] for r in told(model)["reasons"]}
    assert reasons["RM120"] == 2


def test_random_numbers_and_tokens_are_never_told() -> None:
    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 5)

    class Drawn(Linear):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return self.linear(x)[: int(torch.randint_like(n, 1, 4)[0])]

    class Tokens(Linear):
        def forward(self, x: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
            return self.linear(x)[: input_ids.tolist()[0]]

    for made in (Drawn, Tokens):
        model = rm.accelerate(made().eval())
        for turn in range(4):
            given = torch.tensor([turn + 1])
            torch.manual_seed(turn)
            with torch.no_grad(), rm.disabled():
                wanted = model(rows(6), given)
            torch.manual_seed(turn)
            with torch.no_grad():
                got = model(rows(6), given)
            assert torch.equal(got, wanted)
        assert routed(model) == 0
