"""Caches of keys, values and states: as transformers' objects, as tensors, on a device."""
