"""Benchmarks: every figure is a ratio inside one run, to a probe or the strongest alternative."""
