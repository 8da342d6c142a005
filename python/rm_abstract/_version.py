"""The version of the package; equal to the project version in pyproject.toml (tested)."""

__version__ = "0.1.0"
