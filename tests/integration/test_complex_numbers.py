"""Complex numbers between real inputs and real outputs are pairs of real ones: Fourier transforms
of any length and form, rotations, and what stays PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from test_capture_operators import Wrapped
from test_special_functions import run

import rm_abstract as rm
from rm_abstract.capture.errors import CaptureError
from rm_abstract.capture.export import capture

F = torch.fft


pytestmark = pytest.mark.usefixtures("closed_session")


def near(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        scale = float(b.abs().max()) if b.numel() else 1.0
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=0, atol=4e-6 * max(scale, 1.0))


def at_fixed_sizes(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """The compiled function of tensors whose sizes a program is made for: products of weights."""

    def scaled(one: torch.Tensor) -> Any:
        return function(*(t * one for t in tensors))

    return run(scaled, torch.ones(1))


def both(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.real, x.imag]


# One matrix, two steps of 9 x 11 and 24 x 32, a prime beyond them, and the shortest ones.
@pytest.mark.parametrize("length", [1, 3, 64, 99, 131, 768])
def test_transforms_are_torchs_at_every_kind_of_length(length: int) -> None:
    x, y = torch.randn(3, length), torch.randn(3, length)

    def everything(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        z = torch.complex(x, y)
        made = [*both(F.fft(z)), *both(F.ifft(z)), *both(F.fft(x)), *both(F.ifft(x))]
        half = F.rfft(x)
        made += [*both(half), F.irfft(half, n=x.shape[-1]), half.abs()]
        return [*made, F.irfft(z), F.irfft(z, n=x.shape[-1])] if x.shape[-1] > 1 else made

    near(at_fixed_sizes(everything, x, y), everything(x, y))


FORMS: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "several axes": lambda x: [*both(F.fftn(x)), *both(F.fft2(x)), *both(F.ifftn(x, dim=(0, 2)))],
    "half of several": lambda x: [*both(F.rfft2(x)), *both(F.rfftn(x)), F.irfftn(F.rfftn(x))],
    "norms": lambda x: [
        F.fft(x, norm="ortho").imag,
        F.ifft(x, norm="ortho").real,
        F.fft(x, norm="forward").real,
        F.ifft(x, norm="forward").imag,
        F.irfft(F.rfft(x, norm="ortho"), norm="ortho"),
    ],
    "cut and filled": lambda x: [
        *both(F.fft(x, n=5)),
        *both(F.fft(x, n=20, dim=1)),
        *both(F.fftn(x, s=(3, 9), dim=(1, 2))),
        F.irfft(F.rfft(x), n=7),
        F.irfft(F.rfft(x), n=31),
    ],
    "parts moved": lambda x: [
        *both(F.fft(x).transpose(1, 2).reshape(2, -1)[:, 3:9]),
        *both(torch.cat([F.fft(x), F.fft(x, dim=1)], 1).sum(1)),
        *both(F.rfft(x)[..., :3].unsqueeze(1).expand(2, 4, 6, 3)),
    ],
    "arithmetic": lambda x: [
        *both(F.fft(x) * F.fft(x).conj() / 3.0 - x),
        *both(-F.fft(x) * x + 2.0 * F.fft(x)),
        F.irfft(F.rfft(x) * torch.conj(F.rfft(x.flip(-1)))),
        torch.view_as_real(F.fft(x) * 1j),
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_transforms_are_torchs(form: str) -> None:
    x = torch.randn(2, 6, 12)
    near(at_fixed_sizes(FORMS[form], x), FORMS[form](x))


def test_a_length_that_is_a_size_of_the_call_has_one_program_for_all() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(96))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.fftn(x * self.scale, dim=(1, 2)).real

    model = Mixed().eval()
    rm.init("cpu")
    rm.accelerate(model)
    with torch.no_grad():
        for length in (8, 13, 96, 8, 5):
            x = torch.randn(2, length, 96)
            for _ in range(2):
                near([model(x)], [F.fftn(x, dim=(1, 2)).real])
    record = rm.explain(model).to_dict()["models"][0]
    assert record["routed"] and len(record["entries"]) == 1


def test_rotations_by_complex_numbers_are_torchs() -> None:
    def rotated(x: torch.Tensor, angle: torch.Tensor) -> list[torch.Tensor]:
        turn = torch.polar(torch.ones_like(angle), angle)[:, :, None]
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return [torch.view_as_real(pairs * turn).flatten(3)]

    x, angle = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 4) * 9
    near(at_fixed_sizes(rotated, x, angle), rotated(x, angle))


def test_an_absolute_value_neither_overflows_nor_vanishes() -> None:
    x = torch.tensor([3e30, 0.0, 1e-30, 3.0, float("inf")])
    y = torch.tensor([4e30, 0.0, 1e-30, -4.0, float("nan")])
    found = run(lambda x, y: torch.complex(x, y).abs(), x, y)
    torch.testing.assert_close(found, torch.complex(x, y).abs(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.fft(x),
        lambda x: torch.complex(x, x).exp().real,
        lambda x: F.fft(x.double()).real,
    ],
    ids=["a complex result", "an operator without a form", "double precision"],
)
def test_other_complex_numbers_are_left_to_torch(function: Any) -> None:
    with pytest.raises(CaptureError) as error:
        capture(Wrapped(function).eval(), (torch.randn(4),), {})
    assert error.value.code == "RM204"


MODELS: dict[str, dict[str, Any]] = {
    "FNet": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    "DeepseekV2": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_models_with_complex_numbers_are_served_whole(name: str) -> None:
    torch.manual_seed(4)
    config = getattr(transformers, f"{name}Config")(vocab_size=96, pad_token_id=0, **MODELS[name])
    model = getattr(transformers, f"{name}Model")(config).eval()
    rm.init("cpu")
    rm.accelerate(model)
    for length in (6, 11):
        ids = torch.randint(3, 90, (2, length))
        with torch.no_grad():
            with rm.disabled():
                expected = model(ids).last_hidden_state
            for _ in range(3):
                found = model(ids).last_hidden_state
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    record = rm.explain(model).to_dict()["models"][0]
    assert record["routed"]
    assert not any(entry["kept"] for entry in record["entries"])
