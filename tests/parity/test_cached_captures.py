"""A second process serves its first call from the cache: no capture, no eager run."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SCRIPT = """
    import json, sys
    sys.path.insert(0, {here!r})
    import torch
    from architectures import ARCHITECTURES, make
    import rm_abstract as rm
    import rm_abstract.engines.native as native
    captures = []
    plain = native.capture_flat
    native.capture_flat = lambda *a: captures.append(1) or plain(*a)
    rm.init("cpu", fallback="error:capture,compile,correctness")
    torch.set_grad_enabled(False)
    model = make("bert", {model_seed})
    {edit}
    rm.accelerate(model)
    torch.manual_seed(3)
    inputs = ARCHITECTURES["bert"].inputs(2, 7)
    with rm.disabled():
        expected = model(**inputs)[0]
    error = float((model(**inputs)[0] - expected).abs().max())
    (found,) = rm.explain(model).to_dict()["models"]
    print(json.dumps([len(captures), error, found["entries"]]))
"""


def run(model_seed: int = 1, edit: str = "pass") -> tuple[int, float, list[dict[str, Any]]]:
    script = textwrap.dedent(SCRIPT).format(here=str(HERE), model_seed=model_seed, edit=edit)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    captures, error, entries = json.loads(done.stdout.splitlines()[-1])
    return captures, error, entries


def test_the_second_process_captures_nothing() -> None:
    captures, _, (entry,) = run()
    assert captures == 1 and entry["cache"] == "miss" and entry["parity"] == "passed"
    captures, error, (entry,) = run()
    assert captures == 0 and entry["cache"] == "hit" and entry["parity"] == "stored verdict"
    assert entry["calls"] == 1, "the first call is served by the plan"
    assert 0 <= error < 1e-4
    captures, error, (entry,) = run(model_seed=2)  # other weights: same program, a new verdict
    assert captures == 0 and entry["cache"] == "hit" and entry["parity"] == "passed"


@pytest.mark.parametrize(
    "edit",
    [
        "model.config.layer_norm_eps = 0.5; model.embeddings.LayerNorm.eps = 0.5",
        "model.encoder.layer[0].intermediate.intermediate_act_fn = torch.nn.ReLU()",
        "model.pooler = None",
    ],
    ids=["an attribute", "an activation", "a missing part"],
)
def test_another_structure_is_captured_anew(edit: str) -> None:
    run()
    captures, error, (entry,) = run(edit=edit)
    assert captures == 1 and entry["cache"] == "miss"
    assert error < 1e-4


def test_a_corrupt_cache_is_recompiled(own_cache: Path) -> None:
    run()
    damaged = 0
    for path in own_cache.rglob("*.rmc"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.chmod(0o600)
        path.write_bytes(data)
        damaged += 1
    assert damaged >= 3
    captures, error, (entry,) = run()
    assert captures == 1 and entry["parity"] == "passed"
    assert error < 1e-4
