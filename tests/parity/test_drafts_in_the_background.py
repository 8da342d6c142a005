"""A generation that would like drafts does not wait for the program that checks them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build

import rm_abstract as rm
from rm_abstract import _core
from rm_abstract.capture import export
from rm_abstract.engines.background import Captures

PLAIN = {"max_new_tokens": 90, "do_sample": False, "pad_token_id": 0}
WITHIN_S = 300.0  # a process imports torch and captures, on a machine that may be busy


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RM_CACHE_DIR", str(tmp_path / "cache"))
    with torch.no_grad():
        rm.init(
            "cpu", fallback="error:compile,correctness", compile_options={"batch_threads": False}
        )
        yield
    rm.shutdown()


def prompt() -> dict[str, torch.Tensor]:
    ids = torch.randint(4, 99, (1, 11), generator=torch.Generator().manual_seed(5))
    ids = torch.cat([ids, ids], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def eager_for_drafts(made: Any) -> Any:
    """A toy Llama whose checks pay as soon as there are any drafts; greedy, its text repeats."""
    rm.accelerate(made)
    drafts = rm.hooks.attaching.router_of(made).generation.drafts
    assert drafts.mode == "auto"
    drafts.policy = _core.DraftPolicy(True)
    return drafts


def test_the_checks_are_captured_elsewhere_and_serve_a_later_generation(
    session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama", 0)
    expected = model.generate(**prompt(), **PLAIN)
    widths: list[int] = []
    real = export.capture_flat

    def seen(module: Any, call: Any, *others: Any) -> Any:
        widths.extend(x.shape[1] for x in call.leaves if getattr(x, "dtype", None) == torch.long)
        return real(module, call, *others)

    monkeypatch.setattr(export, "capture_flat", seen)
    drafts = eager_for_drafts(model)
    assert torch.equal(model.generate(**prompt(), **PLAIN), expected)
    end = time.monotonic() + WITHIN_S
    while not drafts.awaited:  # a generation may end before its loop looks for drafts
        assert torch.equal(model.generate(**prompt(), **PLAIN), expected)
        assert time.monotonic() < end and not drafts.refused
    assert 8 not in widths, "captured while a generation waited"
    while drafts.awaited:
        assert torch.equal(model.generate(**prompt(), **PLAIN), expected)
        assert time.monotonic() < end
    while not drafts.counts()["checks"]:
        assert torch.equal(model.generate(**prompt(), **PLAIN), expected)
        assert time.monotonic() < end and not drafts.refused
    assert 8 not in widths and drafts.counts()["accepted"] > 0


def test_what_no_other_process_can_capture_is_captured_here(
    session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compile cache a program cannot come from elsewhere."""
    monkeypatch.setenv("RM_CACHE_MODE", "off")
    rm.init("cpu")
    monkeypatch.setattr(Captures, "submit", lambda *_: pytest.fail("it was sent away"))
    model = build("llama", 0)
    expected = model.generate(**prompt(), **PLAIN)
    drafts = eager_for_drafts(model)
    for _ in range(4):
        assert torch.equal(model.generate(**prompt(), **PLAIN), expected)
    assert drafts.counts()["checks"] and not drafts.awaited
