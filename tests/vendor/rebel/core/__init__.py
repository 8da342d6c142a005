"""`rebel.core`: only what public clients import of it."""
