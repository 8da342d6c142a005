"""What a report may claim."""

from rm_abstract.base.entry_report import EntryReport
from rm_abstract.report import never_served


def test_a_share_of_flops_is_claimed_only_when_every_node_is_ours() -> None:
    mixed = EntryReport("x[1]", "native", "cpu", nodes=4, native_nodes=3, flops=5.0)
    assert mixed.native_flops_share is None
    assert mixed.native_share == 0.75
    ours = EntryReport("x[1]", "native", "cpu", nodes=4, native_nodes=4, flops=5.0)
    assert ours.native_flops_share == 1.0


def record(name: str, routed: int, **reasons: int) -> dict:
    """A model's record as a router makes it."""
    rows = [
        {"code": code, "calls": calls, "text": "a text", "detail": "a detail", "remedy": "do this"}
        for code, calls in reasons.items()
    ]
    return {"model": name, "routed": routed, "loop_tokens": 0, "reasons": rows}


def test_a_model_called_often_and_never_served_is_named_with_the_commonest_reason() -> None:
    lines = never_served([record("Bert", 0, RM101=3, RM104=21)])
    expected = "rm_abstract: 0 of 24 calls of Bert ran compiled, RM104: a detail; do this"
    assert lines == [expected]


def test_models_that_were_served_called_rarely_or_left_on_purpose_are_not_named() -> None:
    served, rare = record("A", 1, RM101=50), record("B", 0, RM101=19)
    assert never_served([served, rare, record("C", 0, RM108=500)]) == []
