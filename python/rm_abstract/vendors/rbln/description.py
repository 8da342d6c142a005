"""The user's side of the backend `rbln`: what can be seen without Rebellions' packages.

Public sources: the vendor's container toolkit (device nodes), its device plugin for Kubernetes
(sysfs), its metrics exporter (PCI ids), optimum-rbln (names of NPUs and their memory).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rm_abstract.plugin import Device, Failure, PythonPlugin

_NODE = re.compile(r"rbln\d+")
_PCI_VENDOR = "0x1eff"
_PCI_NAMES = {
    "0x1020": "RBLN-CA02", "0x1021": "RBLN-CA02", "0x1120": "RBLN-CA12", "0x1121": "RBLN-CA12",
    "0x1150": "RBLN-CA15", "0x1220": "RBLN-CA22", "0x1221": "RBLN-CA22", "0x1250": "RBLN-CA25",
}  # fmt: skip
UNKNOWN = "RBLN"  # the vendor's compiler is asked which NPU it is
_DTYPES = ("f32", "bf16", "f16", "i64", "i32", "i16", "i8", "u8", "bool")

# Operators of the IR whose calls of torch are in the vendor's list of what its compiler takes
# (docs.rbln.ai 0.12, "Supported OPs - PyTorch"), or in models that optimum-rbln compiles.
OPERATORS = frozenset(
    "abs add and cast ceil concat conv cos cumsum dim_value div embedding eq erf exp expand "
    "floor floor_div full gather ge gelu gelu_tanh group_norm gt index index_copy iota isnan "
    "layer_norm le linear log logical_not lt matmul maximum minimum mul ne neg or permute pool "
    "pow reciprocal reduce relu reshape rms_norm rsqrt scatter sdpa sigmoid sign silu sin slice "
    "softmax softplus sqrt sub tanh trunc where xor".split()
)
_REFUSED = {
    "sort": "the vendor's runtime is known to crash on sort and topk",
    "resize": "the vendor's list has no such operator",
}


def nodes() -> list[Path]:
    """The device nodes, by their numbers."""
    root = Path(os.environ.get("RM_HARDWARE_ROOT") or "/")
    found = [path for path in (root / "dev").glob("rbln*") if _NODE.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name[4:]))


def devices() -> list[Device]:
    """One a node. Raises Failure RM401 when there is one and no software for it was named."""
    found = nodes()
    if found and not _has_software():
        raise Failure(
            "[rbln] expected rebel-compiler in this Python or in the one RM_RBLN_PYTHON names, got "
            "neither; try rm-abstract env create rbln FOLDER, then the vendor's package in it",
            "RM401",
        )
    # The compiler computes in bfloat16 where it sees fit (public reports of its users).
    return [
        Device(name, arch=name, memory_bytes=_memory(name), numerics="bf16")
        for name in _names(len(found))
    ]


def _names(count: int) -> list[str]:
    """What the NPUs are, by their PCI functions in order, or as RBLN_TARGET_SOC says."""
    root = Path(os.environ.get("RM_HARDWARE_ROOT") or "/")
    names = []
    for function in sorted((root / "sys" / "bus" / "pci" / "devices").glob("*")):
        if _line(function / "vendor") != _PCI_VENDOR:
            continue
        if _line(function / "sriov_numvfs") not in ("", "0"):
            continue  # its virtual functions are the NPUs
        names.append(_PCI_NAMES.get(_line(function / "device"), UNKNOWN))
    named = os.environ.get("RBLN_TARGET_SOC")
    return names if len(names) == count and not named else [named or UNKNOWN] * count


def _memory(name: str) -> int:
    return 144 << 30 if name.startswith("RBLN-CR") else 16 << 30


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _has_software() -> bool:
    from importlib import metadata

    if os.environ.get("RM_RBLN_PYTHON"):
        return True
    try:
        metadata.version("rebel-compiler")
    except metadata.PackageNotFoundError:
        return False
    return True


def why_not(operator: str, dtypes: Sequence[str]) -> str:
    if operator in _REFUSED:
        return _REFUSED[operator]
    if operator not in OPERATORS:
        return "the vendor's list of what its compiler takes has no such operator"
    other = [dtype for dtype in dtypes if dtype not in _DTYPES]
    return f"the vendor's compiler takes no {other[0]}" if other else ""


def number_of_devices(options: Mapping[str, str]) -> int:
    """compile_options={"rbln": {"num_devices": N}}. Raises Failure RM301."""
    text = options.get("rbln.num_devices", "1")
    if not text.isdecimal() or int(text) < 1:
        raise Failure(f"[rbln] expected num_devices of 1 or more, got {text!r}")
    return int(text)


def driver() -> str:
    """The drivers' versions, where the kernel shows them, for the cache keys."""
    root = Path(os.environ.get("RM_HARDWARE_ROOT") or "/")
    files = sorted((root / "sys" / "class" / "rebellions").glob("rbln*/kernel_version"))
    return ",".join(sorted({f"driver={_line(path) or 'unreadable'}" for path in files}))


def rbln() -> PythonPlugin:
    """The entry point."""
    return PythonPlugin(
        name="rbln",
        version="1",
        worker="rm_abstract.vendors.rbln.worker:Worker",
        devices=devices,
        why_not=why_not,
        packages=("rebel-compiler", "torch"),
        fingerprint=driver,
        embeds_weights=True,
        options=("num_devices",),
        score=1,  # below the CPU: `auto` takes no device that this was never tried on
    )
