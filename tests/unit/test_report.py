"""What a report may claim."""

from rm_abstract.engines.base import EntryReport


def test_a_share_of_flops_is_claimed_only_when_every_node_is_ours() -> None:
    mixed = EntryReport("x[1]", "native", "cpu", nodes=4, native_nodes=3, flops=5.0)
    assert mixed.native_flops_share is None
    assert mixed.native_share == 0.75
    ours = EntryReport("x[1]", "native", "cpu", nodes=4, native_nodes=4, flops=5.0)
    assert ours.native_flops_share == 1.0
