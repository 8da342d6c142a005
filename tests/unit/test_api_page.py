"""docs/api.md names every public function with the parameters it has; pages link to what exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import rm_abstract as rm

CALL = re.compile(r"^\| `(\w+)\(([^`]*)\)` \|", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.fixture
def page(repository: Path) -> str:
    return (repository / "docs" / "api.md").read_text()


def test_every_public_name_is_on_the_page(page: str) -> None:
    internal = {"__version__", "RoutingWarning", "Report", "Executable", "Session"}
    missing = [name for name in rm.__all__ if f"`{name}" not in page and name not in internal]
    assert not missing


def test_functions_on_the_page_have_the_parameters_that_it_says(page: str) -> None:
    calls = CALL.findall(page)
    assert len(calls) >= 12
    for name, parameters in calls:
        said = [part.split("=")[0].strip() for part in parameters.split(",")]
        said = [part for part in said if part not in ("", "*")]
        function = getattr(rm, name)
        target = function.__init__ if inspect.isclass(function) else function
        actual = [p for p in inspect.signature(target).parameters if p != "self"]
        assert said == actual, name


def test_functions_of_the_cache_on_the_page_exist(page: str) -> None:
    (row,) = (line for line in page.splitlines() if line.startswith("| `cache` |"))
    names = re.findall(r"`(\w+)\(", row)
    assert len(names) >= 10
    assert all(callable(getattr(rm.cache, name)) for name in names)


def test_links_between_pages_lead_to_files(repository: Path) -> None:
    pages = [repository / "README.md", *sorted((repository / "docs").rglob("*.md"))]
    broken = [
        f"{page.relative_to(repository)}: {target}"
        for page in pages
        for target in LINK.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken
