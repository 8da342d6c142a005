"""What a capture depends on besides the call: module structure, attributes, sources, versions.

`describe` gives stable text (no addresses, no dict order of sets) or the reason why there is none:
then nothing is looked up or stored under it. Weights enter by name, shape, dtype and tying only.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rm_abstract.base.kinds import kind_of
from rm_abstract.guards import sources
from rm_abstract.guards.found import BOOKKEEPING, Sources, contents
from rm_abstract.guards.kinds import is_buffer
from rm_abstract.guards.packages import installed, is_user_code, namespace_of
from rm_abstract.guards.replaced_code import Unstable, code_digest, replaced_code

__all__ = ["Unstable", "describe"]

CAPTURE_VERSION = 5  # raise it with every change of what a capture gives or a row here says
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Says nothing of what a forward computes; the loss of an evaluated model is no part of it.
_NOT_COMPUTED_WITH = frozenset({"_loss_function", "loss_function", "generation_config"})


def describe(
    module: torch.nn.Module, digest: Callable[[bytes], bytes], found: Sources | None = None
) -> str:
    """The module's identity as text; ``found``: its sources, of this moment. Raises Unstable."""
    seen_tensors: dict[int, str] = {}
    seen_configs: dict[int, int] = {}
    files: set[str] = set()
    rows: list[Any] = []
    found = sources.of_module(module) if found is None else found
    for name, sub in module.named_modules(remove_duplicate=False):
        kind = type(sub)
        files.update(_sources(kind))
        row: list[Any] = [name, kind.__module__, kind.__qualname__, sub.training]
        for group in (sub._parameters, sub._buffers):
            for key, tensor in group.items():
                row.append([key, _tensor(tensor, f"{name}.{key}", seen_tensors)])
        attributes = {k: v for k, v in vars(sub).items() if _is_read(k, found)}
        for key in sorted(attributes):
            try:
                row.append([key, _value(attributes[key], seen_configs, files)])
            except Unstable as error:
                raise Unstable(f"{name or 'the module'}.{key}: {error}") from None
        rows.append(row)
    files.update(_files_of_user_code(found))
    replaced = replaced_code({type(sub) for sub in module.modules()}, files, installed)
    return json.dumps(
        {
            "capture": CAPTURE_VERSION,
            "modules": rows,
            "replaced": replaced,
            "around": _around(found, digest),
            "sources": source_rows(files, digest),
            "versions": _versions(),
            "flags": _flags(),
        },
        separators=(",", ":"),
        sort_keys=True,
    )


def difference(here: str, there: str, found: Sources) -> str:
    """The first part in which two identities differ; empty when the module means the same.

    Replaced methods count only when forward may call something of their name (``found``):
    transformers adds some when it loads a model, which another process need not have done.
    """
    one, other = (json.loads(text) if text else {} for text in (here, there))
    for part in sorted({*one, *other}):
        rows = [which.get(part) for which in (one, other)]
        if part == "replaced" and None not in rows:
            rows = [[row for row in side if found.may_read(row[1])] for side in rows]
        if rows[0] != rows[1]:
            return str(part)
    return ""


def _is_read(name: str, found: Sources) -> bool:
    ours = name in BOOKKEEPING or name in _NOT_COMPUTED_WITH
    return not ours and found.may_read(name)


def _around(found: Sources, digest: Callable[[bytes], bytes]) -> list[Any]:
    """Values that become constants of a capture without being attributes or named tensors."""
    rows: list[Any] = []
    for tensor, where in found.tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        content = digest(flat.numpy().tobytes()).hex()
        rows.append([where, str(tensor.dtype), list(tensor.shape), content])
    for where, value in contents(found):
        if isinstance(value, types.BuiltinFunctionType):
            continue  # of torch or Python, whose versions are in the identity
        if isinstance(value, (set, frozenset)):
            rows.append([where, sorted(map(repr, value))])
        elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            rows.append([where, str(value.dtype), digest(value.tobytes()).hex()])
        elif is_buffer(type(value)):
            view = memoryview(value)
            rows.append([where, view.format, digest(view.tobytes()).hex()])
        elif isinstance(value, types.FunctionType):  # two lambdas have one name
            code = code_digest(value.__code__) if is_user_code(value) else ""
            rows.append([where, value.__module__, value.__qualname__, code])
        else:
            rows.append([where, _text(value)])
    return sorted(rows, key=lambda row: json.dumps(row))


def _text(value: Any) -> Any:
    """A value by its text where two processes agree on it; else its class: what it holds has rows
    of its own."""
    kind = kind_of(value)
    if kind == "tuple":
        return [_text(item) for item in value]
    if isinstance(value, type):
        return ["class", value.__module__, value.__qualname__]
    text = repr(value) if kind in ("plain", "fixed", "scalar") else " at 0x"
    if " at 0x" in text:
        text = ""
    return [type(value).__module__, type(value).__qualname__, text]


def _tensor(tensor: torch.Tensor | None, where: str, seen: dict[int, str]) -> Any:
    if tensor is None:
        return None
    first = seen.setdefault(id(tensor), where)
    return [str(tensor.dtype), list(tensor.shape), str(tensor.device), first]


def _value(value: Any, configs: dict[int, int], files: set[str]) -> Any:
    """A JSON form of an attribute's value that two processes agree on."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if kind_of(value) in ("fixed", "scalar") and not isinstance(value, type):
        return _text(value)
    if isinstance(value, (torch.device, torch.Size)):
        return str(value)
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype), list(value.shape)]
    if isinstance(value, (list, tuple)):
        return [_value(v, configs, files) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_value(v, configs, files)) for v in value)
    if isinstance(value, dict):
        return [[str(k), _value(v, configs, files)] for k, v in value.items()]
    if hasattr(value, "to_diff_dict") and hasattr(value, "to_json_string"):
        if id(value) not in configs:  # transformers configs are shared by every layer
            configs[id(value)] = len(configs)
            text = value.to_json_string(use_diff=False)
            return ["config", type(value).__qualname__, text, _implementations(value)]
        return ["config", configs[id(value)]]
    if isinstance(value, torch.nn.Module):
        return ["module", type(value).__module__, type(value).__qualname__]
    if isinstance(value, functools.partial):
        inner = [value.func, list(value.args), value.keywords]
        return ["partial", *(_value(v, configs, files) for v in inner)]
    if isinstance(value, types.MethodType):
        return ["method", _value(value.__func__, configs, files)]
    if isinstance(value, type):
        return ["class", value.__module__, value.__qualname__]
    if isinstance(value, types.BuiltinFunctionType):
        return ["function", str(value.__module__), value.__qualname__]
    if isinstance(value, types.FunctionType):
        if value.__closure__:
            raise Unstable("a function with captured variables")
        files.update([value.__code__.co_filename])
        # Two lambdas of one file have one name; defaults are bound where a function is made.
        defaults = [*(value.__defaults__ or ()), *sorted((value.__kwdefaults__ or {}).items())]
        return [
            *("function", value.__module__, value.__qualname__, code_digest(value.__code__)),
            *(_value(v, configs, files) for v in defaults),
        ]
    if dataclass_fields := getattr(value, "__dataclass_fields__", None):
        return [type(value).__qualname__] + [
            [f, _value(getattr(value, f), configs, files)] for f in dataclass_fields
        ]
    raise Unstable(f"an object of {type(value).__module__}.{type(value).__qualname__}")


def _implementations(config: Any) -> list[Any]:
    """What a config chooses and does not write to its file: how attention and experts run."""
    rows: list[Any] = []
    for key, value in sorted(vars(config).items()):
        if key.endswith("_implementation_internal"):
            rows.append([key, repr(value)])
        elif hasattr(value, "to_diff_dict") and value is not config:
            rows.append([key, _implementations(value)])
    return rows


def _sources(kind: type) -> Iterator[str]:
    """Files of a class and its bases, torch's own excluded (its version stands for them)."""
    for base in kind.__mro__:
        if base.__module__.split(".")[0] in ("torch", "builtins", "collections", "abc"):
            continue
        file = namespace_of(base).get("__file__")
        if file is None:
            try:
                file = inspect.getsourcefile(base)
            except (OSError, TypeError):
                file = None
        if file is None:
            raise Unstable(f"{base.__qualname__} has no source file")
        yield file
        if not installed(file):
            yield from _user_files()


def _files_of_user_code(found: Sources) -> Iterator[str]:
    """Of functions that were reached and of the classes they use, wherever they were put. What has
    no file has its code in other rows."""
    for function in found.user_functions:
        if os.path.isfile(function.__code__.co_filename):
            yield function.__code__.co_filename


def _user_files() -> Iterator[str]:
    """Sources of all imported modules outside installed packages: helpers of a user's model."""
    for name, module in sys.modules.copy().items():  # another thread may import meanwhile
        if name.split(".")[0] == "torch":  # torch.ops and torch.classes name files that are none
            continue
        file = getattr(module, "__file__", None)
        if file and file.endswith(".py") and not installed(file):
            yield file


def source_rows(files: set[str], digest: Callable[[bytes], bytes]) -> list[list[str]]:
    """Name and content of each file, in an order that no place of installation changes."""
    return sorted([_display(file), _file_digest(file, digest)] for file in files)


def _display(file: str) -> str:
    """Part of the path that does not depend on where things are installed."""
    return "/".join(os.path.abspath(file).split(os.sep)[-2:])


def _file_digest(file: str, digest: Callable[[bytes], bytes]) -> str:
    try:
        with open(file, "rb") as stream:
            return digest(stream.read()).hex()
    except OSError as error:
        raise Unstable(f"source {file}: {error}") from None


def _versions() -> dict[str, str]:
    from rm_abstract._version import __version__

    names = ["torch", "transformers"]
    found = {n: str(getattr(sys.modules[n], "__version__", "")) for n in names if n in sys.modules}
    return {**found, "python": sys.version.split()[0], "rm_abstract": __version__}


def _flags() -> dict[str, str]:
    """Global switches of torch that change what an operator computes or what is traced."""
    return {
        "default_dtype": str(torch.get_default_dtype()),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "autocast": str(torch.is_autocast_enabled("cpu")),
        "autocast_dtype": str(torch.get_autocast_dtype("cpu")),
    }
