"""The small framework learns scikit-learn's digits, eager and recorded: same losses, less time.

python examples/framework_digits.py [digits.png [cpu|cuda|torch]]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import loss_plot
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import rm_abstract as rm
from rm_abstract import functional as F
from rm_abstract import nn, optim

EPOCHS, ROWS = 30, 64


class Net(nn.Module):
    """Two convolutions and a product on images of 8x8."""

    def __init__(self) -> None:
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.first(x))
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        return self.head(x.reshape(x.shape[0], -1))


def main() -> None:
    rm.use_backend(sys.argv[2] if len(sys.argv) > 2 else "cpu")  # the line that chooses
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(
        torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16,
        torch.tensor(labels),
        test_size=0.25,
        random_state=0,
    )
    x_train, x_test, y_train, y_test = split
    batches = []
    for _ in range(EPOCHS):
        order = torch.randperm(len(x_train))
        batches += [(rm.Tensor(x_train[i]), rm.Tensor(y_train[i])) for i in order.split(ROWS)[:-1]]

    curves = []
    for recorded in (False, True):
        torch.manual_seed(1)
        net = Net()
        optimizer = optim.Adam(net.parameters(), lr=2e-3)

        def step(x: Any, y: Any, net: Net = net, optimizer: optim.Adam = optimizer) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            return loss

        run = rm.record(step) if recorded else step
        start = time.perf_counter()
        curves.append([run(x, y).item() for x, y in batches])
        seconds = time.perf_counter() - start
        with rm.no_grad():
            right = (net(rm.Tensor(x_test)).argmax(1) == rm.Tensor(y_test)).torch().float().mean()
        name = "recorded" if recorded else "eager"
        print(f"{name}: {seconds:.2f} s for {len(batches)} steps, {right:.1%} of the test set")
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "framework_digits.png")
    loss_plot.save(path, curves[0], curves[1])
    print(f"both curves: {path}")


if __name__ == "__main__":
    main()
