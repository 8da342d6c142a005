"""The lock around everything that torch traces for us."""

from __future__ import annotations

import os
import threading

# torch.export and dynamo keep global state, and each puts back what it found: of two at once both
# may fail, and torch.compiler's flags can stay set, which turns every later call away (RM103).
ONE_AT_A_TIME = threading.Lock()
# A thread that traced when the process forked does not exist in the child.
os.register_at_fork(after_in_child=ONE_AT_A_TIME._at_fork_reinit)  # type: ignore[attr-defined]
