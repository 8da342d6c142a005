"""Values computed twice under a memory budget: same numbers, less alive at once."""

from __future__ import annotations

import random

import pytest

from rm_abstract import _core

_LAYERS, _N = 6, 8
_BYTES = 8 * _N * _N


def _chain() -> str:
    """y_i = tanh(exp(y_(i-1) w)), and a sum over products with every y_i from behind."""
    lines = ["rmir 1", f'input %0 "x" : f64[{_N},{_N}]', f'input %1 "w" : f64[{_N},{_N}]']
    t = f"f64[{_N},{_N}]"
    value, last, made = 2, 0, []
    for _ in range(_LAYERS):
        lines.append(f"%{value} = matmul(%{last}, %1) : {t}")
        lines.append(f"%{value + 1} = exp(%{value}) : {t}")
        lines.append(f"%{value + 2} = tanh(%{value + 1}) : {t}")
        last = value + 2
        made.append((value + 1, value + 2))
        value += 3
    total = last
    for e, y in reversed(made):
        lines.append(f"%{value} = mul(%{total}, %{y}) : {t}")
        lines.append(f"%{value + 1} = add(%{value}, %{e}) : {t}")
        total = value + 1
        value += 2
    lines.append(f"return %{total}")
    return "\n".join(lines) + "\n"


def test_the_numbers_stay_and_less_is_alive(seed: int) -> None:
    draw = random.Random(seed)
    text = _chain()
    values = [[draw.uniform(-0.2, 0.2) for _ in range(_N * _N)] for _ in range(2)]
    wanted = _core.autograd.evaluate(text, values)
    before = _core.ir.recompute(text, 1 << 40)
    assert before["values"] == [] and before["after"] == before["before"]
    least = before["before"]
    for part in (0.8, 0.6, 0.5):
        made = _core.ir.recompute(text, int(part * before["before"]))
        assert made["after"] <= part * before["before"] < before["before"]
        assert made["after"] < least or part == 0.8
        least = made["after"]
        assert _core.autograd.evaluate(made["text"], values) == wanted


def test_the_cheapest_for_its_size_is_computed_first() -> None:
    text = _chain()
    before = _core.ir.recompute(text, 0)["before"]
    made = _core.ir.recompute(text, before - 1)
    assert [(v["operator"], v["operators"], v["bytes"]) for v in made["values"]] == [
        ("tanh", 1, _BYTES)
    ]
    assert 0 < made["values"][0]["share"] < 0.1


def test_a_budget_that_nothing_meets_gives_the_nearest_and_ends() -> None:
    made = _core.ir.recompute(_chain(), 0)
    assert 0 < made["after"] < made["before"]
    again = _core.ir.recompute(made["text"], made["after"])
    assert again["values"] == []


@pytest.mark.parametrize("operator", ["assign", "aten.foo.default"])
def test_what_may_not_run_twice_does_not(operator: str) -> None:
    """The first value is read at both ends, and its maker is no pure operator of ours."""
    t = f"f64[{_N},{_N}]"
    first = {
        "assign": f"%2 = assign(%0, %1) : {t}",
        "aten.foo.default": f'%2 = aten.foo.default(%0) {{schema_args="[]"}} : {t}',
    }[operator]
    lines = ["rmir 1", f'input %0 "x" : {t} donated', f'input %1 "w" : {t}', first]
    lines += [f"%3 = exp(%2) : {t}", f"%4 = matmul(%3, %1) : {t}", f"%5 = exp(%4) : {t}"]
    lines += [f"%6 = mul(%5, %3) : {t}", f"%7 = mul(%6, %2) : {t}", "return %7"]
    made = _core.ir.recompute("\n".join(lines) + "\n", 0)
    assert made["text"].count(operator) == 1


def test_a_value_that_is_read_through_views_is_computed_again_with_them() -> None:
    t = f"f64[{_N},{_N}]"
    flat = f"f64[{_N * _N}]"
    lines = ["rmir 1", f'input %0 "x" : {t}', f"%1 = exp(%0) : {t}"]
    lines += [f"%2 = reshape(%1) {{shape=<{_N * _N}>}} : {flat}"]
    lines += [f"%3 = tanh(%1) : {t}", f"%4 = matmul(%3, %3) : {t}", f"%5 = matmul(%4, %4) : {t}"]
    lines += [f"%6 = reshape(%5) {{shape=<{_N * _N}>}} : {flat}", f"%7 = mul(%6, %2) : {flat}"]
    text = "\n".join([*lines, "return %7"]) + "\n"
    made = _core.ir.recompute(text, 2 * _BYTES)
    assert made["after"] < made["before"] and made["text"].count(" = exp(") == 2
    values = [[0.01 * i for i in range(_N * _N)]]
    assert _core.autograd.evaluate(made["text"], values) == _core.autograd.evaluate(text, values)
