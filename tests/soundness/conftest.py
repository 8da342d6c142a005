"""A session around every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rm_abstract as rm


@pytest.fixture(autouse=True)
def session() -> Iterator[Any]:
    torch.manual_seed(0)
    yield rm.init("cpu")
    rm.shutdown()
