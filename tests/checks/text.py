"""Text that must not be committed: paths of one machine, registries, keys, tabs, merge markers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

BINARY = {".safetensors", ".png", ".rmc", ".onnx", ".so"}
EVERYWHERE = {
    "a path of one machine": re.compile(r"/(?:home|Users|work|root)/[\w.-]+/|/root/\.\w"),
    "a merge marker": re.compile(r"^(?:<{7} |>{7} |={7}$)", re.MULTILINE),
    "a package registry": re.compile(r"index-url|--find-links|pypi\.org|pythonhosted\.org"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}
IN_SOURCES = {
    "a tab": re.compile(r"\t"),
    "trailing blanks": re.compile(r"[ \t]+$", re.MULTILINE),
}
SOURCES = {".c", ".cpp", ".cu", ".h", ".hpp", ".def", ".py", ".sh", ".cmake", ".txt", ".toml"}


def findings_in(content: str, is_source: bool) -> Iterator[tuple[int, str]]:
    """(line, what) for each forbidden text."""
    patterns = EVERYWHERE | (IN_SOURCES if is_source else {})
    for what, pattern in patterns.items():
        for match in pattern.finditer(content):
            yield content.count("\n", 0, match.start()) + 1, what


def check(root: Path, files: list[Path]) -> Iterator[str]:
    for path in files:
        if path.suffix in BINARY or path == Path(__file__).resolve():
            continue
        name = path.relative_to(root)
        try:
            content = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            yield f"{name}: not UTF-8 text"
            continue
        for line, what in findings_in(content, path.suffix in SOURCES):
            yield f"{name}:{line}: {what}"
        if path.suffix in SOURCES | {".md"} and content and not content.endswith("\n"):
            yield f"{name}: no newline at the end"
