"""The user's side of the backend `furiosa`: what can be seen without FuriosaAI's packages."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from rm_abstract.plugin import Device, Failure, PythonPlugin

_NODE = re.compile(r"npu\d+mgmt")  # one management node a card; the others are parts of it
_FLOATS = ("f32", "bf16")

# Operators of the IR whose ATen calls, decomposed, are all in the list that furiosa-torch 2026.4.0
# has of what its compiler takes. A test asks the package itself.
OPERATORS: dict[str, tuple[str, ...]] = {
    "abs": ("abs.default",),
    "add": ("add.Tensor",),
    "concat": ("cat.default",),
    "cos": ("cos.default",),
    "div": ("div.Tensor",),
    "erf": ("erf.default",),
    "exp": ("exp.default",),
    "expand": ("expand.default",),
    "gelu": ("erf.default", "mul.Tensor", "add.Tensor"),
    "layer_norm": ("var_mean.correction", "rsqrt.default", "sub.Tensor", "mul.Tensor"),
    "linear": ("mm.default", "permute.default", "add.Tensor", "view.default"),
    "log": ("log.default",),
    "matmul": ("bmm.default", "mm.default", "view.default", "expand.default"),
    "maximum": ("maximum.default",),
    "minimum": ("minimum.default",),
    "mul": ("mul.Tensor",),
    "neg": ("neg.default",),
    "permute": ("permute.default",),
    "reciprocal": ("reciprocal.default",),
    "relu": ("relu.default",),
    "reshape": ("view.default",),
    "rsqrt": ("rsqrt.default",),
    "sigmoid": ("sigmoid.default",),
    "sdpa": ("bmm.default", "_softmax.default", "mul.Scalar", "add.Tensor"),
    "silu": ("sigmoid.default", "mul.Tensor"),
    "sin": ("sin.default",),
    "slice": ("slice.Tensor",),
    "softmax": ("_softmax.default",),
    "sqrt": ("sqrt.default",),
    "sub": ("sub.Tensor",),
    "tanh": ("tanh.default",),
}


def nodes() -> list[Path]:
    """The management nodes of the cards, by their numbers."""
    root = Path(os.environ.get("RM_HARDWARE_ROOT") or "/")
    found = [p for p in (root / "dev" / "rngd").glob("npu*mgmt") if _NODE.fullmatch(p.name)]
    return sorted(found, key=lambda path: int(path.name[3:-4]))


def devices() -> list[Device]:
    """One a card. Raises Failure RM401 when there is one and no software for it was named."""
    cards = nodes()
    if cards and not _has_software():
        raise Failure(
            "[furiosa] expected furiosa-torch in this Python or in the one RM_FURIOSA_PYTHON "
            "names, got neither; try rm-abstract env create furiosa FOLDER",
            "RM401",
        )
    # 48 GB of HBM3, and products in bfloat16 at most (the maker's data sheet).
    return [
        Device(f"RNGD {card.name[3:-4]}", arch="rngd-1pe", memory_bytes=48 << 30, numerics="bf16")
        for card in cards
    ]


def _has_software() -> bool:
    from importlib import metadata

    if os.environ.get("RM_FURIOSA_PYTHON"):
        return True
    try:
        metadata.version("furiosa-torch")
    except metadata.PackageNotFoundError:
        return False
    return True


def why_not(operator: str, dtypes: Sequence[str]) -> str:
    if operator not in OPERATORS:
        return "the compiler of furiosa-torch takes no such operator"
    other = [dtype for dtype in dtypes if dtype not in _FLOATS]
    if other:
        return f"the compiler of furiosa-torch does not lower {other[0]}"
    return ""


def driver() -> str:
    """The drivers' and firmwares' versions, where the kernel shows them, for the cache keys."""
    root = Path(os.environ.get("RM_HARDWARE_ROOT") or "/")
    found = set()
    for name in ("version", "fw_version"):
        for path in (root / "sys" / "class" / "rngd_mgmt").glob(f"*/{name}"):
            try:
                found.add(f"{name}={path.read_text(encoding='utf-8').strip()}")
            except (OSError, UnicodeDecodeError):
                found.add(f"{name}=unreadable")
    return ",".join(sorted(found))


def furiosa() -> PythonPlugin:
    """The entry point."""
    return PythonPlugin(
        name="furiosa",
        version="1",
        worker="rm_abstract.vendors.furiosa.worker:Worker",
        devices=devices,
        why_not=why_not,
        packages=("furiosa-torch", "furiosa-kernels", "torch"),
        fingerprint=driver,
        options=("max_model_len", "fxb_level"),
        generator="rm_abstract.vendors.furiosa.generator:Generator",
        generator_packages=("furiosa-llm",),
        score=1,  # below the CPU: `auto` takes no device that this was never tried on
    )
