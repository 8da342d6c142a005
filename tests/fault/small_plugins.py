"""Plugins of a test's own around the small worker (tests/python_plugins): what else a program does
while it runs is the test's. And the model that they run."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

PLUGINS = Path(__file__).resolve().parents[1] / "python_plugins"

PLUGIN = """
import sys; sys.path.append({plugins!r})
from rm_backend_small import why_not
from rm_abstract.plugin import Device, PythonPlugin
plugin = PythonPlugin(
    name={name!r}, version="1.0", worker="{name}_worker:Worker", executions={executions},
    devices=lambda: [Device("NumPy", arch="{name}-1")], why_not=why_not,
)
"""
WORKER = """
import os, signal, sys, threading, time; sys.path.append({plugins!r})
import small_worker
MEETING = threading.Barrier(2)  # for programs that wait for each other
class Loaded(small_worker.Loaded):
    def execute(self, inputs, outputs):
{before}
        super().execute(inputs, outputs)
class Worker(small_worker.Worker):
    def load(self, artefact, weights):
        made = super().load(artefact, weights)
        made.__class__ = Loaded
        return made
"""


def small_plugin(
    name: str, executions: int, before: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin of a name of its own in this process, which is found from now on. ``before``: what
    its worker does at the start of every run; it may use ``inputs`` and ``MEETING``."""
    given = {"plugins": str(PLUGINS), "name": name, "executions": executions}
    lines = textwrap.indent(textwrap.dedent(before).strip(), " " * 8)
    (folder / f"{name}_worker.py").write_text(WORKER.format(before=lines, **given))
    (folder / f"rm_backend_{name}.py").write_text(PLUGIN.format(**given))
    monkeypatch.setenv("RM_BACKEND_PATH", str(folder))


def small_model(width: int) -> torch.nn.Module:
    """Of operators that the worker has; each width is a program of its own."""
    layers = (torch.nn.Linear(width, 16), torch.nn.ReLU(), torch.nn.Linear(16, width))
    return torch.nn.Sequential(*layers, torch.nn.Tanh()).eval()
