"""The end of a step by torch: what our own launch has to give (tests/cuda/test_sampling.py)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from rm_abstract.generation.step_end import end_step  # noqa: E402


@pytest.mark.parametrize("padded", [False, True])
def test_rows_that_ended_get_pad_and_stay_ended(padded: bool) -> None:
    found, length = torch.zeros(4, 3, dtype=torch.long), torch.tensor(1)
    positions, going = torch.tensor([[5], [6], [7]]), torch.tensor([True, False, True])
    eos, pad = torch.tensor([2, 8]), torch.tensor(0) if padded else None
    tokens = torch.tensor([1, 1, 8])
    end_step(tokens, found, length, positions, going, eos, pad)
    assert found.tolist()[1] == tokens.tolist() == [1, 0 if padded else 1, 8]
    assert going.tolist() == [True, False, False]
    assert int(length) == 2 and positions.tolist() == [[6], [7], [8]]
    tokens.copy_(torch.tensor([2, 3, 4]))
    end_step(tokens, found, length, None, going, eos, pad)
    assert found.tolist()[2] == [2, *([0, 0] if padded else [3, 4])] and not going.any()
    assert int(length) == 3 and positions.tolist() == [[6], [7], [8]]


def test_without_ends_every_row_goes_on() -> None:
    found, length = torch.zeros(2, 2, dtype=torch.long), torch.tensor(0)
    going = torch.tensor([False, True])
    end_step(torch.tensor([3, 4]), found, length, None, going, None, None)
    assert found.tolist() == [[3, 4], [0, 0]] and going.tolist() == [False, True]


def test_the_mask_is_ready_for_the_next_step() -> None:
    found, length = torch.zeros(9, 2, dtype=torch.long), torch.tensor(1)
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 0]])
    seen = []
    for _ in range(4):  # the last finds no column
        end_step(torch.tensor([3, 4]), found, length, None, torch.ones(2).bool(), None, None, mask)
        seen.append(mask.tolist())
    assert seen[0] == [[1, 1, 1, 0], [0, 1, 1, 0]]
    assert seen[1] == seen[2] == seen[3] == [[1, 1, 1, 1], [0, 1, 1, 1]]
