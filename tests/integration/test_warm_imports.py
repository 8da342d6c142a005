"""A process that finds its programs in the cache imports nothing that captures need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

SCRIPT = """
import json, sys
import torch
from torch import nn
if sys.argv[1] == "ours":
    import rm_abstract
    rm_abstract.init("cpu")

def heavy():
    roots = ("torch.export", "torch._export", "torch._dynamo", "torch._functorch", "sympy")
    return [n for n in sys.modules if n.startswith(roots)]

torch.manual_seed(0)
seen = []
with torch.no_grad():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    model(torch.ones(2, 8))
    seen.append(heavy())
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config = LlamaConfig(vocab_size=64, bos_token_id=None, eos_token_id=None, **sizes)
    model = LlamaForCausalLM(config).eval()
    tokens = torch.arange(5)[None]
    model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)
    seen.append(heavy())
late = ("generation.scheduler", "generation.remote.engine", "engines.deferrals")
counters = {"late": [name for name in late if f"rm_abstract.{name}" in sys.modules]}
if sys.argv[1] == "ours":
    from rm_abstract import cache
    counters |= cache.open_cache().counters()
print(json.dumps([seen, counters]))
"""


def run(mode: str) -> tuple[list[list[str]], dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    seen, counters = json.loads(done.stdout.splitlines()[-1])
    return seen, counters


def test_a_warm_process_imports_nothing_of_torch_export_that_eager_does_not():
    eager, _ = run("eager")
    cold, _ = run("ours")
    assert any(set(c) - set(e) for c, e in zip(cold, eager, strict=True)), "nothing was captured"
    warm, counters = run("ours")
    assert counters["store"] == 0 and counters["hit_disk"] > 0
    assert counters["late"] == []  # what a generation of one thread has no use for
    assert [sorted(set(w) - set(e)) for w, e in zip(warm, eager, strict=True)] == [[], []]


PLAIN = """
import json, sys
import torch
from torch import nn
import rm_abstract
rm_abstract.init("cpu")
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
with torch.no_grad():
    for _ in range(3):
        model(torch.ones(2, 8))
late = ("worker.ir_text", "worker.artefact_header", "engines.deferrals", "hooks.gradients")
loaded = [name for name in late if f"rm_abstract.{name}" in sys.modules]
print(json.dumps([rm_abstract.explain(model).routed, "transformers" in sys.modules, loaded]))
"""


def test_a_module_of_torch_alone_imports_no_transformers():
    """What an import does is an effect too: some draw from Python's random stream."""
    for start in ("cold", "warm"):
        done = subprocess.run(
            [sys.executable, "-c", PLAIN],
            env=dict(os.environ),
            capture_output=True,
            text=True,
            check=True,
        )
        routed, imported, loaded = json.loads(done.stdout.splitlines()[-1])
        assert routed >= 2 and not imported
        assert start == "cold" or loaded == []  # parts that this script has no use for
