"""An MLP learns digits drawn with seven segments, eager and compiled: same losses, less time.

python examples/train_digits.py [digits.png]
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path

import loss_plot
import torch
from torch import nn
from torch.nn import functional as F

import rm_abstract as rm

# Segments top, left upper, right upper, middle, left lower, right lower, bottom of 0 .. 9.
LIT = "1110111 0010010 1011101 1011011 0111010 1101011 1101111 1010010 1111111 1111011".split()
STEPS, ROWS = 400, 64


def draw(labels: torch.Tensor, noise: float = 0.2) -> torch.Tensor:
    """[N] -> [N,100]: a digit on 10x10, shifted by up to two pixels, with noise."""
    glyphs = torch.zeros(10, 7, 5)
    for digit, lit in enumerate(LIT):
        top, left, right, middle, lower_left, lower_right, bottom = (int(c) for c in lit)
        for row, on in ((0, top), (3, middle), (6, bottom)):
            glyphs[digit, row, 1:4] = on
        for column, rows, on in (
            (0, slice(1, 3), left),
            (4, slice(1, 3), right),
            (0, slice(4, 6), lower_left),
            (4, slice(4, 6), lower_right),
        ):
            glyphs[digit, rows, column] = on
    images = torch.zeros(len(labels), 10, 10)
    for image, label in zip(images, labels, strict=True):
        y, x = (int(v) for v in torch.randint(0, 3, (2,)))
        image[y : y + 7, x : x + 5] = glyphs[label]
    return (images + noise * torch.randn_like(images)).flatten(1)


def main() -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, 10, (STEPS, ROWS))
    batches = [(draw(row), row) for row in labels]
    layers: list[nn.Module] = [nn.Linear(100, 256), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    eager = nn.Sequential(*layers, nn.Linear(256, 10))
    compiled = copy.deepcopy(eager)

    optimizer = torch.optim.Adam(eager.parameters(), lr=1e-3)
    wanted = []
    start = time.perf_counter()
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(eager(x), y)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    print(f"eager:    {time.perf_counter() - start:.2f} s, last loss {wanted[-1]:.4f}")

    step = rm.compile_step(
        compiled, F.cross_entropy, torch.optim.Adam(compiled.parameters(), lr=1e-3)
    )
    start = time.perf_counter()
    losses = [step(x, y).item() for x, y in batches]
    print(f"compiled: {time.perf_counter() - start:.2f} s with its capture, last {losses[-1]:.4f}")

    test = torch.randint(0, 10, (1000,))
    right = (compiled(draw(test)).argmax(1) == test).float().mean()
    print(f"accuracy on digits not seen: {right:.1%}; {step.report()['compiled']} compiled steps")
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "digits.png")
    loss_plot.save(path, wanted, losses)
    print(f"both curves: {path}")


if __name__ == "__main__":
    main()
