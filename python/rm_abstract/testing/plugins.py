"""Where built plugins lie: the installed package's folder, or RM_TEST_PLUGINS for a build tree."""

from __future__ import annotations

import os
from pathlib import Path


def plugin_folders() -> list[Path]:
    """Folders that are searched, in order; RM_TEST_PLUGINS is colon-separated."""
    given = [Path(p) for p in os.environ.get("RM_TEST_PLUGINS", "").split(os.pathsep) if p]
    return [*given, Path(__file__).resolve().parent.parent / "backends"]


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
