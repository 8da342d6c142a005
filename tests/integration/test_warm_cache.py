"""A second process with the same script finds everything: no capture, no compile, no miss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
import torch
import rm_abstract
from rm_abstract import cache

rm_abstract.init("cpu", compile_options=json.loads(sys.argv[1]))
from transformers import BertConfig, BertModel

torch.manual_seed(0)
sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
model = BertModel(BertConfig(vocab_size=50, **sizes)).eval()
ids = torch.arange(18).reshape(2, 9)
with torch.no_grad():
    for _ in range(2):
        out = model(ids).last_hidden_state
counters = cache.open_cache().counters()
print(json.dumps([counters, out.double().sum().item()]))
"""


def run(cwd: Path, options: dict[str, object] | None = None, **env: str):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(options or {})],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.sampled(4, of="second process")
def test_a_warm_process_misses_nothing_and_another_option_does(tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    cold, expected = run(tmp_path, PYTHONHASHSEED="1")
    assert cold["miss"] > 0
    assert cold["store"] > 0
    warm, value = run(elsewhere, PYTHONHASHSEED="2", LC_ALL="C")
    assert {name: warm[name] for name in ("miss", "compile", "store", "corrupt")} == {
        "miss": 0,
        "compile": 0,
        "store": 0,
        "corrupt": 0,
    }
    assert warm["hit_disk"] >= 1
    assert value == expected
    other, _ = run(tmp_path, {"optimization_level": 0})
    assert other["miss"] > 0


@pytest.mark.sampled(4, of="second process")
def test_a_damaged_cache_changes_speed_and_nothing_else(tmp_path: Path, own_cache: Path):
    _, expected = run(tmp_path)
    entries = sorted((own_cache / "v1" / "objects").glob("*/*.rmc"))
    assert entries
    for number, entry in enumerate(entries):
        data = bytearray(entry.read_bytes())
        data[len(data) * (number + 1) // (len(entries) + 1)] ^= 0x10
        entry.unlink()
        entry.write_bytes(data)
    damaged, value = run(tmp_path)
    assert damaged["corrupt"] >= 1
    assert value == expected
