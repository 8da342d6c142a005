"""A small GPT learns to write like Python's own help pages, character by character.

python examples/train_char_gpt.py [steps] [char_gpt.png]
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import loss_plot
import torch
from torch import nn
from torch.nn import functional as F

import rm_abstract as rm

WIDTH, HEADS, LAYERS, LENGTH, ROWS = 128, 4, 3, 64, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(self.first(x)).split(WIDTH, dim=2)
        q, k, v = (p.view(rows, length, HEADS, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.second(x))))


class CharGpt(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.characters(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    text = "\n".join(topics[name] for name in sorted(topics))
    letters = sorted(set(text))
    number = {letter: i for i, letter in enumerate(letters)}
    data = torch.tensor([number[letter] for letter in text])
    torch.manual_seed(0)
    eager = CharGpt(len(letters))
    compiled = copy.deepcopy(eager)
    starts = torch.randint(0, len(data) - LENGTH - 1, (steps, ROWS))
    batches = [torch.stack([data[s : s + LENGTH + 1] for s in row]) for row in starts.tolist()]

    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-3)
    wanted = []
    start = time.perf_counter()
    for ids in batches:
        optimizer.zero_grad()
        loss = loss_of(eager(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
        optimizer.step()
        wanted.append(loss.item())
    print(f"eager:    {time.perf_counter() - start:.1f} s, last loss {wanted[-1]:.4f}")

    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
    step = rm.compile_step(compiled, loss_of, optimizer, clip_norm=1.0)
    start = time.perf_counter()
    losses = [step(ids[:, :-1], ids[:, 1:]).item() for ids in batches]
    print(f"compiled: {time.perf_counter() - start:.1f} s with its capture, last {losses[-1]:.4f}")
    print(f"{step.report()['compiled']} compiled steps, memory {step.memory_report()}")

    written = data[:LENGTH].tolist()
    with torch.no_grad():
        for _ in range(80):
            logits = compiled(torch.tensor([written[-LENGTH:]]))[0, -1]
            written.append(int(torch.multinomial(logits.softmax(0), 1)))
    print("".join(letters[i] for i in written[LENGTH:]))
    path = Path(sys.argv[2] if len(sys.argv) > 2 else "char_gpt.png")
    loss_plot.save(path, wanted, losses)
    print(f"both curves: {path}")


if __name__ == "__main__":
    main()
