"""A backend in Python whose worker needs NumPy only, and so starts at once: the user's side."""

from __future__ import annotations

from collections.abc import Sequence

from rm_abstract.plugin import Device, PythonPlugin

OPERATORS = {"linear", "relu", "tanh"}


def why_not(operator: str, dtypes: Sequence[str]) -> str:
    return "" if operator in OPERATORS else "the device has no such operator"


plugin = PythonPlugin(
    name="small",
    version="1.0",
    worker="small_worker:Worker",
    devices=lambda: [Device("NumPy in a worker", arch="small-1", memory_bytes=1 << 30)],
    why_not=why_not,
    packages=("numpy",),
)
