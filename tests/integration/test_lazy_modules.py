"""Modules whose weights get their shapes at the first call are served once they have them."""

from __future__ import annotations

import torch
from torch import nn

import rm_abstract as rm


def test_a_lazy_module_is_compiled_when_its_weights_are_there() -> None:
    rm.init("cpu")
    try:
        model = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(3)).eval()
        x = torch.randn(4, 7)
        with torch.no_grad():
            results = [model(x) for _ in range(4)]
        report = rm.explain(model)
        assert report.routed >= 2, str(report)
        for result in results[1:]:
            torch.testing.assert_close(result, results[0])
    finally:
        rm.shutdown()
