"""The operator `adam`: kernels of every level and torch's translation against torch.optim."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rm_abstract import _core, device
from rm_abstract.worker.ir_to_torch import ir_to_torch

_LEVELS = ("avx2", "baseline")
_LR, _BETAS, _DECAY = 0.01, (0.9, 0.99), 0.1
_DTYPES = {torch.float32: "f32", torch.float64: "f64"}


def _text(p: torch.Tensor, count: int, attrs: str = "", apply: bool = False) -> str:
    """One update; ``count`` states, two or three."""
    whole = f"{_DTYPES[p.dtype]}[{','.join(map(str, p.shape))}]"
    lines = ["rmir 1", f'input %0 "parameter" : {whole} donated', f'input %1 "gradient" : {whole}']
    lines += [f'input %{2 + i} "state{i}" : {whole} donated' for i in range(count)]
    n = 2 + count
    lines.append(f'input %{n} "numbers" : {_DTYPES[p.dtype]}[8]')
    if apply:
        lines.append(f'input %{n + 1} "apply" : bool[]')
    operands = ["%0", "%1", "%2", "%3", f"%{n}"]
    if count == 3:
        operands.append("%4")
    elif apply:
        operands.append("_")
    if apply:
        operands.append(f"%{n + 1}")
    first = n + 2
    results = ", ".join(f"%{first + i}" for i in range(count + 1))
    types = ", ".join([whole] * (count + 1))
    lines.append(f"{results} = adam({', '.join(operands)}) {attrs}: {types}")
    made = []
    for i in range(count + 1):
        into = "%0" if i == 0 else f"%{1 + i}"
        made.append(f"%{first + count + 1 + i}")
        lines.append(f"{made[-1]} = assign({into}, %{first + i}) : {whole}")
    return "\n".join([*lines, f"return {', '.join(made)}"]) + "\n"


def _numbers(step: int, dtype: torch.dtype, eps: float, lr: float = _LR) -> torch.Tensor:
    b1, b2 = _BETAS
    row = [_DECAY, 1 - lr * _DECAY, 1 - b1, b2, 1 - b2, eps]
    return torch.tensor([*row, lr / (1 - b1**step), math.sqrt(1 - b2**step)], dtype=dtype)


def _runs(text: str, level: str) -> Any:
    if level == "torch":
        module = ir_to_torch(text, {}, {"assign": lambda o, n: o[0].copy_(o[1])})
        return lambda arrays: module.evaluate(arrays, ())
    device.load_plugins()
    if level == "avx2" and "avx2" not in torch.backends.cpu.get_cpu_capability().lower():
        if "avx512" not in torch.backends.cpu.get_cpu_capability().lower():
            pytest.skip("the machine has no AVX2")
    return _core.Program(text, {}, ["cpu"], f"adam_pass_{level}", packing="never").run


@pytest.mark.parametrize("level", [*_LEVELS, "torch"])
@pytest.mark.parametrize(
    ("amsgrad", "decay", "maximize"),
    [(False, "none", 0), (True, "gradient", 1), (True, "parameter", 0), (False, "parameter", 1)],
)
@pytest.mark.parametrize("dtype", list(_DTYPES))
def test_steps_are_torchs(
    level: str, amsgrad: bool, decay: str, maximize: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (5, 7, 3)  # no whole number of vectors
    start = torch.randn(shape, generator=generator, dtype=dtype)
    wanted = torch.nn.Parameter(start.clone())
    kind: Any = torch.optim.AdamW if decay == "parameter" else torch.optim.Adam
    optimizer = kind(
        [wanted],
        lr=_LR,
        betas=_BETAS,
        weight_decay=0.0 if decay == "none" else _DECAY,
        amsgrad=amsgrad,
        maximize=bool(maximize),
    )
    arrays = [start.clone(), *(torch.zeros(shape, dtype=dtype) for _ in range(3 if amsgrad else 2))]
    run = _runs(_text(start, len(arrays) - 1, f'{{decay="{decay}", maximize={maximize}}} '), level)
    for step in range(1, 6):
        wanted.grad = torch.randn(shape, generator=generator, dtype=dtype)
        run([arrays[0], wanted.grad, *arrays[1:], _numbers(step, dtype, 1e-8)])
        optimizer.step()
    bound = 2e-6 if dtype == torch.float32 else 1e-14
    state = optimizer.state[wanted]
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]
    for got, good in zip(arrays, [wanted.detach(), *(state[n] for n in names)], strict=True):
        torch.testing.assert_close(got, good, rtol=bound, atol=bound)


@pytest.mark.parametrize("level", [*_LEVELS, "torch"])
def test_what_does_not_apply_changes_nothing(level: str, seed: int) -> None:
    torch.manual_seed(seed)
    arrays = [torch.randn(33), torch.full((33,), math.nan), torch.randn(33), torch.rand(33)]
    before = [a.clone() for a in arrays]
    run = _runs(_text(arrays[0], 2, apply=True), level)
    numbers = _numbers(1, torch.float32, 1e-8)
    run([*arrays, numbers, torch.tensor(False)])
    for got, was in zip(arrays, before, strict=True):
        assert torch.equal(got, was) or bool(was.isnan().all())
    arrays[1].fill_(1.0)
    run([*arrays, numbers, torch.tensor(True)])
    assert not torch.equal(arrays[0], before[0])


@pytest.mark.parametrize("level", _LEVELS)
def test_operands_of_any_strides(level: str, seed: int) -> None:
    torch.manual_seed(seed)
    shape = (6, 4, 3)
    dense = [torch.randn(shape), torch.randn(shape), torch.randn(shape), torch.rand(shape)]
    strided = [t.transpose(0, 2).contiguous().transpose(0, 2) for t in dense]
    strided[1] = torch.randn(4, 1).expand(6, 4, 3)  # a gradient that repeats
    dense[1] = strided[1].contiguous()
    numbers = _numbers(3, torch.float32, 1e-8)
    run = _runs(_text(dense[0], 2), level)
    run([*dense, numbers])
    run([*strided, numbers])
    for a, b in zip(dense, strided, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("level", _LEVELS)
def test_small_moments_become_zero_only_where_nobody_sees_it(level: str) -> None:
    """Decision 0140: with torch's eps the parameters stay eager's, with a tiny one moments do."""
    tiny = torch.tensor([1e-39, 3e-20, 1e-25, 1.0]).repeat(8)
    for eps in (1e-8, 1e-30):
        wanted = torch.nn.Parameter(torch.ones(32))
        optimizer = torch.optim.Adam([wanted], lr=_LR, betas=_BETAS, eps=eps)
        arrays = [torch.ones(32), torch.zeros(32), torch.zeros(32)]
        run = _runs(_text(arrays[0], 2), level)
        for step in range(1, 4):
            wanted.grad = tiny.clone()
            optimizer.step()
            run([arrays[0], tiny, *arrays[1:], _numbers(step, torch.float32, eps)])
        torch.testing.assert_close(arrays[0], wanted.detach(), rtol=1e-6, atol=0)
        square = arrays[2][1]  # of 3e-20: below the smallest normal number
        assert (float(square) > 0) == (eps < 1e-10)


def test_wrong_operands_are_told_by_name() -> None:
    good = _text(torch.empty(4), 2)
    for was, becomes in (
        ('"numbers" : f32[8]', '"numbers" : f32[7]'),
        ('"gradient" : f32[4]', '"gradient" : f32[5]'),
        ('"state1" : f32[4] donated', '"state1" : f64[4] donated'),
        ("adam(%0, %1, %2, %3, %4) :", 'adam(%0, %1, %2, %3, %4) {decay="often"} :'),
    ):
        assert was in good
        with pytest.raises(_core.CoreError, match=r"\[adam\] expected"):
            _core.Program(good.replace(was, becomes), {}, ["cpu"])
