"""What `generate` asks about its device is asked once."""

from __future__ import annotations

import pytest

from rm_abstract import _core
from rm_abstract.device import Resolved, load_plugins
from rm_abstract.engines import registry


def test_a_devices_facts_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    load_plugins()
    asked = 0
    listing = _core.backend.backends

    def counted() -> object:
        nonlocal asked
        asked += 1
        return listing()

    monkeypatch.setattr(registry, "_facts", {})
    monkeypatch.setattr(_core.backend, "backends", counted)
    cpu = Resolved("cpu", "cpu")
    for _ in range(3):
        assert registry.has_kernels(cpu)
        assert not registry.keeps_states(cpu)
    assert asked == 1


def test_a_backend_that_is_not_loaded_is_asked_again() -> None:
    nowhere = Resolved("nowhere", "nowhere")
    assert not registry.has_kernels(nowhere)
    assert not registry.keeps_states(nowhere)
    assert ("nowhere", 0) not in registry._facts
