"""Which served calls are also given to the original and compared with it (the option ``verify``).

``first``: the first call of every program, and of every set of kernels that other sizes or packed
weights bring. ``auto``: these, and samples that cost about 0.5 % of the time spent in the program.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

SHARE = 0.005  # of the time in a program that samples may cost under `auto`
_NEVER = 1 << 62
_FIRST_SAMPLE = 1000  # calls before anything is known about what a sample costs
_FEWEST = 200


@dataclass(frozen=True)
class Policy:
    """What one value of ``verify`` asks for."""

    kernels: bool = True  # the first call of every set of kernels
    every: int = 0  # every so many calls; 0: not by number
    probability: float = 0.0
    budget: bool = False  # samples within SHARE

    @staticmethod
    def of(text: str) -> Policy:
        """`text` as the options table accepted it: off, first, auto, always, a number, p=0.01."""
        if text == "off":
            return Policy(kernels=False)
        if text == "first":
            return Policy()
        if text == "always":
            return Policy(every=1)
        if text.startswith("p="):
            return Policy(probability=float(text[2:]))
        if text.isdigit():
            return Policy(every=max(1, int(text)))
        return Policy(budget=True)

    def first_sample(self) -> int:
        """Calls that a new program serves before the first one that is compared."""
        if self.every:
            return self.every - 1
        if self.probability:
            return self._drawn()
        return _spread(_FIRST_SAMPLE) if self.budget else _NEVER

    def next_sample(self, program_s: float, extra_s: float) -> int:
        """The same after a comparison: a usual call takes `program_s`, that one `extra_s`."""
        if not self.budget:
            return self.first_sample()
        return _spread(max(_FEWEST, math.ceil(extra_s / (SHARE * max(program_s, 1e-7)))))

    def _drawn(self) -> int:
        """Calls until one is drawn, each with the probability."""
        if self.probability >= 1:
            return 0
        # Of the module's own generator: the user's random numbers stay as they are.
        return int(math.log(max(_random.random(), 1e-300)) / math.log1p(-self.probability))


_random = random.Random()  # not the user's `random`, whose state must not move


def _spread(calls: int) -> int:
    """About so many, so that samples do not fall in step with what a script repeats."""
    return int(calls * _random.uniform(0.75, 1.25))
