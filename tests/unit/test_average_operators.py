"""all_reduce_start and all_reduce_wait in a training step: where they stand, what they call, and
what is no program."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from rm_abstract import _core, device

DEPTH, WIDTH = 4, 8


def _forward() -> str:
    """The sum of squares behind products one after the other."""
    lines = ["rmir 1", f'input %0 "x" : f32[2,{WIDTH}]']
    lines += [f'weight %{1 + i} "w{i}" : f32[{WIDTH},{WIDTH}]' for i in range(DEPTH)]
    x, v = 0, 1 + DEPTH
    for i in range(DEPTH):
        lines.append(f"%{v} = linear(%{x}, %{1 + i}) : f32[2,{WIDTH}]")
        lines.append(f"%{v + 1} = tanh(%{v}) : f32[2,{WIDTH}]")
        x, v = v + 1, v + 2
    lines.append(f"%{v} = mul(%{x}, %{x}) : f32[2,{WIDTH}]")
    lines.append(f'%{v + 1} = reduce(%{v}) {{axes=[0,1], keepdim=0, kind="sum"}} : f32[]')
    return "\n".join([*lines, f"return %{v + 1}\n"])


def _step(group: int, buckets: list[list[int]], passes: bool = True, **how: Any) -> str:
    rows = [([f"w{i}"], 0) for i in range(DEPTH)]
    made = _core.autograd.training_step(
        _forward(), {}, rows, [{"algorithm": "sgd"}], group=group, buckets=buckets, **how
    )
    return str(_core.ir.run_passes(made["text"], {}) if passes else made["text"])


class Doubled:
    """A group whose mean is twice what this process sends."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.held: dict[int, list[torch.Tensor]] = {}
        self.fails = ""

    def start(self, bucket: int, tensors: list[torch.Tensor]) -> None:
        self.calls.append(("start", bucket))
        if self.fails == "start":
            raise ConnectionError("nobody is there")
        self.held[bucket] = [t.clone() for t in tensors]

    def wait(self, bucket: int, tensors: list[torch.Tensor]) -> None:
        self.calls.append(("wait", bucket))
        if self.fails == "wait":
            raise ConnectionError("nobody is there")
        for t, sent in zip(tensors, self.held[bucket], strict=True):
            t.copy_(2 * sent)


BUCKETS = [[3], [2, 1], [0]]


def test_a_bucket_starts_before_the_backward_is_over() -> None:
    for text in (_step(0, BUCKETS, passes=False), _step(0, BUCKETS)):
        lines = text.splitlines()
        starts = [i for i, line in enumerate(lines) if "all_reduce_start(" in line]
        waits = [i for i, line in enumerate(lines) if "all_reduce_wait(" in line]
        products = [
            i for i, line in enumerate(lines) if re.search(r"= (linear|matmul|gemm)\(", line)
        ]
        updates = [i for i, line in enumerate(lines) if "= assign(" in line]
        assert len(starts) == len(waits) == 3
        assert [sum(p > s for p in products) for s in starts] == [5, 1, 0]  # still to come
        assert max(starts) < min(waits) and max(waits) < min(updates)
        tokens = [re.match(r"(%\d+) = ", lines[i]).group(1) for i in starts]  # type: ignore[union-attr]
        for before, i in zip(tokens, starts[1:], strict=False):
            assert f", {before})" in lines[i]  # one behind the other


def _run(program: Any, weights: list[torch.Tensor]) -> float:
    hyper = torch.tensor([[0.1, 0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.manual_seed(1)
    return float(program.run([torch.randn(2, WIDTH), hyper, *weights])[0])


def _weights() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(WIDTH, WIDTH) for _ in range(DEPTH)]


def _program(group: Any, buckets: list[list[int]]) -> Any:
    device.load_plugins()
    number = 0 if group is None else _core.add_group(group)
    return _core.Program(_step(number, buckets), {}, ["cpu"], packing="never")


def test_the_update_is_of_what_the_group_gives() -> None:
    group, alone, together = Doubled(), _weights(), _weights()
    start = _weights()
    assert _run(_program(None, []), alone) == _run(_program(group, BUCKETS), together)
    assert group.calls == [(half, i) for half in ("start", "wait") for i in range(3)]
    for w, one, two in zip(start, alone, together, strict=True):
        torch.testing.assert_close(two - w, 2 * (one - w), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("half", ["start", "wait"])
def test_a_group_that_fails_leaves_the_parameters(half: str) -> None:
    group, weights = Doubled(), _weights()
    program = _program(group, BUCKETS)
    group.fails = half
    with pytest.raises(_core.CoreError, match="nobody is there"):
        _run(program, weights)
    assert all(torch.equal(a, b) for a, b in zip(weights, _weights(), strict=True))
    group.fails = ""
    _run(program, weights)
    assert not torch.equal(weights[0], _weights()[0])


def test_a_group_that_is_gone_is_an_error() -> None:
    program = _program(Doubled(), BUCKETS)  # nobody else holds it
    with pytest.raises(_core.CoreError, match="group of processes"):
        _run(program, _weights())


def test_without_an_update_nothing_is_averaged() -> None:
    assert "all_reduce" not in _step(0, BUCKETS, update=False)


@pytest.mark.parametrize(
    "line, why",
    [
        ("%2 = all_reduce_start(%0, %1) {bucket=0, group=0} : i32[1]", "floating"),
        ("%2 = all_reduce_start(%1) {bucket=-1, group=0} : i32[1]", "bucket"),
        ("%2 = all_reduce_wait(%0) {bucket=0, group=0} : f32[2]", "start"),
    ],
)
def test_what_is_no_average_is_refused(line: str, why: str) -> None:
    text = f'rmir 1\ninput %0 "n" : i64[2]\ninput %1 "t" : i32[1]\n{line}\nreturn %2\n'
    with pytest.raises(_core.CoreError, match=why):
        _core.ir.run_passes(text, {})
