"""The parity gate: what passes, what does not, and what happens then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, make

import rm_abstract as rm
from rm_abstract.verification import parity
from rm_abstract.verification.wider import InWiderTypes


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


class Chaotic(torch.nn.Module):
    """Four layers, each of which doubles a difference: roundings of bf16 become a tenth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x) * 4 + 0.1 * x)
        return x


def test_what_is_as_near_to_the_exact_result_as_the_original_is_served(
    session: rm.Session,
) -> None:
    torch.manual_seed(0)
    model, x = Chaotic().eval().to(torch.bfloat16), torch.randn(16, 64).bfloat16()
    expected = model(x)
    ours = rm.accelerate(model)
    ours(x)
    exact = Chaotic().double()
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    wanted = exact(x.double())
    apart, original = ((t.double() - wanted).abs().max() for t in (ours(x), expected))
    assert apart <= 1.25 * original
    assert [e["parity"] for e in rm.explain().to_dict()["models"][0]["entries"]] == ["passed"]


@pytest.mark.parametrize(
    ("ours", "original", "passes"),
    [(0.04, 0.09, True), (0.1, 0.09, True), (0.12, 0.09, False), (0.12, 0.11, False)],
)
def test_the_exact_result_decides(ours: float, original: float, passes: bool) -> None:
    exact = torch.ones(50, dtype=torch.float32)
    sides = [exact.clone().bfloat16() for _ in range(2)]
    sides[0][3] += ours
    sides[1][4] -= original
    verdict = parity.judge([exact], [sides[1]], [sides[0]], torch.bfloat16)
    assert verdict.passed is passes, verdict.detail
    count = torch.tensor(1)
    assert not parity.judge([exact, count], [sides[1], count], [sides[0], count + 1]).passed


def test_a_fault_in_many_places_is_not_a_rounding_in_one() -> None:
    """The original is far from the exact result in one place; ours by less, but everywhere."""
    exact = torch.ones(50, dtype=torch.float32)
    original, ours = exact.bfloat16(), exact + 0.04 * torch.tensor([1.0, -1.0]).repeat(25)
    original[3] += 0.09
    ours[6] += 0.02
    assert not parity.compare(original, ours.bfloat16(), torch.bfloat16).passed
    verdict = parity.judge([exact], [original], [ours.bfloat16()], torch.bfloat16)
    assert "cosine" in verdict.detail


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_a_fault_beside_one_large_feature_is_refused(precision: torch.dtype) -> None:
    """Eight features of 128 are zero. One is 600 times as large as they are."""
    torch.manual_seed(0)
    good = torch.randn(16, 128)
    good[:, 7] *= 600
    good[0, 7] = 2000
    rounded = (good * (1 + torch.finfo(precision).eps * torch.randn(16, 128))).to(precision)
    assert parity.compare(good.to(precision), rounded, precision).passed
    rounded[:, -8:] = 0
    assert "cut off" in parity.compare(good.to(precision), rounded, precision).detail


def test_in_wider_types_weights_stay_and_caches_are_written() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    cache = torch.zeros(4, 8).bfloat16()
    kept = weight.clone()
    with torch.no_grad(), InWiderTypes(torch.bfloat16):
        y = torch.nn.functional.linear(x, weight)
        z = y.to(torch.bfloat16) * 3 + torch.ones(8, dtype=torch.bfloat16)
        cache[1:4] = y
        cache.mul_(2)
        with pytest.raises(TypeError, match="bits"):
            y.view(torch.int32)
    wanted = x.double() @ weight.double().t()
    assert y.dtype == torch.float32 and torch.allclose(y.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.allclose(z.double(), wanted * 3 + 1, rtol=1e-5, atol=1e-5)
    assert cache.dtype == torch.bfloat16 and torch.equal(cache[1:4], (y.bfloat16() * 2))
    assert not cache[0].any() and torch.equal(weight, kept)


def test_a_step_of_a_generation_is_judged_by_its_caches_content(
    session: rm.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every comparison fails by rounding here, so the exact result decides each of them."""
    monkeypatch.setitem(parity.TOLERANCES, torch.bfloat16, 1e-7)
    monkeypatch.setattr(parity, "_FARTHEST", 1e9)
    monkeypatch.setattr(parity, "_AS_FAR", 3.0)
    judged: list[parity.Verdict] = []
    judge = parity.judge

    def watched(*arguments: Any) -> parity.Verdict:
        judged.append(judge(*arguments))
        return judged[-1]

    monkeypatch.setattr(parity, "judge", watched)
    model = rm.accelerate(make("llama", 0, torch.bfloat16))
    ids = torch.arange(1, 9).reshape(2, 4)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    model.generate(ids, attention_mask=mask, max_new_tokens=70, do_sample=False, pad_token_id=0)
    assert len(judged) >= 2 and all(v.passed for v in judged), [v.detail for v in judged]
    # Keys and values of every layer were among what was compared, whatever room their buffers had.
    assert all(len(v.distances) >= 5 for v in judged), judged
    assert rm.explain().to_dict()["models"][0]["reasons"] == []
