"""Decoders on FuriosaAI's own engine, furiosa-llm: what its builder `fxb` says of a model, and
makes of it. Runs the vendor's program in its environment; imports nothing of it.

A bundle (.fxb) has programs only: the weights stay in the checkpoint, so one serves every
checkpoint of an architecture.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rm_abstract.worker.interpreter import inherited

PACKAGE = "furiosa-llm"
LONGEST = 4096  # tokens of a row where nobody says more: more are more programs to build
LEVELS = ("O0", "O1", "O2", "O3")
_DRY_RUN_S = 300.0
_TAIL = 400  # characters of what it said last


@dataclass(frozen=True)
class Answer:
    """``why`` is empty when it builds the model."""

    said: str
    why: str = ""


def program(python: str) -> str:
    """The builder beside a Python; "" where that environment has none."""
    found = Path(python).parent / "fxb"
    return str(found) if found.is_file() else ""


# What a configuration says of calls and labels, not of programs; fxb refuses the first of them and
# the last.
_NOT_OF_PROGRAMS = (
    "output_hidden_states", "output_attentions", "return_dict", "chunk_size_feed_forward",
    "id2label", "label2id", "problem_type", "_name_or_path", "is_encoder_decoder",
)  # fmt: skip


def old_style(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as transformers 4 wrote it: fxb 2026.4.0 refuses the keys of transformers 5.

    Raises ValueError for what it has no place for.
    """
    kept = {name: value for name, value in config.items() if name not in _NOT_OF_PROGRAMS}
    rope = kept.pop("rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("rotary embeddings of several kinds in one model")
    if "rope_theta" in rope:
        kept["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        kept["rope_scaling"] = {name: v for name, v in rope.items() if name != "rope_theta"}
    if "dtype" in kept:
        kept["torch_dtype"] = kept.pop("dtype")
    heads, size = kept.get("num_attention_heads"), kept.pop("head_dim", None)
    if size and heads and size * heads != kept.get("hidden_size"):
        raise ValueError(f"heads of {size}, which hidden_size and num_attention_heads do not say")
    return kept


def dry_run(python: str, config: Mapping[str, Any], max_model_len: int) -> Answer:
    """Whether it builds a model of that configuration: takes seconds, and no weights."""
    try:
        old = old_style(config)
    except ValueError as error:
        return Answer("", str(error))
    with tempfile.TemporaryDirectory(prefix="rm-fxb-") as folder:
        Path(folder, "config.json").write_text(json.dumps(old), encoding="utf-8")
        out = str(Path(folder, "out.fxb"))
        return _run(python, folder, out, max_model_len, "O0", ["--dry-run"], _DRY_RUN_S)


def build(
    python: str, config: Mapping[str, Any], out: Path, max_model_len: int, level: str
) -> Answer:
    """Builds the bundle ``out``, which appears when it is whole. Takes its time."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=out.parent) as folder:
        Path(folder, "config.json").write_text(json.dumps(old_style(config)), encoding="utf-8")
        made = Path(folder, "out.fxb")
        answer = _run(python, folder, str(made), max_model_len, level, [], None)
        if not answer.why and not made.is_file():
            return Answer(answer.said, f"it said it had built {made.name}, and there is none")
        if not answer.why:
            os.replace(made, out)
        return answer


def _run(
    python: str, folder: str, out: str, length: int, level: str, more: list[str],
    limit_s: float | None,
) -> Answer:  # fmt: skip
    # Its sampler is not used, and wants a vocabulary of Llama 3's size.
    command = [
        program(python), "build", "-O", level, "--max-model-len", str(length),
        "--no-enable-sampler", *more, folder, out,
    ]  # fmt: skip
    path = os.pathsep.join((str(Path(python).parent), os.environ.get("PATH", os.defpath)))
    env = {**inherited("furiosa"), "PATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=limit_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answer("", f"fxb: {error}")
    said = done.stdout.decode(errors="replace")
    if done.returncode == 0:
        return Answer(said)
    last = (done.stderr.decode(errors="replace").strip() or said.strip())[-_TAIL:]
    return Answer(said, f"fxb ended with status {done.returncode}: {last}")


def tools_missing(python: str) -> list[str]:
    """Programs a build needs that its environment and PATH lack."""
    path = os.pathsep.join((str(Path(python).parent), os.environ.get("PATH", os.defpath)))
    return [name for name in ("fxb", "furiosa-tcc") if shutil.which(name, path=path) is None]
