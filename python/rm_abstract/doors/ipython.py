"""``%load_ext rm_abstract``: initialises in a notebook; adds the line magic ``%rm_explain``."""

from __future__ import annotations

from typing import Any

from rm_abstract import api


def load_ipython_extension(shell: Any) -> None:
    """Called by IPython. Options come from the environment and rm_abstract.toml, as for init()."""
    api.init()
    shell.register_magic_function(_explain, magic_kind="line", magic_name="rm_explain")


def unload_ipython_extension(shell: Any) -> None:
    """Called by ``%unload_ext rm_abstract``."""
    api.shutdown()
    shell.magics_manager.magics["line"].pop("rm_explain", None)


def _explain(line: str) -> None:
    """Print what ran where, and why not."""
    print(api.explain())
