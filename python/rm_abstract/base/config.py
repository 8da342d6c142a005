"""Settings of a session, found among arguments, environment and rm_abstract.toml.

The one table of options lives in the core (src/base/options.cpp): names, environment variables,
accepted values and defaults come from there; this file only turns Python values into text and back.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rm_abstract.base.errors import ConfigError, RoutingWarning, from_core

FILE_NAME = "rm_abstract.toml"


@dataclass(frozen=True)
class Settings:
    """Resolved options: ``values[name]`` is (canonical text, source)."""

    values: Mapping[str, tuple[str, str]]

    def text(self, name: str) -> str:
        return self.values[name][0]

    def source(self, name: str) -> str:
        return self.values[name][1]

    def flag(self, name: str) -> bool:
        return self.text(name) == "true"

    def integer(self, name: str) -> int:
        return int(self.text(name))

    def integers(self, name: str) -> list[int]:
        return [int(part) for part in self.text(name).split(",") if part]

    def of_plugin(self, name: str) -> dict[str, str]:
        """The options given for one plugin. Raises ConfigError for text that is no such object."""
        return self.plugins().get(name, {})

    def plugins(self) -> dict[str, dict[str, str]]:
        """All of them, by plugin. Raises ConfigError."""
        text, source = self.values["plugin_options"]
        try:
            found = json.loads(text or "{}")
            return {
                str(plugin): {str(name): to_text(name, value) for name, value in given.items()}
                for plugin, given in found.items()
            }
        except (ValueError, AttributeError):
            raise ConfigError(
                f"[plugin_options] expected a JSON object of objects from {source}, got {text!r}; "
                """try '{"rbln": {"num_devices": 2}}'"""
            ) from None

    def fallback_for(self, group: str) -> str:
        """ "warn", "allow" or "error" for one group of reasons (routing, capture, compile, …)."""
        policy, _, groups = self.text("fallback").partition(":")
        if policy == "error" and groups and group not in groups.split(","):
            return "warn"
        return policy

    def replaced(self, name: str, text: str) -> Settings:
        """A copy with one option given as an argument; the others keep their sources."""
        changed = resolve({name: text}).values[name]
        return Settings({**self.values, name: changed})

    def same_as(self, other: Settings) -> bool:
        return {k: v[0] for k, v in self.values.items()} == {
            k: v[0] for k, v in other.values.items()
        }


def resolve(arguments: Mapping[str, Any]) -> Settings:
    """Argument > environment > file > default. None means "not given". Raises ConfigError."""
    from rm_abstract import _core

    given: dict[str, str] = {}
    for name, value in arguments.items():
        if value is None:
            continue
        if name == "compile_options":
            given.update(_compile_options(value))
        else:
            given[name] = to_text(name, value)
    path = find_file()
    file = read_file(path) if path else {}
    try:
        resolved = _core.options.resolve(given, file, str(path or FILE_NAME))
    except _core.CoreError as error:
        raise from_core(error, ConfigError) from None
    text, source = resolved["device"]
    try:
        _core.control.parse_device(text)
    except _core.CoreError as error:
        raise ConfigError(f"{error} from {source}; try device='auto'") from None
    _warn_of_unbuilt(resolved)
    return Settings({name: (text, source) for name, (text, source) in resolved.items()})


def _warn_of_unbuilt(resolved: Mapping[str, tuple[str, str]]) -> None:
    """An option that does nothing yet must not look as if it did."""
    device = resolved["device"][0].partition(":")[0]
    for row in table():
        text, source = resolved[row["name"]]
        inert = text in row["unbuilt"].split("|")
        if (row["name"], text) == ("precision", "bf16") and device not in ("auto", "cpu", "gpu"):
            inert = False  # an accelerator that computes in it may serve then
        if inert and text != row["default"]:
            warnings.warn(
                f"[options] {row['name']}={text!r} from {source} has no effect in this version; "
                f"try {row['default']!r}",
                RoutingWarning,
                stacklevel=4,
            )


def apply_log(settings: Settings) -> None:
    """Diagnostics of the core at the levels these settings ask for."""
    from rm_abstract import _core

    _core.options.configure_log(settings.text("log"))


def table() -> list[dict[str, Any]]:
    """Every option: name, env, group, type, default, accepted, affects_artefact, help."""
    from rm_abstract import _core

    return list(_core.options.table())


def _compile_options(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"[compile_options] expected a dict of options, got {type(value).__name__}; "
            "try compile_options={'precision': 'bf16'}"
        )
    groups = {row["name"]: row["group"] for row in table()}
    plugins = {k: v for k, v in value.items() if isinstance(v, Mapping) and k not in groups}
    value = {k: v for k, v in value.items() if k not in plugins}
    accepted = [name for name, group in groups.items() if group == "compile"]
    for name in value:
        if name not in accepted:
            near = difflib.get_close_matches(str(name), accepted, n=1, cutoff=0.0)[0]
            hint = f"init({name}=...)" if groups.get(name) == "session" else repr(near)
            raise ConfigError(
                f"[compile_options] expected one of {', '.join(accepted)}, got {name!r} from the "
                f"argument; try {hint}"
            )
    given = {name: to_text(name, item) for name, item in value.items() if item is not None}
    if plugins:
        given["plugin_options"] = to_text("plugin_options", plugins)
    return given


_PATHS = ("cache_dir", "cache_shared_dir", "cache_secret_file", "dump_ir")


def to_text(name: str, value: object) -> str:
    """The text form the options table understands."""
    if name in _PATHS:
        if not isinstance(value, (str, os.PathLike)):
            raise ConfigError(
                f"[{name}] expected a path from the argument, got {type(value).__name__}; "
                "try text or a pathlib.Path"
            )
        return os.path.expanduser(os.fspath(value))
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, Mapping):
        try:
            return json.dumps(value, sort_keys=True)
        except TypeError as error:
            raise ConfigError(f"[{name}] expected values that JSON can hold: {error}") from None
    if isinstance(value, (list, tuple)):
        return ",".join(to_text(name, item) for item in value)
    if type(value).__module__ == "torch":  # torch.device, torch.dtype: as users write them
        return str(value).removeprefix("torch.")
    raise ConfigError(
        f"[{name}] expected text, a number, a list or a dict from the argument, got "
        f"{type(value).__name__}; try a plain value"
    )


def find_file() -> Path | None:
    """rm_abstract.toml of the project around the working directory, else the user's own."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the working directory was removed
        here = None
    if here is not None:
        for folder in (here, *here.parents):
            if (folder / FILE_NAME).is_file():
                return folder / FILE_NAME
            if (folder / ".git").exists() or (folder / "pyproject.toml").exists():
                break
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    user = Path(base) / FILE_NAME
    return user if user.is_file() else None


def read_file(path: Path) -> dict[str, str]:
    """The file's options as text; `[compile_options]` may be a table or flat keys."""
    tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"[config] expected a readable TOML file, got {path}: {error}; try to fix or remove it"
        ) from None
    flat: dict[str, str] = {}
    for name, value in data.items():
        if name == "compile_options" and isinstance(value, dict):
            plugins = {k: v for k, v in value.items() if isinstance(v, dict)}
            flat.update({k: to_text(k, v) for k, v in value.items() if k not in plugins})
            if plugins:
                flat["plugin_options"] = to_text("plugin_options", plugins)
        else:
            flat[name] = to_text(name, value)
    return flat
