"""Functions made of others equal torch's, over wide ranges and at their edges: signed zeros,
infinities, NaN, poles, numbers that overflow and numbers that vanish."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_capture_operators import Wrapped

from rm_abstract import _core, device
from rm_abstract.capture.export import capture
from rm_abstract.capture.outputs import builder

S = torch.special
EDGES = torch.tensor(
    [
        *(0.0, -0.0, 1, -1, 2, -2, 0.5, -0.5, 3, 5, -5, 8, -8, 10.5, -10.5, 20, -20, 100, -100),
        *(1e-6, 1e-30, -1e-30, 1e30, -1e30, 0.999999, -0.999999, math.inf, -math.inf, math.nan),
    ]
)
RANGE = torch.cat(
    [torch.linspace(-30, 30, 3001), torch.linspace(-1, 1, 501), torch.logspace(-6, 3, 300)]
)


def run(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """The function, compiled, without a call of PyTorch."""
    device.load_plugins()
    captured = capture(Wrapped(function).eval(), tensors, {})
    assert not captured.kept, [k.op for k in captured.kept]
    text = _core.ir.run_passes(_core.ir.canonical(captured.ir))
    program = _core.Program(text, {}, ["cpu"])
    return builder(captured.output)(program.run(list(tensors)), tensors)


UNARY: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {
    "error functions": [torch.erfc, S.erfcx, S.log_ndtr, torch.erfinv, S.ndtri, S.entr],
    "gamma functions": [torch.lgamma, torch.digamma],
    "modified Bessel functions": [torch.i0, S.i1, S.i0e, S.i1e],
    "their second kind": [
        S.modified_bessel_k0,
        S.modified_bessel_k1,
        S.scaled_modified_bessel_k0,
        S.scaled_modified_bessel_k1,
    ],
    "Bessel functions": [
        S.bessel_j0,
        S.bessel_j1,
        S.bessel_y0,
        S.bessel_y1,
        S.spherical_bessel_j0,
    ],
    "logarithms and roundings": [
        torch.log2,
        torch.log10,
        lambda x: torch.round(x, decimals=2),
        lambda x: torch.round(x, decimals=-1),
        lambda x: torch.signbit(x).float(),
        torch.angle,
    ],
}


@pytest.mark.parametrize("family", UNARY)
def test_a_family_of_functions_equals_torchs(family: str) -> None:
    functions = UNARY[family]
    x = torch.cat([EDGES, RANGE])
    # Near the zeros of an oscillating function what counts is its amplitude.
    floor = 1e-3 if family == "gamma functions" else 2e-6 if "Bessel" in family else 1e-7
    for function, found in zip(functions, run(lambda x: [f(x) for f in functions], x), strict=True):
        expected = function(x)
        name = getattr(function, "__name__", "lambda")
        torch.testing.assert_close(
            found,
            expected,
            rtol=2e-5,
            atol=floor,
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_trigamma_equals_torchs_beside_its_poles() -> None:
    x = torch.cat([torch.linspace(-9.9, 30, 400) + 1e-3, torch.tensor([0.5, 1, 1e10, math.nan])])
    x = x[(x - x.round()).abs() > 0.02]  # beside a pole torch's own sine in f32 is inexact
    found = run(lambda x: torch.polygamma(1, x), x)
    expected = torch.polygamma(1, x.double()).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, equal_nan=True)


def test_powers_of_a_base_have_whole_logarithms() -> None:
    twos, tens = 2.0 ** torch.arange(-126, 128), 10.0 ** torch.arange(0, 11)
    assert torch.equal(run(torch.log2, twos), torch.arange(-126, 128).float())
    assert torch.equal(run(torch.log10, tens), torch.arange(0, 11).float())


BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "fmod": torch.fmod,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "copysign": torch.copysign,
    "heaviside": torch.heaviside,
    "isclose": lambda a, b: torch.isclose(a, b, equal_nan=True).float(),
}


def test_every_pair_of_edges_gives_torchs_number_and_sign() -> None:
    pairs = torch.cartesian_prod(EDGES, EDGES)
    a, b = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    results = run(lambda a, b: [f(a, b) for f in BINARY.values()], a, b)
    for (name, function), found in zip(BINARY.items(), results, strict=True):
        expected = function(a, b)
        if name == "fmod":  # torch's vectors give NaN where the quotient has more than 2^96
            vast = (a.abs() > 1e29) & (b.abs() < 1e-29) & a.isfinite() & (b != 0)
            assert (found[vast].abs() < b[vast].abs()).all()
            expected = torch.where(vast, found, expected)
        torch.testing.assert_close(
            found, expected, rtol=1e-6, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
        signs = torch.signbit(found) == torch.signbit(expected)
        assert (signs | expected.isnan()).all(), name


def test_half_types_are_rounded_once() -> None:
    x = torch.linspace(-6, 6, 301).bfloat16()
    found = run(lambda x: [torch.erfc(x), torch.log2(x.abs()), torch.atan2(x, x * 2)], x)
    wide = x.float()
    expected = [torch.erfc(wide), torch.log2(wide.abs()), torch.atan2(wide, (x * 2).float())]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.bfloat16(), rtol=2**-8, atol=0, equal_nan=True)


def test_kl_divergence_of_a_negative_target_is_no_number() -> None:
    x, target = torch.randn(5), torch.tensor([-1.0, 0.0, -0.0, 2.0, math.nan])
    function = torch.nn.functional.kl_div
    found = run(lambda a, b: function(a, b, reduction="none"), x, target)
    torch.testing.assert_close(found, function(x, target, reduction="none"), equal_nan=True)
