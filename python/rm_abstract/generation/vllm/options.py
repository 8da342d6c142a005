"""Options of the vLLM engine: which there are, what is passed on, what we set ourselves.

The names are those of vLLM's own EngineArgs, read from the source of the vLLM that is installed
(importing it takes seconds), so that a misspelt one is refused at init() with the nearest name.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rm_abstract.base.errors import ConfigError, Error
from rm_abstract.worker.interpreter import inherited, interpreter

# Of our own, beside vLLM's: seconds.
OURS = {"start_timeout_s": 600.0, "idle_timeout_s": 0.0}
# What the worker is built on: set by us.
_FIXED = {
    "model": "the model that is loaded",
    "model_weights": "the model that is loaded",
    "hf_config_path": "the model that is loaded",
    "skip_tokenizer_init": "only token ids reach the engine",
    "tokenizer": "only token ids reach the engine",
    "tokenizer_mode": "only token ids reach the engine",
    "generation_config": "transformers has resolved the configuration",
    "override_generation_config": "transformers has resolved the configuration",
    "worker_extension_cls": "it takes changed weights",
}
_MISSING = "vLLM, which inference_engine='vllm' needs"


def backend(device: str) -> str:
    """Whose Python runs vLLM for a device: with Rebellions' NPUs it is vllm-rbln, which lies in the
    environment of their software, unless RM_VLLM_PYTHON names another."""
    is_rebellions = device.partition(":")[0] in ("rbln", "npu")
    own = is_rebellions and "RM_RBLN_PYTHON" in os.environ and "RM_VLLM_PYTHON" not in os.environ
    return "rbln" if own else "vllm"


def check(options: Mapping[str, Any], device: str = "cpu") -> None:
    """Refuses what vLLM does not know. Raises ConfigError; Error (RM330) without a vLLM."""
    accepted = names(backend(device))
    for name in options:
        if name in _FIXED:
            raise ConfigError(
                f"[engine_options] expected options of vLLM, got {name!r}, which rm_abstract sets "
                f"({_FIXED[name]}); try without it"
            )
        if name not in accepted:
            near = difflib.get_close_matches(str(name), accepted, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"[engine_options] expected an option of vLLM, got {name!r}; try {near!r}"
            )
    for name in OURS:
        value = options.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise ConfigError(
                f"[engine_options] expected seconds for {name}, got {value!r}; try 60"
            )


def names(backend: str = "vllm") -> list[str]:
    """Every option. Raises Error (RM330) when the worker's Python has no vLLM."""
    python = interpreter(backend)
    folder = _folder(python, inherited(backend).get("PYTHONPATH", ""))
    if folder is None:
        remedy = "pip install vllm there, or RM_VLLM_PYTHON with the Python of an environment that "
        remedy += "has it"
        if backend == "rbln":
            remedy = "RM_RBLN_PYTHON with that of `rm-abstract env create vllm-rbln FOLDER`"
        raise Error(
            f"[inference_engine] expected {_MISSING}, got none in {python}; try {remedy}",
            code="RM330",
        )
    found = {*_fields(folder / "engine" / "arg_utils.py"), *OURS}
    return sorted(found - set(_FIXED))


@functools.cache
def _folder(python: str, search_path: str) -> Path | None:
    """Where that Python's vLLM lies, looked for as the worker does; nothing is imported."""
    if python == sys.executable:
        spec = importlib.util.find_spec("vllm")
        origin = None if spec is None else spec.origin
    else:
        code = "import importlib.util as u; s = u.find_spec('vllm'); print(s.origin if s else '')"
        try:
            ran = subprocess.run(
                [python, "-c", code], capture_output=True, text=True, timeout=60, check=False,
                env={**inherited("vllm"), "PYTHONPATH": search_path},
            )  # fmt: skip
        except OSError as error:
            raise Error(
                f"[inference_engine] expected a Python in RM_VLLM_PYTHON, got {error}; try its "
                "full path",
                code="RM330",
            ) from None
        origin = ran.stdout.strip()
    return Path(origin).parent if origin else None


@functools.cache
def _fields(source: Path) -> frozenset[str]:
    """The annotated names in the bodies of vLLM's classes of arguments."""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise Error(
            f"[inference_engine] expected {_MISSING}, got {error}; try vllm 0.32", code="RM330"
        ) from None
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs"):
            for row in node.body:
                if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name):
                    found.add(row.target.id)
    if "tensor_parallel_size" not in found:
        raise Error(
            f"[inference_engine] expected {_MISSING}, got a version whose options are elsewhere; "
            "try vllm 0.32",
            code="RM330",
        )
    return frozenset(name for name in found if not name.startswith("_"))


def arguments(options: Mapping[str, Any], dtype: str, kind: str) -> dict[str, Any]:
    """What vLLM's engine is started with; ``dtype``: the model's own, such as "float32"; ``kind``:
    of the device, such as "cuda"."""
    found = {
        "dtype": dtype,
        "enforce_eager": kind == "cpu",  # compiling takes minutes on a CPU
        "disable_log_stats": True,
        **{name: value for name, value in options.items() if name not in OURS},
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
    }
    if kind == "rbln":
        # vllm-rbln's sampler leaves out what is least likely, at most 0.5 %: vLLM's does not.
        given = found.get("additional_config") or {}
        if isinstance(given, dict):
            found["additional_config"] = {"use_custom_sampler": False, **given}
    else:  # there the weights are in the compiled programs
        found["worker_extension_cls"] = "rm_vllm_reload.Reload"
    return found


def environment(options: Mapping[str, Any], device: str) -> dict[str, str]:
    """The worker's environment for a device such as "cpu" or "cuda:1"."""
    values = {k: v for k, v in inherited(backend(device)).items() if not k.startswith("RM_")}
    values.pop("PYTHONSTARTUP", None)
    values["RM_DISABLE"] = "1"
    values["PYTHONUNBUFFERED"] = "1"
    values.setdefault("VLLM_NO_USAGE_STATS", "1")
    here = str(Path(__file__).resolve().parent)
    old = [path for path in values.get("PYTHONPATH", "").split(os.pathsep) if path]
    values["PYTHONPATH"] = os.pathsep.join([here, *(os.path.abspath(path) for path in old)])
    kind, _, number = device.partition(":")
    if kind == "cpu":
        if "kv_cache_memory_bytes" not in options:
            values.setdefault("VLLM_CPU_KVCACHE_SPACE", str(_cache_gib()))
    elif kind == "rbln":
        allowed = values.pop("RBLN_DEVICES", "")  # its old name, which would overrule the new one
        allowed = values.get("RBLN_VISIBLE_DEVICES", allowed)
        config = options.get("additional_config") or {}
        each = config.get("num_devices_per_local_rank", 1) if isinstance(config, dict) else 1
        count = _processes(options) * int(each)
        values["RBLN_VISIBLE_DEVICES"] = _visible(int(number or 0), count, allowed)
    else:
        allowed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        values["CUDA_VISIBLE_DEVICES"] = _visible(int(number or 0), _processes(options), allowed)
    return values


def _processes(options: Mapping[str, Any]) -> int:
    return int(options.get("tensor_parallel_size", 1)) * int(
        options.get("pipeline_parallel_size", 1)
    )


def _visible(first: int, count: int, allowed: str) -> str:
    """The devices for vLLM: the session's and those after it, out of what this process may use."""
    known = [part for part in allowed.split(",") if part]
    wanted = range(first, first + count)
    return ",".join(known[i] if i < len(known) else str(i) for i in wanted)


def _cache_gib() -> int:
    """A quarter of the memory that is free, at most 4 GiB: vLLM's own default takes half."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(4, free // 4 // 2**30))
