"""Whole training steps of ordinary torch modules as one program: `rm.compile_step`."""
