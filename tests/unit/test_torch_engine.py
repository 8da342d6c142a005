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
    assert "0 calls ran compiled, 3 in PyTorch" in report
    assert "RM108" in report and "inference_engine='torch'" in report


def test_a_session_changes_from_torch_to_native_and_back(tmp_path, model):
    ids = torch.arange(14).reshape(2, 7)
    routed = []
    with torch.no_grad():
        plain = model(ids).last_hidden_state
        try:
            for engine in ("torch", "native", "torch"):
                options = {"when_slower": "compiled"}
                session = rm.init(
                    "cpu",
                    inference_engine=engine,
                    cache_dir=tmp_path / "cache",
                    compile_options=options,
                )
                rm.accelerate(model)
                for _ in range(3):
                    torch.testing.assert_close(model(ids).last_hidden_state, plain)
                routed.append(sum(router.routed_calls for router in session.routers()))
        finally:
            rm.shutdown()
    assert routed == [0, 2, 2]  # the first call compiles and is compared
