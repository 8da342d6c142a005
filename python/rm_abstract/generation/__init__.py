"""Text generation: the device cache and the loop behind an unmodified ``model.generate``."""
