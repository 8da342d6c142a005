"""How unmodified scripts are caught: see docs/hooks.md. Nothing here runs at import."""
