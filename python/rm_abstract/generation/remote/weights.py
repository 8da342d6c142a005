"""What an engine computes with: the model as it is now, never what its checkpoint once was.

An engine computes by the name of an architecture, so a model that is anything else than its class
and configuration say is declined. The folder it loads from has the live configuration, and the
checkpoint's own files only when every value in them equals the model's; else a copy is written.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.base.scope import disabled_var
from rm_abstract.guards.packages import is_user_class, is_user_code

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def check_structure(model: Any) -> None:
    """Raises Decline (RM332) for a model that its class and configuration do not describe."""
    kind = type(model)
    if is_user_class(kind) or not kind.__module__.startswith("transformers."):
        raise Decline("RM332", f"the class {kind.__name__} is not one of transformers")
    if model.training:
        raise Decline("RM332", "training mode")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise Decline("RM332", "autocast")
    if getattr(model, "hf_quantizer", None) is not None:
        raise Decline("RM332", "weights that transformers quantised")
    for name, module in model.named_modules():
        where = f" of {name}" if name else ""
        if any(getattr(module, hooks) for hooks in _HOOKS):
            raise Decline("RM332", f"a hook{where}")
        if "forward" in vars(module) or is_user_code(type(module).forward):
            raise Decline("RM332", f"a forward of the user's own{where}")
    difference = _difference(model)
    if difference:
        raise Decline("RM332", f"the model differs from its configuration: {difference}")
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise Decline("RM332", "weights that are not in memory")


def _difference(model: Any) -> str:
    """The first module or tensor that a fresh model of this configuration has not."""
    import copy

    token = disabled_var.set("compiling")
    try:
        with torch.device("meta"):
            fresh = type(model)._from_config(copy.deepcopy(model.config))
    finally:
        disabled_var.reset(token)
    own = {name: type(module) for name, module in model.named_modules()}
    theirs = {name: type(module) for name, module in fresh.named_modules()}
    for name in sorted({*own, *theirs}):
        if own.get(name) is not theirs.get(name):
            return str(name or type(model).__name__)
    mine = {name: tensor.shape for name, tensor in model.state_dict().items()}
    other = {name: tensor.shape for name, tensor in fresh.state_dict().items()}
    for name in sorted({*mine, *other}):
        if mine.get(name) != other.get(name):
            return str(name)
    return ""


def write_folder(model: Any, folder: Path) -> list[Path]:
    """Makes ``folder`` a checkpoint of the live model; the files that may go once it is loaded.

    Raises Decline (RM331) when it cannot be written.
    """
    folder.mkdir(parents=True)
    kept = _checkpoint_files(model)
    try:
        if kept:
            for path in kept:
                os.symlink(path, folder / path.name)
        else:
            token = disabled_var.set("compiling")
            try:
                model.save_pretrained(folder)
            finally:
                disabled_var.reset(token)
        config = type(model.config).from_dict(model.config.to_dict())
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        # What ends a row is in every request: an engine that also knew a default of the model's
        # would ban it together with the others where a least number of tokens is asked for.
        (folder / "generation_config.json").write_text('{"_from_model_config": false}')
    except (OSError, ValueError, RuntimeError) as error:
        raise Decline("RM331", f"the weights cannot be written: {error}") from None
    return [] if kept else sorted(folder.glob("*.safetensors"))


def _checkpoint_files(model: Any) -> list[Path]:
    """The files of the model's checkpoint when they hold exactly its weights; else none."""
    folder = _checkpoint(model)
    if folder is None:
        return []
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if not files or not _equal(model, files):
        return []
    return [*files, index] if index.is_file() else files


def _checkpoint(model: Any) -> Path | None:
    name = getattr(model, "name_or_path", "")
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name).absolute()
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(
            name,
            "config.json",
            revision=getattr(model.config, "_commit_hash", None),
            local_files_only=True,
        )
    except (OSError, ValueError):
        return None
    return Path(found).parent if found else None


def _equal(model: Any, files: list[Path]) -> bool:
    """Every tensor of the model is in the files, with the same values, and nothing else is."""
    from safetensors import SafetensorError, safe_open

    live = model.state_dict()
    seen: set[int] = set()
    left = set(live)
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    tensor = live.get(name)
                    if tensor is None or name not in left:
                        return False
                    stored = file.get_tensor(name)
                    if stored.shape != tensor.shape:
                        return False
                    if not torch.equal(stored.to(tensor.dtype), tensor.detach().cpu()):
                        return False
                    left.discard(name)
                    seen.add(tensor.data_ptr())
        except (OSError, SafetensorError):
            return False
    return all(live[name].data_ptr() in seen for name in left)  # tied to one that is there
