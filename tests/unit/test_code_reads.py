"""What code may read is found in its bytecode, on every version of Python."""

from __future__ import annotations

import argparse
import dis
import inspect
import os
import subprocess
import sys
import tarfile
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rm_abstract.guards import code
from rm_abstract.guards.code import reads_of

package: Any = None


def written(x: Any) -> Any:
    return getattr(x, "k", 1.0)


def written_twice(x: Any) -> Any:
    return getattr(x.y.z, "k", x.q(1, 2)) * hasattr(x, "z")


def written_beside_a_call(x: Any, n: Any) -> Any:
    return getattr(x, "a", dict(a=len(n)))


def formatted(x: Any, i: int) -> Any:
    return getattr(x, f"k_{len(i.shape) - 2}")  # type: ignore[attr-defined]


def given(x: Any, n: str) -> Any:
    return getattr(x, n)


def added(x: Any, n: str) -> Any:
    return getattr(x, "a" + n, None)


def chosen(x: Any, n: bool) -> Any:
    return getattr(x, "a" if n else "b")


def passed(x: Any) -> Any:
    return map(getattr, [x], ["k"])


def through_vars(x: Any) -> Any:
    return vars(x)["k"]


def through_its_dictionary(x: Any) -> Any:
    return x.__dict__["k"]


def inside(x: Any) -> Any:
    return [getattr(x, n) for n in ("a", "b")]


@pytest.mark.parametrize("function", [written, written_twice, written_beside_a_call])
def test_a_written_name_is_a_name_like_others(function: Callable[..., Any]) -> None:
    found = reads_of(function.__code__)
    assert not found.dynamic
    assert found.names & {"k", "a"}


@pytest.mark.parametrize(
    "function",
    [formatted, given, added, chosen, passed, through_vars, through_its_dictionary, inside],
)
def test_a_computed_name_may_be_any(function: Callable[..., Any]) -> None:
    assert reads_of(function.__code__).dynamic


def test_global_variables_come_with_the_attributes_read_of_them() -> None:
    def reads() -> Any:
        return os.environ["A"] + package.sub.VALUE + str(len(sys.path))

    chains = reads_of(reads.__code__).chains
    assert {("os", "environ"), ("package", "sub", "VALUE"), ("sys", "path")} <= set(chains)


def test_a_builtin_with_effects_that_is_passed_on_is_named() -> None:
    def passes() -> Any:
        return list(map(print, ["x"]))

    def calls() -> None:
        print("x")

    assert reads_of(passes.__code__).passed_on == ("print",)
    if sys.version_info >= (3, 11):  # before, the interpreter does not tell the two apart
        assert reads_of(calls.__code__).passed_on == ()


def test_names_are_read_as_dis_reads_them() -> None:
    kinds = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "IMPORT_NAME"}
    seen = 0
    for module in (argparse, inspect, subprocess, tarfile, typing):  # long ones: extended arguments
        assert module.__file__ is not None
        source = Path(module.__file__).read_text()
        for inner in code._codes(compile(source, module.__file__, "exec")):
            found = [row for row in code._named(inner) if row[0]]
            expected = [(i.opname, i.argval) for i in dis.get_instructions(inner)]
            assert found == [row for row in expected if row[0] in kinds]
            seen += len(found)
    assert seen > 5_000
