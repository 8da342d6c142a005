"""inference_engine="torch": PyTorch runs every call, and the report says it was asked for."""

from __future__ import annotations

import warnings

import pytest

import rm_abstract as rm

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture
def model():
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=100,
    )
    torch.manual_seed(0)
    return transformers.BertModel(config).eval()


@pytest.mark.parametrize("fallback", ["warn", "error"])
def test_every_call_is_pytorch_and_no_fault(tmp_path, model, fallback):
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        plain = model(ids).last_hidden_state
    with warnings.catch_warnings():
        warnings.simplefilter("error", rm.RoutingWarning)
        rm.init("cpu", inference_engine="torch", fallback=fallback, cache_dir=tmp_path / "cache")
        try:
            rm.accelerate(model)
            with torch.no_grad():
                for _ in range(3):
                    assert torch.equal(model(ids).last_hidden_state, plain)
            report = str(rm.explain(model))
        finally:
            rm.shutdown()
    assert "0 routed, 3 eager" in report
    assert "RM108" in report and "inference_engine='torch'" in report
