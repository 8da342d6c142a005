"""The process that captures for others: `python -m rm_abstract.engines.capturing`."""
