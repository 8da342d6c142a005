"""Safetensors files of what modules and optimisers hold: whole or not there, loaded all or none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch


class Holder(Protocol):
    """A module or an optimiser."""

    def state_dict(self) -> dict[str, torch.Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def write(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a safetensors file; it replaces an old one as a whole or not at all.

    When this returns, the file is on the disk under its name.
    """
    from safetensors.torch import save_file

    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")  # two processes may write one file
    try:
        # Copies: tensors that share memory have no place in the format, nor have those of a GPU.
        save_file(
            {n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors.items()}, part
        )
        _flush(part)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        _flush(target.parent)  # the name itself


def _flush(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def matching(
    where: str, own: Mapping[str, torch.Tensor], state: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """What was given as tensors. Raises ValueError when names or shapes are not the own ones."""
    if own.keys() != state.keys():
        raise ValueError(f"[{where}] expected {sorted(own)}, got {sorted(state)}")
    given = {name: torch.as_tensor(value) for name, value in state.items()}
    for name, value in given.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"[{where}] expected {tuple(own[name].shape)} for {name}, got {tuple(value.shape)}"
            )
    return given


def save(path: str | os.PathLike[str], **parts: Holder) -> None:
    """Writes modules and optimisers into one safetensors file, a checkpoint: ``save(path,
    model=model, optimizer=optimizer)``. It replaces an old one as a whole or not at all."""
    write(path, _named(parts))


def load(path: str | os.PathLike[str], **parts: Holder) -> None:
    """Reads what `save` wrote with the same names, all of it or, with ValueError, nothing."""
    from safetensors.torch import load_file

    given = matching("load", _named(parts), load_file(path))
    for part, holder in parts.items():
        front = part + "."
        holder.load_state_dict(
            {n.removeprefix(front): t for n, t in given.items() if n.startswith(front)}
        )


def _named(parts: Mapping[str, Holder]) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{n}": t for part, holder in parts.items() for n, t in holder.state_dict().items()
    }
