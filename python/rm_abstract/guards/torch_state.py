"""What a forward may ask of torch besides its arguments' contents: modes, switches, how a tensor
lies in memory, whether it wants gradients. And the elements of small inputs that Python reads.

A capture holds one answer. Only calls that get the same answers are served by it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep

MOST_VALUES = 64  # elements of an input whose values a capture may hold for
_VALUES = "values of input "

TF32 = "allows_tf32_convolutions"


def allows_tf32_convolutions() -> bool:
    """Whether torch rounds the operands of float32 convolutions on a GPU to tf32."""
    return bool(torch.backends.cudnn.enabled and torch.backends.cudnn.allow_tf32)


# Asked by calling a function; what it gives while captures run is what `_CAPTURED` says.
SWITCHES: dict[str, Callable[[], Any]] = {
    "is_grad_enabled": torch.is_grad_enabled,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "get_num_threads": torch.get_num_threads,
    "get_num_interop_threads": torch.get_num_interop_threads,
    "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    TF32: allows_tf32_convolutions,  # asked by the importer
    "is_deterministic_algorithms_warn_only_enabled": (
        torch.is_deterministic_algorithms_warn_only_enabled
    ),
    "get_deterministic_debug_mode": torch.get_deterministic_debug_mode,
    "is_anomaly_enabled": torch.is_anomaly_enabled,
    "is_anomaly_check_nan_enabled": torch.is_anomaly_check_nan_enabled,
    "is_warn_always_enabled": torch.is_warn_always_enabled,
    "get_default_device": torch.get_default_device,
    "flash_sdp_enabled": torch.backends.cuda.flash_sdp_enabled,
    "math_sdp_enabled": torch.backends.cuda.math_sdp_enabled,
    "mem_efficient_sdp_enabled": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cudnn_sdp_enabled": torch.backends.cuda.cudnn_sdp_enabled,
    "get_fastpath_enabled": torch.backends.mha.get_fastpath_enabled,
}
# Asked of tensors.
_OF_TENSORS = {
    "is_contiguous": "layout",
    "data_ptr": "layout",
    "stride": "stride",
    "storage_offset": "storage_offset",
    "is_inference": "is_inference",
}
_GRADIENTS = frozenset({"requires_grad", "grad_fn", "is_leaf", "grad"})
_CAPTURED = {
    "is_grad_enabled": False,
    "is_inference_mode_enabled": False,
    "layout": True,
    "stride": True,
    "storage_offset": True,
    "requires_grad": False,
    "is_inference": False,
}


def asked_by_call(function: Any) -> str:
    """The question a builtin function or method of torch answers; empty: none of these."""
    name = getattr(function, "__name__", "")
    if name in SWITCHES and function is SWITCHES[name]:
        return str(name)
    if name in _OF_TENSORS and isinstance(getattr(function, "__self__", None), torch.Tensor):
        return _OF_TENSORS[name]
    return ""


def asked_by_code(code: Any) -> str:
    """The question a Python function asks by its very code, or answers when called."""
    if code.co_name in SWITCHES and code.co_filename.startswith(_TORCH):
        return str(code.co_name)
    return "requires_grad" if not _GRADIENTS.isdisjoint(code.co_names) else ""


def answers(questions: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """What forward would be told now, for a call of these tensors."""
    return {question: _answer(question, tensors) for question in questions}


def may_be_asked(tensor: torch.Tensor) -> bool:
    """Whether a capture may hold for the elements of this input alone: a few integers."""
    kind = tensor.dtype
    return (
        0 < tensor.numel() <= MOST_VALUES
        and kind is not torch.bool
        and not (kind.is_floating_point or kind.is_complex)
    )


def values_of(inputs: Iterable[int]) -> list[str]:
    """The questions for the elements of inputs, by their numbers."""
    return [f"{_VALUES}{number}" for number in sorted(inputs)]


def valued(question: str) -> int | None:
    """The number of the input whose elements are asked for; None: it is another question."""
    return int(question.removeprefix(_VALUES)) if question.startswith(_VALUES) else None


def _answer(question: str, tensors: Sequence[torch.Tensor]) -> Any:
    number = valued(question)
    if number is not None:
        tensor = tensors[number]
        return tensor.tolist() if tensor.numel() <= MOST_VALUES else None
    if question == "layout":
        return all(t.is_contiguous() for t in tensors)
    if question == "stride":  # contiguous tensors may have any where a size is one
        return all(t.stride() == torch.empty(t.shape, device="meta").stride() for t in tensors)
    if question == "storage_offset":
        return all(t.storage_offset() == 0 for t in tensors)
    if question == "requires_grad":
        return any(t.requires_grad for t in tensors)
    if question == "is_inference":
        return any(t.is_inference() for t in tensors)
    return SWITCHES[question]()


def not_as_captured(given: dict[str, Any]) -> str:
    """The first question whose answer a capture cannot have; empty when it has them all."""
    for question, answer in given.items():
        if _CAPTURED.get(question, answer) != answer:
            return question
    return ""


def described(question: str) -> str:
    """A question as the report says it."""
    if question == "layout":
        return "how a tensor lies in memory"
    return f"a tensor's {question}" if question not in SWITCHES else f"torch.{question}()"
