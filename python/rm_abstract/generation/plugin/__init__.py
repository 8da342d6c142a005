"""A plugin's own generation, as the engine of one model."""
