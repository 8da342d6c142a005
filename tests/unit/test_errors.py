"""Typed errors carry a code and a remedy, and survive a process boundary."""

from __future__ import annotations

import pickle

import pytest

import rm_abstract as rm
from rm_abstract.base import reasons

KINDS = [
    rm.ConfigError,
    rm.DeviceUnavailableError,
    rm.CompileError,
    rm.ParityError,
    rm.ExecutionError,
    rm.CacheError,
    rm.PluginError,
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_has_a_code_and_the_remedy_of_its_message(kind):
    error = kind("[here] expected this, got that; try another", code="RM301")
    assert isinstance(error, rm.Error)
    assert (error.code, error.remedy) == ("RM301", "another")
    assert kind("x", remedy="do").remedy == "do"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_crosses_a_process_boundary_whole(kind):
    error = kind("[here] expected this, got that; try another", code="RM605")
    error.extra = 3
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.code, copy.remedy) == (kind, str(error), "RM605", "another")
    assert copy.extra == 3


def test_a_committed_execution_error_stays_committed_when_pickled():
    error = rm.ExecutionError("[run] moved", committed=True)
    assert pickle.loads(pickle.dumps(error)).committed is True


def test_default_codes_are_in_the_table_of_reasons():
    for kind in KINDS:
        code = kind("x").code
        assert code == "" or code in reasons.table(), kind


def test_every_reason_has_a_text_a_remedy_and_a_group():
    groups = {reasons.group_of(code) for code in reasons.table()}
    assert groups == {"routing", "capture", "compile", "device", "correctness", "cache", "training"}
    for code, row in reasons.table().items():
        assert row["text"] and row["remedy"] and row["anchor"]
        assert reasons.group_of(code) == row["category"]
