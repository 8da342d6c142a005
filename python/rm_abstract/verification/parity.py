"""The parity gate: does a compiled artefact give what the original gave on the same inputs?

Structure, dtypes, shapes, NaN and infinity positions must be equal, integers and bools exactly;
floats within a tolerance of the tensor's own largest magnitude. The tolerance belongs to the
lowest precision the model computes in, not to the dtype of one output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rm_abstract.capture import output_classes
from rm_abstract.kv import kv_cache

GATE_VERSION = 5  # raise it with every change of what passes: older verdicts are not used then

# Largest error relative to the largest magnitude of a tensor. f32: sums of a few thousand products
# in another order stay below 1e-5 a layer; half formats: a few units in the last place a layer.
TOLERANCES = {
    torch.float64: 1e-7,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
MIN_COSINE = {
    torch.float64: 1 - 1e-9,
    torch.float32: 1 - 1e-6,
    torch.float16: 0.9999,
    torch.bfloat16: 0.999,
}
# Kernels on quantised weights round activations too, to 15 bits and a sign in blocks of 32: a
# relative error of 2^-16 a product in f32. The half formats' own rounding is larger.
ROUNDED_TOLERANCE = 1e-3
ROUNDED_COSINE = 1 - 1e-5
# The form that rounds them to 8 bits is compared with the one that does not: a product moves by
# about 0.6 % of its size; at most 5.4 % of a tensor's largest and a cosine of 1 - 5.2e-4 were seen
# (docs/decisions/0009-activations-of-8-bits.md). Leaving out one block of 32 in 768 is 20 %.
COARSE_TOLERANCE = 0.15
COARSE_COSINE = 1 - 5e-3
# Where both differ from each other by more, the original in wider types decides (`judge`): ours may
# be so many times as far from it as the original is, which itself may be so many tolerances away.
# Random networks of 96 layers in bf16: ours was at 0.79 to 0.93 times the original's distance; of 3
# to 5 layers that double differences: 0.48 to 1.13 (docs/decisions/0209, 0217).
_AS_FAR = 1.25
_FARTHEST = 2.0
# One feature that is a hundred times as large as the others is the scale and the direction of its
# tensor. So the direction is also compared with everything cut off at so many times the median, a
# few times as loosely: what the large one rounds away reaches the others.
_CUT = 4.0
_CUT_TURN = 4.0
_FEWEST_OF_CUT = 64
_HUGE = 1e30  # mask fillers such as finfo.min: compared as themselves, not part of the scale


class Distance(NamedTuple):
    """Of two tensors: the largest difference by the largest magnitude, 1 minus the cosine, and the
    same where values beyond a few medians are cut off."""

    error: float
    turn: float
    cut_turn: float = 0.0


@dataclass
class Verdict:
    """`passed`, the largest relative error seen, and what differs first when not passed."""

    passed: bool = True
    max_error: float = 0.0
    detail: str = ""
    tensors: int = 0
    rounding: bool = False  # not passed, and floats that are too far apart are the reason
    distances: dict[str, Distance] = field(default_factory=dict)  # of each tensor of floats

    def fail(self, detail: str, rounding: bool = False) -> None:
        if self.passed:
            self.passed, self.detail, self.rounding = False, detail, rounding


def working_precision(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The floating type of the tensors with the widest tolerance; float32 when there is none."""
    found = [t.dtype for t in tensors if t.dtype in TOLERANCES]
    return max(found, key=lambda d: TOLERANCES[d], default=torch.float32)


class Limits(NamedTuple):
    """What may differ: relative to the largest magnitude, in direction, in direction of what is cut
    off; below `tiny` is nothing."""

    tolerance: float
    cosine: float
    cut_turn: float
    tiny: float

    def hold(self, distance: Distance) -> bool:
        error, turn, cut_turn = distance
        return error <= self.tolerance and turn <= 1 - self.cosine and cut_turn <= self.cut_turn


def limits_of(precision: torch.dtype, activation_bits: int = 0) -> Limits:
    """`activation_bits`: what kernels round activations to, 16 or 8; 0: they do not."""
    tolerance, cosine = TOLERANCES[precision], MIN_COSINE[precision]
    if activation_bits == 16:
        tolerance, cosine = max(tolerance, ROUNDED_TOLERANCE), min(cosine, ROUNDED_COSINE)
    elif activation_bits == 8:
        tolerance, cosine = max(tolerance, COARSE_TOLERANCE), min(cosine, COARSE_COSINE)
    # Of activations of 8 bits a small value beside a large one has none left.
    cut_turn = math.inf if activation_bits == 8 else _CUT_TURN * (1 - cosine)
    return Limits(tolerance, cosine, cut_turn, torch.finfo(precision).tiny)


def compare(
    expected: Any,
    actual: Any,
    precision: torch.dtype = torch.float32,
    activation_bits: int = 0,
) -> Verdict:
    """Compares two outputs of any nesting of containers, ModelOutput and caches."""
    limits = limits_of(precision, activation_bits)
    return _Walk(lambda path: limits).along(expected, actual)


def judge(
    exact: Any,
    expected: Any,
    actual: Any,
    precision: torch.dtype = torch.float32,
    activation_bits: int = 0,
) -> Verdict:
    """For two outputs that differ by roundings alone: whether ``actual`` is as near to what the
    original gives in wider types, ``exact``, as ``expected`` is. Integers are not compared again.
    """
    usual = limits_of(precision, activation_bits)
    unlimited = Limits(math.inf, -math.inf, math.inf, usual.tiny)
    alike = _Walk(lambda path: unlimited).along(expected, actual)
    original = _Walk(lambda path: unlimited, of_one_type=False).along(exact, expected)
    if not (alike.passed and original.passed):
        return original if alike.passed else alike
    ours = _Walk(lambda path: unlimited, of_one_type=False).along(exact, actual)

    def limits_at(path: str) -> Limits:
        error, turn, cut_turn = original.distances[path]
        if error > _FARTHEST * usual.tolerance or usual.hold(ours.distances[path]):
            return usual  # what was meant is not known from the original, or nobody needs to know
        # Directions as well: a fault in many places is far below the largest of the original's
        # roundings. 1 minus a cosine is half the square of a distance.
        tolerance, square = max(usual.tolerance, _AS_FAR * error), _AS_FAR**2
        return Limits(tolerance, 1 - square * turn, square * cut_turn, usual.tiny)

    return _Walk(limits_at, of_one_type=False).along(exact, actual)


class _Walk:
    """Along two outputs, as far as the first difference. ``limits_at`` gives those of a path."""

    def __init__(self, limits_at: Callable[[str], Limits], of_one_type: bool = True) -> None:
        self._limits_at, self._of_one_type = limits_at, of_one_type
        self._verdict = Verdict()

    def along(self, expected: Any, actual: Any) -> Verdict:
        with torch.no_grad():
            self._step(expected, actual, "output")
        return self._verdict

    def _step(self, a: Any, b: Any, path: str) -> None:
        verdict = self._verdict
        if not verdict.passed:
            return
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            self._tensors(a, b, path)
        elif type(a) is not type(b):
            verdict.fail(f"{path} is {type(b).__name__}, expected {type(a).__name__}")
        elif isinstance(a, dict):
            if list(a.keys()) != list(b.keys()):
                verdict.fail(f"{path} has keys {list(b.keys())}, expected {list(a.keys())}")
                return
            for key in a:
                self._step(a[key], b[key], f"{path}.{key}")
        elif isinstance(a, (list, tuple)):
            if len(a) != len(b):
                verdict.fail(f"{path} has {len(b)} items, expected {len(a)}")
                return
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                self._step(x, y, f"{path}[{i}]")
        elif kv_cache.is_cache(a):
            kinds, expected = _layer_kinds(b), _layer_kinds(a)
            if kinds != expected:
                verdict.fail(f"{path} has layers {sorted(kinds)}, expected {sorted(expected)}")
                return
            self._step(kv_cache.contents(a), kv_cache.contents(b), f"{path}.layers")
        elif (parts := output_classes.take(a)) is not None:
            other = output_classes.take(b)
            if other is None or other.context != parts.context:
                verdict.fail(f"{path} holds other fields than expected")
                return
            self._step(parts.children, other.children, path)
        elif a != b and not (a != a and b != b):  # NaN is NaN
            verdict.fail(f"{path} is {b!r}, expected {a!r}")

    def _tensors(self, a: torch.Tensor, b: torch.Tensor, path: str) -> None:
        verdict = self._verdict
        verdict.tensors += 1
        if (self._of_one_type and a.dtype != b.dtype) or a.shape != b.shape or a.device != b.device:
            verdict.fail(
                f"{path} is {b.dtype} {list(b.shape)} on {b.device}, expected {a.dtype} "
                f"{list(a.shape)} on {a.device}"
            )
            return
        if not a.is_floating_point():
            if self._of_one_type and not torch.equal(a, b):
                verdict.fail(f"{path} differs in {int((a != b).sum())} of {a.numel()} integers")
            return
        if a.numel() == 0:
            return
        x, y = a.detach().double(), b.detach().double()
        ordinary = x.abs() < _HUGE  # False for NaN and infinities
        if not bool((ordinary == (y.abs() < _HUGE)).all()):
            verdict.fail(f"{path} has NaN, infinite or huge values elsewhere than the original")
            return
        if not bool(ordinary.all()):
            strange_x, strange_y = x[~ordinary], y[~ordinary]
            if not torch.allclose(strange_x, strange_y, rtol=1e-2, atol=0, equal_nan=True):
                verdict.fail(f"{path} differs in NaN, infinite or huge values")
                return
            x, y = x[ordinary], y[ordinary]
        self._floats(x.reshape(-1), y.reshape(-1), path)

    def _floats(self, x: torch.Tensor, y: torch.Tensor, path: str) -> None:
        if x.numel() == 0:
            return
        verdict, limits = self._verdict, self._limits_at(path)
        scale = float(x.abs().max())
        difference = float((x - y).abs().max())
        # Values all below the smallest normal of the type carry no relative information.
        error = difference / max(scale, limits.tiny)
        turn = _turn(x, y)
        end = _CUT * float(x.abs().median())
        cut = limits.tiny < end < scale and x.numel() >= _FEWEST_OF_CUT
        cut_turn = _turn(x.clamp(-end, end), y.clamp(-end, end)) if cut else 0.0
        verdict.distances[path] = Distance(error, turn, cut_turn)
        verdict.max_error = max(verdict.max_error, error)
        if error > limits.tolerance:
            verdict.fail(
                f"{path} differs by {error:.2e} of its largest magnitude {scale:.3g}, tolerance "
                f"{limits.tolerance:.0e}",
                rounding=True,
            )
        elif turn > 1 - limits.cosine:
            verdict.fail(f"{path} has cosine {1 - turn:.7f} to the original", rounding=True)
        elif cut_turn > limits.cut_turn:
            verdict.fail(
                f"{path} has cosine {1 - cut_turn:.7f} to the original where values beyond "
                f"{end:.3g} are cut off",
                rounding=True,
            )


def _turn(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 minus the cosine."""
    norms = float(x.norm()) * float(y.norm())
    return 1 - float(x @ y) / norms if norms > 0 else 0.0


def _layer_kinds(cache: Any) -> set[str]:
    return {type(layer).__name__ for layer in getattr(cache, "layers", None) or ()}
