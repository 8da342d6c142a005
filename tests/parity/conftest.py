from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

import rm_abstract as rm

# pytest's log capture switches torch's structured trace on, which slows every capture down.
logging.getLogger("torch.__trace").disabled = True


@pytest.fixture
def session() -> Iterator[rm.Session]:
    """A session on the CPU that reports every failure as an error."""
    with torch.no_grad():
        yield rm.init("cpu", fallback="error:capture,compile,correctness")
    rm.shutdown()
