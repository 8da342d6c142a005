"""The backend `small` with a compiler that writes files, BIG_MIB of them as one file or a folder
(BIG_FORM): the user's side."""

from __future__ import annotations

from rm_abstract.plugin import Device, PythonPlugin

OPERATORS = {"linear", "relu", "tanh"}

plugin = PythonPlugin(
    name="big",
    version="1.0",
    worker="big_worker:Worker",
    devices=lambda: [Device("NumPy in a worker", arch="big-1", memory_bytes=1 << 30)],
    why_not=lambda operator, dtypes: "" if operator in OPERATORS else "there is no such operator",
    packages=("numpy",),
)
