"""The parity gate: what passes, what does not, and what happens then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, make

import rm_abstract as rm
from rm_abstract.verification import parity


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t * (1 + 1e-3), "differs by"),
        (lambda t: t.double(), "expected torch.float32"),
        (lambda t: t[:1], "expected torch.float32"),
        (lambda t: torch.where(t > 0, t, torch.nan), "NaN"),
        (lambda t: torch.where(t > 2, torch.inf, t), "NaN, infinite"),
        (lambda t: (t,), "expected Tensor"),
    ],
    ids=["values", "dtype", "shape", "NaN", "infinity", "structure"],
)
def test_the_gate_refuses_a_difference(change: Any, said: str) -> None:
    torch.manual_seed(0)
    good = torch.randn(50, 40)
    verdict = parity.compare({"a": good}, {"a": change(good)})
    assert not verdict.passed
    assert said in verdict.detail and verdict.detail.startswith("output.a")


def test_rounding_mask_fillers_and_equal_nan_pass() -> None:
    torch.manual_seed(0)
    a = torch.randn(50, 40)
    a[0, 0], a[0, 1], a[0, 2] = torch.nan, torch.inf, torch.finfo(torch.float32).min
    b = a * (1 + 2e-6)
    b[0, 2] = a[0, 2]
    verdict = parity.compare((a, [None, 3]), (b, [None, 3]))
    assert verdict.passed and 1e-7 < verdict.max_error < 1e-4
    assert not parity.compare(torch.tensor([1, 2]), torch.tensor([1, 3])).passed


def test_a_wrong_program_is_quarantined_and_the_model_stays_eager(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    from rm_abstract import _core

    genuine = _core.Program

    class Wrong:
        """A program whose results are off by a percent."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.program = genuine(*arguments, **options)

        def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            return [t * 1.01 for t in self.program.run(inputs)]

        def report(self) -> dict[str, Any]:
            return dict(self.program.report())

    rm.init("cpu")
    try:
        with torch.no_grad():
            model = make("bert", seed)
            rm.accelerate(model)
            inputs = ARCHITECTURES["bert"].inputs(2, 7)
            with rm.disabled():
                expected = model(**inputs)[0]
            monkeypatch.setattr(_core, "Program", Wrong)
            with pytest.warns(rm.RoutingWarning, match="RM501"):
                assert torch.equal(model(**inputs)[0], expected)
            for _ in range(3):
                assert torch.equal(model(**inputs)[0], expected)
            monkeypatch.setattr(_core, "Program", genuine)
            rm.shutdown()
            rm.init("cpu")
            again = make("bert", seed)  # the stored verdict keeps the same artefact out
            rm.accelerate(again)
            with pytest.warns(rm.RoutingWarning, match="stored verdict"):
                assert torch.equal(again(**inputs)[0], expected)
    finally:
        rm.shutdown()
