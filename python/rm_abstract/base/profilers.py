"""Whether a profiler watches Python's calls now.

Before Python 3.12 a profiler is the interpreter's one profile function. From 3.12 on cProfile and
others use `sys.monitoring` and leave that function empty.
"""

from __future__ import annotations

import sys


def profiling() -> bool:
    """True while this thread's calls, or from Python 3.12 on the process's, are profiled."""
    if sys.getprofile() is not None:
        return True
    monitoring = getattr(sys, "monitoring", None)
    return monitoring is not None and monitoring.get_tool(monitoring.PROFILER_ID) is not None
