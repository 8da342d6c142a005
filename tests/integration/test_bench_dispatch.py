"""`bench dispatch` measures what it says: routed calls are routed, unrouted ones are not."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


def test_a_dispatch_benchmark_times_routed_and_unrouted_calls() -> None:
    import rm_abstract
    from rm_abstract.bench import dispatch

    result = dispatch.run(rounds=5, round_seconds=0.001)
    assert not rm_abstract.is_initialized()
    assert result["steps"]["routed, 1 step"] == 1
    assert result["steps"]["routed, many steps"] > 24
    assert all(value["median"] > 0 for value in result["us"].values())
    assert "torch.add" in dispatch.markdown(result)
