"""The lock around everything that torch traces for us."""

from __future__ import annotations

import threading

# torch.export and dynamo keep global state, and each puts back what it found: of two at once both
# may fail, and torch.compiler's flags can stay set, which turns every later call away (RM103).
ONE_AT_A_TIME = threading.Lock()
