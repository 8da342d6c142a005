"""Attributes that code of an installed package reads in another file than that of a module's class:
in a base class, as peft's layers read their active adapter, or in a function beside it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rm_abstract as rm
from rm_abstract.engines.base import MOST_EARLIER

FILES = {
    "__init__.py": "",
    "base.py": """
        class Adapted:
            @property
            def active(self):
                return self._active

            def set_active(self, name):
                self._active = [name]
        """,
    "helper.py": """
        def scaled(module, x):
            return x * module.strength
        """,
    "layer.py": """
        import torch
        from adapted_layers import helper
        from adapted_layers.base import Adapted

        class Layer(torch.nn.Module, Adapted):
            def __init__(self):
                super().__init__()
                self.base = torch.nn.Linear(6, 6)
                self.adapters = torch.nn.ModuleDict(
                    {name: torch.nn.Linear(6, 6) for name in ("first", "second")}
                )
                self.strength = 1.0
                self.set_active("first")

            def forward(self, x):
                result = self.base(x)
                for name in self.active:
                    result = result + self.adapters[name](x)
                return helper.scaled(self, result)
        """,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the package is installed; there is a session."""
    installed = tmp_path / "site-packages"
    package = installed / "adapted_layers"
    package.mkdir(parents=True)
    for name, text in FILES.items():
        (package / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(installed))
    torch.manual_seed(0)
    rm.init("cpu")
    yield installed
    rm.shutdown()
    for name in [n for n in sys.modules if n.split(".")[0] == "adapted_layers"]:
        del sys.modules[name]


def made() -> Any:
    return rm.accelerate(importlib.import_module("adapted_layers.layer").Layer().eval())


def agree(model: Any) -> None:
    x = torch.randn(3, 6)
    with torch.no_grad():
        with rm.disabled():
            wanted = model(x)
        torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)


def routed(model: Any) -> int:
    return int(record(model)["routed"])


def test_what_a_base_class_in_another_file_reads_is_watched(folder: Path) -> None:
    model = made()
    for name in ("first", "second", "first"):
        model.set_active(name)
        for _ in range(3):
            agree(model)
    assert routed(model) > 4


def test_what_a_function_in_another_file_reads_is_watched(folder: Path) -> None:
    model = made()
    for strength in (1.0, 2.0, 1.0):
        model.strength = strength
        for _ in range(3):
            agree(model)
    assert routed(model) > 4


def record(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = rm.explain(model).to_dict()["models"][0]
    return found


def test_states_that_come_back_are_served_by_the_programs_they_had(folder: Path) -> None:
    model = made()
    for turn in range(16):
        model.set_active(("first", "second")[turn % 2])
        agree(model)
    found = record(model)
    assert found["first_calls"] == 2 and found["routed"] == 14
    assert {reason["code"] for reason in found["reasons"]} == {"RM108"}  # of agree()


def test_weights_written_meanwhile_are_read(folder: Path) -> None:
    model = made()
    for turn in range(12):
        model.set_active(("first", "second")[turn % 2])
        if turn in (5, 8):
            with torch.no_grad():
                model.adapters["second"].weight.mul_(1.5)
        if turn in (6, 7, 9):
            model.base.weight.data.add_(0.5)
        agree(model)


def test_only_so_many_states_are_kept(folder: Path) -> None:
    model = made()
    states = MOST_EARLIER + 2
    for turn in range(3 * states):
        model.strength = 1.0 + turn % states
        agree(model)
    engine = vars(model)["_compiled_call_impl"]._engine
    assert len(engine._aside) == MOST_EARLIER


def test_a_state_is_compared_again_under_strict_guards(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rm.shutdown()
    monkeypatch.setenv("RM_GUARD", "strict")
    rm.init("cpu")
    model = made()
    for turn in range(8):
        model.set_active(("first", "second")[turn % 2])
        agree(model)
    assert record(model)["first_calls"] > 2


def test_a_users_class_is_compared_again_in_every_state() -> None:
    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.factor = torch.nn.Linear(6, 6), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.factor

    rm.init("cpu")
    try:
        model = rm.accelerate(Mine().eval())
        for turn in range(12):
            model.factor = 1.0 + turn // 3 % 2
            agree(model)
        assert record(model)["routed"] > 0
    finally:
        rm.shutdown()


SCRIPT = """
    import sys, torch
    sys.path.insert(0, {folder!r})
    import rm_abstract as rm
    from adapted_layers.layer import Layer
    rm.init("cpu")
    torch.manual_seed(0)
    model = rm.accelerate(Layer().eval())
    model.set_active(sys.argv[1])
    model.strength = float(sys.argv[2])
    x = torch.ones(3, 6)
    with torch.no_grad(), rm.disabled():
        wanted = model(x)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)
"""


def test_another_process_takes_no_program_of_another_state(folder: Path) -> None:
    script = textwrap.dedent(SCRIPT.format(folder=str(folder)))
    for given in (["first", "1"], ["second", "1"], ["second", "3"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *given],
            env={**os.environ, "RM_CACHE_DIR": str(folder / "cache")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
