"""Runs a case of step_cases.py compiled and by eager and says where they differ.

Before every step the second world gets the numbers of the first, so each step is compared alone:
Adam would carry the rounding of one step into all later ones.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from step_cases import EDITS, Case, World, batch

import rm_abstract as rm


def run(case: Case) -> tuple[list[str], dict[str, Any]]:
    """(what differs, the step's report)."""
    ours, theirs = case.world(), case.world()
    step = rm.compile_step(
        ours.model,
        ours.loss_fn,
        ours.optimizer,
        clip_norm=ours.clip_norm,
        options={"fallback": "allow"},
    )
    findings: list[str] = []
    for i, name in enumerate(case.edits):
        if name:
            for world in (ours, theirs):
                EDITS[name](world, random.Random(case.seed * 31 + i))
            if ours.clip_norm is not None:
                step.clip_norm = ours.clip_norm
        findings += [f"step {i} ({name}), before: {f}" for f in _copied(ours, theirs)]
        x, y = batch(case, i)
        if ours.eager_steps:
            ours.eager_steps -= 1
            results = [
                _outcome(w.mode, w.eager, x, y, not w.leave_gradients) for w in (ours, theirs)
            ]
        else:
            results = [
                _outcome(ours.mode, step, x, y),
                _outcome(theirs.mode, theirs.eager, x, y),
            ]
            if any(p.grad is not None for g in ours.optimizer.param_groups for p in g["params"]):
                findings.append(f"step {i} ({name}): gradients are left")
        ours.mode = theirs.mode = None
        findings += [f"step {i} ({name}): {f}" for f in _differences(ours, theirs, *results)]
        if findings:
            break
    for world in (ours, theirs):
        EDITS["hooks_are_removed"](world, random.Random(0))
    report = step.report()
    for code, detail in report["reasons"].items():
        if not re.fullmatch(r"RM\d{3}", code) or code == "RM705":
            findings.append(f"{code} {detail}")
    return findings, report


def _outcome(mode: Any, function: Any, *arguments: Any) -> Any:
    """The loss, or the type of what was raised."""
    try:
        with warnings.catch_warnings(), mode() if mode else nullcontext():
            warnings.simplefilter("ignore")
            return function(*arguments)
    except Exception as error:
        return type(error), str(error)


def _tensors(world: World) -> Iterator[tuple[str, torch.Tensor]]:
    yield from world.model.state_dict(keep_vars=True).items()
    index = 0
    for group in world.optimizer.param_groups:
        for p in group["params"]:
            yield f"p{index}", p
            for key, value in sorted(world.optimizer.state.get(p, {}).items()):
                if value is not None:
                    yield f"p{index}.{key}", torch.as_tensor(value)
            index += 1


def _copied(ours: World, theirs: World) -> list[str]:
    """Gives the second world the numbers of the first."""
    a, b = dict(_tensors(ours)), dict(_tensors(theirs))
    if a.keys() != b.keys():
        return [f"other tensors: {sorted(a.keys() ^ b.keys())}"]
    with torch.no_grad():
        for name, value in a.items():
            if not name.endswith(".step"):
                b[name].copy_(value)
            elif float(value) != float(b[name]):
                return [f"{name}: {float(value)}, eager's {float(b[name])}"]
    return []


def _differences(ours: World, theirs: World, got: Any, wanted: Any) -> list[str]:
    if isinstance(got, tuple) or isinstance(wanted, tuple):
        if type(got) is not type(wanted) or got[0] is not wanted[0]:
            return [f"{got}, eager {wanted}"]
    elif not torch.allclose(got, wanted, rtol=1e-4, atol=1e-6, equal_nan=True):
        return [f"loss {float(got)}, eager's {float(wanted)}"]
    a, b = dict(_tensors(ours)), dict(_tensors(theirs))
    if a.keys() != b.keys():
        return [f"other tensors: {sorted(a.keys() ^ b.keys())}"]
    found = []
    for name, value in a.items():
        other = b[name]
        if value.dtype != other.dtype or value.shape != other.shape:
            found.append(f"{name}: {value.dtype} {tuple(value.shape)}")
            continue
        apart = _apart(name, value.detach(), other.detach(), a, theirs)
        if apart:
            found.append(f"{name}: {apart:.3g} apart")
    return found


def _apart(
    name: str, ours: torch.Tensor, theirs: torch.Tensor, held: dict[str, Any], world: World
) -> float:
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return float("nan")
    ours, theirs = (
        ours.nan_to_num(0, 1e30, -1e30).double(),
        theirs.nan_to_num(0, 1e30, -1e30).double(),
    )
    error = (ours - theirs).abs()
    # Adam divides by the root of this: where it is rounding noise, so is the update.
    second = held.get(f"{name}.exp_avg_sq")
    if second is None:
        for key, value in held.items():
            if value is held[name] and f"{key}.exp_avg_sq" in held:
                second = held[f"{key}.exp_avg_sq"]
    if second is not None and second.numel() and world.optimizer.param_groups:
        root = second.detach().double().nan_to_num(0, 1e30, 1e30).sqrt()
        rate = max(float(g["lr"]) for g in world.optimizer.param_groups)
        error = torch.where(root > 1e-4, error, (error - 4 * rate).clamp(min=0))
    scale = float(theirs.abs().clamp(max=1e20).max()) if theirs.numel() else 0.0
    worst = float(error.max()) if error.numel() else 0.0
    return worst if worst > 2e-4 * scale + 1e-6 else 0.0
