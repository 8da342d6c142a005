"""engine_options of inference_engine="onnxruntime". Imports neither torch nor ONNX Runtime."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module, util
from typing import Any

from rm_abstract.base.errors import ConfigError, Error

DEFAULT_PROVIDERS = ("CPUExecutionProvider",)
LEVELS = ("all", "extended", "basic", "disable")
OPTIONS = {
    "providers": "a list of execution providers that this ONNX Runtime has",
    "intra_op_num_threads": "threads of one operator; torch's number of threads",
    "inter_op_num_threads": "operators at once",
    "graph_optimization_level": "all, extended, basic or disable",
}
_NEEDED = ("onnxruntime", "onnx", "onnxscript")


def check(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for what is not understood; Error (RM330) without the software."""
    missing = [name for name in _NEEDED if util.find_spec(name) is None]
    if missing:
        raise Error(
            f"[inference_engine] expected {', '.join(_NEEDED)} for inference_engine='onnxruntime', "
            f"got no {' and no '.join(missing)}; try pip install 'rm_abstract[onnxruntime]'",
            code="RM330",
        )
    for name, value in options.items():
        if name not in OPTIONS:
            near = difflib.get_close_matches(str(name), list(OPTIONS), n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"[engine_options] expected one of {', '.join(OPTIONS)}, got {name!r}; try {near!r}"
            )
        if name.endswith("_threads") and (type(value) is not int or value < 1):
            raise ConfigError(
                f"[engine_options] expected a number for {name}, got {value!r}; try 4"
            )
    level = options.get("graph_optimization_level", "all")
    if level not in LEVELS:
        raise ConfigError(
            f"[engine_options] expected one of {', '.join(LEVELS)} for graph_optimization_level, "
            f"got {level!r}; try 'all'"
        )
    wanted = options.get("providers", [])
    if not isinstance(wanted, list):
        raise ConfigError(f"[engine_options] expected a list for providers, got {wanted!r}")
    if wanted:
        known = list(import_module("onnxruntime").get_available_providers())
        for name in wanted:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
                raise ConfigError(
                    f"[engine_options] expected providers of {', '.join(known)}, got {name!r}; try "
                    f"{near!r}"
                )
