"""A backend in Python: the user's side. The device is this machine's torch, in a worker."""

from __future__ import annotations

from collections.abc import Sequence

from rm_abstract.plugin import Device, PythonPlugin

REFUSED = {"sort", "cumsum", "scatter"}


def devices() -> list[Device]:
    return [Device("Torch in a worker", arch="mine-1", memory_bytes=1 << 30)]


def why_not(operator: str, dtypes: Sequence[str]) -> str:
    if operator in REFUSED:
        return "the device has no such operator"
    return "the device has no f64" if "f64" in dtypes else ""


plugin = PythonPlugin(
    name="mine",
    version="1.0",
    worker="mine_worker:TorchWorker",
    devices=devices,
    why_not=why_not,
    packages=("torch",),
    options=("level",),
    states=True,
)
