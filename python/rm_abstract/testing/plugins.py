"""Where built plugins lie: the installed package's folder, or RM_TEST_PLUGINS for a build tree."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def plugin_folders() -> list[Path]:
    """Folders that are searched, in order; RM_TEST_PLUGINS is colon-separated. An editable install
    keeps the sources and what was built apart: the compiled core shows the second."""
    given = [Path(p) for p in os.environ.get("RM_TEST_PLUGINS", "").split(os.pathsep) if p]
    core = importlib.util.find_spec("rm_abstract._core")
    beside = [Path(core.origin).resolve().parent] if core is not None and core.origin else []
    parents = dict.fromkeys([Path(__file__).resolve().parent.parent, *beside])
    return [*given, *(parent / "backends" for parent in parents)]


def built_plugin(name: str) -> Path:
    """The path of ``rm_backend_<name>.so``; FileNotFoundError lists where it looked."""
    file = f"rm_backend_{name}.so"
    for folder in plugin_folders():
        for path in (folder / file, folder / name / file):
            if path.is_file():
                return path
    looked = ", ".join(str(f) for f in plugin_folders())
    raise FileNotFoundError(
        f"[plugins] expected {file} in {looked}; build it or set RM_TEST_PLUGINS"
    )
