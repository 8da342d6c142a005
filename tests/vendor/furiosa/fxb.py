"""A stand-in for FuriosaAI's `fxb` 2026.4.0: what it refuses in a configuration, and a file.

Seen of the real one: it refuses the keys that transformers 5 writes, architectures it has no
kernels for, and vocabularies below Llama 3's where its sampler is built. FXB_COUNT names a file
that gets a line for each build; FURIOSA_FAULT: build_error, build_nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["build"])
parser.add_argument("-O", choices=["O0", "O1", "O2", "O3"], default="O3")
parser.add_argument("--max-model-len", type=int)
parser.add_argument("--dry-run", action="store_true")
parser.add_argument("--no-enable-sampler", action="store_true")
parser.add_argument("model")
parser.add_argument("output")
given = parser.parse_args()
config = json.loads(Path(given.model, "config.json").read_text())
for key in ("rope_parameters", "head_dim"):
    if key in config:
        raise KeyError(f"Invalid config override key: {key}")
if config["architectures"][0] not in ("LlamaForCausalLM", "Qwen2ForCausalLM"):
    sys.exit(f"unsupported model_type: {config['model_type']}")
if not given.no_enable_sampler and config["vocab_size"] <= 128001:
    raise AssertionError(f"eos_token_ids must be in [0, {config['vocab_size']})")
if given.dry_run:
    print("9 kernels")
    sys.exit()
if os.environ.get("FURIOSA_FAULT") == "build_error":
    sys.exit("furiosa-tcc: internal error")
with open(os.environ["FXB_COUNT"], "a") as file:
    file.write(given.O + "\n")
if os.environ.get("FURIOSA_FAULT") != "build_nothing":
    Path(given.output).write_bytes(b"FXB of " + config["architectures"][0].encode())
print("Artifact Build Completed")
