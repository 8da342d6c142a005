"""Write docs/options.md from the options table of the core; --check says whether it is current."""

from __future__ import annotations

import sys
from pathlib import Path

from rm_abstract.base.config import table

PAGE = Path(__file__).resolve().parent / "options.md"
GROUPS = {
    "session": ("Session", "Arguments of `rm_abstract.init()`."),
    "compile": (
        "Compile options",
        "Keys of the dictionary `compile_options`, an argument of `rm_abstract.init()`.",
    ),
    "cache": ("Compile cache", "See [cache.md](cache.md)."),
    "debug": ("Looking inside", "For finding out what happens and why."),
}


def page() -> str:
    """The Markdown of the table."""
    out = [
        "# Options",
        "",
        "The value of an option comes from the argument of `init()`, else from its environment",
        "variable, else from one file `rm_abstract.toml`, else it is the default. That file is the",
        "nearest one in the working directory or a folder above it (up to the first with `.git` or",
        "`pyproject.toml`); the one in `$XDG_CONFIG_HOME` or `~/.config` is read only if there is",
        "none. An unknown name or value raises `ConfigError`. The column *recompiles* says whether",
        "a new value needs new compiled programs of all models; the cache keeps those of the",
        "earlier values as well.",
        "Generated from `src/base/options.cpp` by `docs/gen_options.py`; do not edit.",
    ]
    for group, (title, text) in GROUPS.items():
        out += ["", f"## {title}", "", text, ""]
        out += [
            "| option | environment | default | accepted | recompiles | what it does |",
            "|---|---|---|---|---|---|",
        ]
        for row in table():
            if row["group"] != group:
                continue
            cells = [
                f"`{row['name']}`",
                f"`{row['env']}`" if row["env"] else "",
                f"`{row['default']}`" if row["default"] else "",
                row["accepted"].replace("|", "\\|"),
                "yes" if row["affects_artefact"] else "no",
                row["help"],
            ]
            out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE} is not current: run {__file__}")
    PAGE.write_text(page())
