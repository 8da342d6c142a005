"""One live model on the CPU, on a simulated NPU, and back: the answers stay the same.

    python examples/device_switching.py [DEVICE ...]

With NPUs name them, such as `cpu npu:0 npu:1 cpu`, and their environments (RM_RBLN_PYTHON,
RM_FURIOSA_PYTHON: docs/npu_rbln.md, docs/npu_furiosa.md); nothing else changes.
"""

from __future__ import annotations

import sys

import torch
from transformers import BertConfig, BertModel

import rm_abstract


def main() -> None:
    rm_abstract.init("cpu")
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=1000,
    )
    model = BertModel._from_config(config).eval()
    ids = torch.randint(1, 999, (2, 12))
    answers = {}
    with torch.no_grad():
        for device in sys.argv[1:] or ("cpu", "sim:0", "cpu"):
            rm_abstract.switch_device(device)
            for _ in range(2):  # the first call of a new artefact is served by the original
                output = model(input_ids=ids, attention_mask=torch.ones_like(ids))
            answers[rm_abstract.current_device()] = output.last_hidden_state
            print(rm_abstract.explain(model))
    first, *others = answers.values()
    difference = max((float((first - other).abs().max()) for other in others), default=0.0)
    print(f"largest difference between the devices: {difference:.2e}")


if __name__ == "__main__":
    main()
