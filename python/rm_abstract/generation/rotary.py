"""How long rows may get without changing the rotary frequencies of other rows in their batch.

transformers chooses the frequencies of the types `dynamic` and `longrope` for a whole call, by the
largest position in it (`modeling_rope_utils.dynamic_rope_update`).
"""

from __future__ import annotations

from typing import Any


def independent_length(config: Any) -> int | None:
    """Positions up to which a row's frequencies are its own; None: any number. `config` is that of
    the text model."""
    given = getattr(config, "rope_parameters", None)
    if not isinstance(given, dict):
        return None
    # Models with several kinds of layers have one table a kind.
    tables = [given] if "rope_type" in given else [t for t in given.values() if isinstance(t, dict)]
    found = [n for table in tables if (n := _of_table(table, config)) is not None]
    return min(found, default=None)


def _of_table(table: dict[str, Any], config: Any) -> int | None:
    kind = str(table.get("rope_type", "default"))
    longest = int(getattr(config, "max_position_embeddings", 0) or 0)
    if "dynamic" in kind:
        return max(longest - 1, 0)  # at `longest` frequencies of an earlier longer call stay
    if kind == "longrope":
        original = table.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None)
        return int(original or longest)
    return None
