"""The IR's random numbers in torch: Philox4x32-10 (Salmon et al., SC 2011) on whole tensors.

Words of 32 bits are held in i64; a product of two of them is made of halves, so nothing overflows.
"""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF


def _product(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower word of x * factor."""
    low, high = x * (factor & 0xFFFF), x * (factor >> 16)
    carried = high + (low >> 16)
    return carried >> 16, ((carried & 0xFFFF) << 16) | (low & 0xFFFF)


def philox_uniform(state: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers in [0,1), f64, for a state (seed, counter); each is a multiple of 2^-24."""
    seed, counter = (int(v) for v in state)
    count = 1
    for size in shape:
        count *= size
    block = torch.arange((count + 3) // 4)
    same = torch.zeros_like(block)
    x = [block & _LOW, block >> 32, same + (counter & _LOW), same + ((counter >> 32) & _LOW)]
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        a, b = _product(x[0], 0xD2511F53), _product(x[2], 0xCD9E8D57)
        x = [b[0] ^ x[1] ^ k0, b[1], a[0] ^ x[3] ^ k1, a[1]]
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    words = torch.stack(x, 1).reshape(-1)[:count]
    return ((words >> 8).double() * 2.0**-24).reshape(shape)
