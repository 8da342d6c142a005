"""An unmodified encoder on an NPU, simulated where there is none.

    RM_SIM_NPU=1 python examples/npu_compilation.py [MODEL_DIR]

The first run compiles, visibly; the second finds the artefacts in the cache. Without a model folder
a small random BERT is used. With an NPU the script stays as it is: name the environment of its
maker's software in RM_RBLN_PYTHON or RM_FURIOSA_PYTHON (docs/npu_rbln.md, docs/npu_furiosa.md), and
npu:0 is the card.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from transformers import AutoModel, BertConfig, BertModel

import rm_abstract


def main() -> None:
    os.environ.setdefault("RM_SIM_NPU", "1")  # npu:0 may be the simulated one
    os.environ.setdefault("RM_SIM_COMPILE_S", "4")  # its compiler takes its time, as real ones do
    rm_abstract.init("npu:0", verbose=1)
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        model = AutoModel.from_pretrained(sys.argv[1]).eval()
    else:
        config = BertConfig(
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            vocab_size=1000,
        )
        model = BertModel._from_config(config).eval()
    with torch.no_grad():
        for batch, length in [(2, 10), (2, 14), (3, 30), (4, 25)]:
            ids = torch.randint(1, 999, (batch, length))
            start = time.perf_counter()
            output = model(input_ids=ids, attention_mask=torch.ones_like(ids))
            took = time.perf_counter() - start
            print(
                f"{batch} x {length} tokens: {tuple(output.last_hidden_state.shape)}, {took:.3f} s"
            )
    print(rm_abstract.explain(model))


if __name__ == "__main__":
    main()
