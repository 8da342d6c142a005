"""Where the installed C and C++ headers are, for whoever compiles a plugin."""

from __future__ import annotations

from pathlib import Path


def include_dir() -> str:
    """The folder to give the compiler with -I: it holds rm/backend.h, rm/kernels.h, rm/plugin.hpp
    and the DLPack header that they include.

    Raises FileNotFoundError when the package was installed without its headers.
    """
    folder = Path(__file__).resolve().parent.parent / "include"
    for header in ("rm/backend.h", "dlpack/dlpack.h"):
        if not (folder / header).is_file():
            raise FileNotFoundError(
                f"[include_dir] expected {folder / header}; the package was built without its "
                "headers: install it again with pip install ."
            )
    return str(folder)
