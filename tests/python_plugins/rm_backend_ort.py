"""A backend in Python whose compiler takes ONNX: onnxruntime, in a worker."""

from __future__ import annotations

from collections.abc import Sequence

from rm_abstract.plugin import Device, PythonPlugin

REFUSED = {"sort", "cumsum", "scatter", "index"}


def devices() -> list[Device]:
    return [Device("ONNX Runtime in a worker", arch="ort-1", memory_bytes=1 << 30)]


def why_not(operator: str, dtypes: Sequence[str]) -> str:
    if operator in REFUSED or operator.startswith("aten."):
        return "the device has no such operator"
    return "the device has no bf16" if "bf16" in dtypes else ""


plugin = PythonPlugin(
    name="ort",
    version="1.0",
    worker="ort_worker:OrtWorker",
    devices=devices,
    why_not=why_not,
    packages=("onnxruntime", "onnx"),
    program_format="onnx",
)
