"""Which NPUs there are."""

from __future__ import annotations

import os
import re

from rebel.core.exception import RBLNRuntimeError

_AT_IMPORT = os.environ.get("RBLN_DEVICES")


def _names() -> list[str]:
    """Of the visible NPUs. Source for RBLN_DEVICES: docs.rbln.ai; read when the library loads, and
    a change later is this error (text from public logs)."""
    now = os.environ.get("RBLN_DEVICES")
    if now != _AT_IMPORT:
        raise RBLNRuntimeError(
            "RBLN_DEVICES environment variable changed at runtime. Initial value: "
            f"{_AT_IMPORT}, Current value: {now}"
        )
    # Source: vllm-rbln 0.12, platform/__init__.py: the runtime takes both names, the old one first.
    now = now or os.environ.get("RBLN_VISIBLE_DEVICES")
    names = [name for name in os.environ.get("REBEL_NPUS", "").split(",") if name]
    return [names[int(i)] for i in now.split(",") if int(i) < len(names)] if now else names


def device_count() -> int:
    """Source: optimum-rbln, utils/runtime_utils.py compares it with `num_devices`."""
    return len(_names())


def get_npu_name(device_id: int | None = None) -> str | None:
    """The NPU's name, None when there is none. Source: optimum-rbln calls it with and without an
    index and treats None as absent."""
    names, index = _names(), device_id or 0
    return names[index] if 0 <= index < len(names) else None


def npu_is_available(device_id: int = 0) -> bool:
    """Source: optimum-rbln asks it before get_npu_name(0)."""
    return get_npu_name(device_id) is not None


def manual_seed(seed: int) -> None:
    """Seeds what the NPU draws: nothing here. Source: vllm-rbln 0.12, platform/__init__.py calls it
    where torch is seeded."""
    if not isinstance(seed, int):
        raise TypeError(f"manual_seed() takes an int, got {seed!r}")


def family(npu: str) -> str:
    """Names of one target differ in the last digit, the form factor. Source: optimum-rbln
    compares RBLN-CA22 and RBLN-CA25 as equal."""
    return re.sub(r"(RBLN-C[AR]\d)\d$", r"\1", npu)
