"""A model that is called with ever new sequence lengths: memory does not grow with their number.
RM_HEAVY=1 runs 2,000 lengths."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LENGTHS = """
import gc, sys
import torch
import rm_abstract
from torch import nn

COUNT = int(sys.argv[1])
HEADS, WIDTH = 2, 32

class Layer(nn.Module):
    '''One attention layer with ALiBi: its bias and mask depend on the length alone.'''

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("slopes", torch.tensor([0.5**(h + 1) for h in range(HEADS)]))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        at = torch.arange(length)
        distance = (at[None, :] - at[:, None]).to(x.dtype)
        bias = distance[None] * self.slopes[:, None, None]
        bias = bias.masked_fill(at[None, :] > at[:, None], float("-inf"))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))

def resident():
    gc.collect()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024

torch.manual_seed(0)
rm_abstract.init("cpu")
model = Layer().eval()
with torch.no_grad():
    for length in (8, 9, 10, 11):
        model(torch.randn(1, length, WIDTH))
    before = resident()
    for length in range(12, 12 + COUNT):
        x = torch.randn(1, length, WIDTH)
        y = model(x)
        if length % 100 == 0:
            assert torch.allclose(y, model._call_impl(x), atol=1e-4), length
    grown = resident() - before
print(f"{grown:.1f} {rm_abstract.explain().routed}")
"""


def test_memory_does_not_grow_with_the_number_of_sequence_lengths(tmp_path: Path):
    count = 2000 if os.environ.get("RM_HEAVY") == "1" else 300
    done = subprocess.run(
        [sys.executable, "-c", LENGTHS, str(count)],
        cwd=tmp_path,
        # What eager's comparisons free goes back to the system and is not counted.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    megabytes, routed = done.stdout.split()
    assert float(megabytes) < 100, done.stdout
    assert int(routed) >= count, "the calls were not served"
