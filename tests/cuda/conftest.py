"""Operator modules of the CUDA part: skipped, with the reason, where they or a GPU are missing.

A standalone build is tested with its folder rm_abstract/ops on PYTHONPATH.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest


def load(name: str) -> ModuleType:
    for package in ("", "rm_abstract.ops."):
        try:
            return importlib.import_module(f"{package}_ops_{name}")
        except ModuleNotFoundError:
            continue
    pytest.skip(f"_ops_{name} is not built: RM_CUDA found no nvcc")


@pytest.fixture
def module() -> Callable[[str], ModuleType]:
    return load


def has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if has_gpu():
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(skip)
