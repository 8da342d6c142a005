"""A second process serves its first call from the cache: no capture, no eager run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, make

import rm_abstract as rm
from rm_abstract.capture import export

HERE = Path(__file__).parent
CHILD = "import sys, json; sys.path.insert(0, {here!r}); import test_cached_captures as t; {run}"


def run(model_seed: int = 1, edit: Callable[[Any], None] | None = None) -> list[Any]:
    """One session: [captures made, error to eager, the entry's report]."""
    captures: list[int] = []
    plain = export.capture_flat

    def counted(*arguments: Any) -> Any:
        captures.append(1)
        return plain(*arguments)

    export.capture_flat = counted
    try:
        rm.init("cpu", fallback="error:capture,compile,correctness")
        with torch.no_grad():
            model = make("bert", model_seed)
            if edit is not None:
                edit(model)
            rm.accelerate(model)
            inputs = ARCHITECTURES["bert"].inputs(2, 7)
            with rm.disabled():
                expected = model(**inputs)[0]
            error = float((model(**inputs)[0] - expected).abs().max())
            (found,) = rm.explain(model).to_dict()["models"]
            (entry,) = found["entries"]
            return [len(captures), error, entry]
    finally:
        rm.shutdown()
        export.capture_flat = plain


def run_in_a_process() -> list[Any]:
    """`run` in a process of its own: what other tests replaced in this one is part of the key."""
    script = CHILD.format(here=str(HERE), run="print(json.dumps(t.run()))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.sampled(4, of="second process")
def test_the_second_process_captures_nothing() -> None:
    captures, _, entry = run_in_a_process()
    assert captures == 1 and entry["cache"] == "miss" and entry["parity"] == "passed"
    captures, error, entry = run_in_a_process()
    assert captures == 0 and entry["cache"] == "hit" and entry["parity"] == "stored verdict"
    assert entry["calls"] == 1, "the first call is served by the plan"
    assert 0 <= error < 1e-4


def test_other_weights_use_the_capture_but_not_the_verdict() -> None:
    run()
    captures, error, entry = run(model_seed=2)
    assert captures == 0 and entry["cache"] == "hit" and entry["parity"] == "passed"
    assert error == 0, "the original served the call that was compared"


def other_eps(model: Any) -> None:
    model.embeddings.LayerNorm.eps = 0.5


def other_activation(model: Any) -> None:
    model.encoder.layer[0].intermediate.intermediate_act_fn = torch.nn.ReLU()


def no_pooler(model: Any) -> None:
    model.pooler = None


@pytest.mark.parametrize("edit", [other_eps, other_activation, no_pooler])
def test_another_structure_is_captured_anew(edit: Callable[[Any], None]) -> None:
    run()
    captures, _, entry = run(edit=edit)
    assert captures == 1 and entry["cache"] == "miss"
    captures, error, entry = run(edit=edit)
    assert captures == 0 and entry["cache"] == "hit"
    assert error < 1e-4, "the hit computes what the edited model computes"


def test_a_corrupt_cache_is_recompiled(own_cache: Path) -> None:
    run()
    damaged = 0
    for path in own_cache.rglob("*.rmc"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.chmod(0o600)
        path.write_bytes(data)
        damaged += 1
    assert damaged >= 3, "a front record, a program and a verdict"
    captures, error, entry = run()
    assert captures == 1 and entry["parity"] == "passed"
    assert error < 1e-4
