"""What a worker says of an import that failed inside a vendor's package."""

from __future__ import annotations

import pytest

from rm_abstract.plugin import Failure
from rm_abstract.worker.python_backend import _explained


def load_extension() -> None:
    """As `import torch` does when an extension of a vendor's does not fit it."""
    try:
        raise ImportError("undefined symbol: at::native::diagonal")
    except ImportError as error:
        raise RuntimeError("Failed to load the backend extension: furiosa.") from error


def test_an_extension_that_torch_cannot_load_is_missing_software() -> None:
    with pytest.raises(Failure) as caught, _explained("compile"):
        load_extension()
    assert caught.value.code == "RM401"
    assert "backend extension: furiosa" in str(caught.value)
    assert "undefined symbol" in str(caught.value)


def test_an_error_that_is_its_own_cause_is_told() -> None:
    error = RuntimeError("E77")
    error.__cause__ = error
    with pytest.raises(Failure) as caught, _explained("compile"):
        raise error
    assert caught.value.code == "RM301" and "E77" in str(caught.value)
