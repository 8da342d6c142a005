"""Backends that this project ships for vendors' devices, through the vendors' own packages.

Each has a description, which the user's process reads and which imports nothing of the vendor's,
and a worker class, which runs in the vendor's own environment (RM_<NAME>_PYTHON).
"""
