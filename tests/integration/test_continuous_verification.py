"""verify= and guard=: later calls are compared with PyTorch, and what is wrong stops serving."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import rm_abstract as rm
from rm_abstract.hooks.attaching import router_of


def small(width: int = 96) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8)).eval()


def entries(model: nn.Module) -> list[dict[str, Any]]:
    router = router_of(model)
    assert router is not None
    return router.record()["entries"]


def calls(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
    with torch.no_grad():
        for _ in range(number):
            out = model(x)
    return out


def expected(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with rm.disabled(), torch.no_grad():
        return model(x)


class Wrong:
    """A program whose results are off in one column."""

    def __init__(self, program: Any) -> None:
        self._program = program

    def run(self, *args: Any) -> Any:
        results = self._program.run(*args)
        results[0][..., -1] += 1.0
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


@pytest.fixture
def session(tmp_path: Any) -> Any:
    def start(**options: Any) -> Any:
        rm.shutdown()
        return rm.init("cpu", cache_dir=str(tmp_path), **options)

    yield start
    rm.shutdown()


def test_every_set_of_kernels_is_compared_once(session: Any) -> None:
    session(verify="first")
    model = small()
    model(torch.randn(1, 96))
    calls(model, torch.randn(2, 96), 4)
    before = entries(model)[-1]["compared"]
    calls(model, torch.randn(500, 96), 4)  # products of many rows have kernels of their own
    entry = entries(model)[-1]
    assert entry["compared"] > before
    after = entry["compared"]
    calls(model, torch.randn(501, 96), 4)
    calls(model, torch.randn(2, 96), 4)
    assert entries(model)[-1]["compared"] == after


def test_a_later_process_takes_the_verdict_on_a_set_of_kernels(session: Any) -> None:
    session(verify="first")
    for rows in (2, 500):
        calls(model := small(), torch.randn(rows, 96), 4)
    session(verify="first")  # another session reads the same folder
    calls(model := small(), torch.randn(2, 96), 4)
    calls(model, torch.randn(500, 96), 4)
    assert sum(entry["compared"] for entry in entries(model)) <= 1


@pytest.mark.parametrize(
    ("verify", "low", "high"), [("3", 9, 11), ("always", 28, 31), ("p=1", 28, 31)]
)
def test_calls_are_compared_as_often_as_asked(
    session: Any, verify: str, low: int, high: int
) -> None:
    session(verify=verify, compile_options={"pack_weights": "never"})
    model, x = small(), torch.randn(4, 96)
    calls(model, x, 30)
    assert low <= entries(model)[-1]["compared"] <= high


def test_a_wrong_program_never_reaches_the_caller_and_is_not_used_again(session: Any) -> None:
    session(verify="always")
    model, x = small(), torch.randn(4, 96)
    calls(model, x, 3)
    router = router_of(model)
    (variant,) = router.engine.variants()
    variant.program = Wrong(variant.program)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            torch.testing.assert_close(calls(model, x, 1), expected(model, x))
    assert any("RM502" in str(warning.message) for warning in caught)
    session(verify="first")
    again = small()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calls(again, x, 3)
    assert router_of(again).routed_calls == 0
    assert "stored verdict" in str(rm.explain(again))


def test_a_sample_finds_a_wrong_program(session: Any) -> None:
    session(verify="5")
    model, x = small(), torch.randn(4, 96)
    calls(model, x, 3)
    (variant,) = router_of(model).engine.variants()
    variant.program = Wrong(variant.program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls(model, x, 12)
    torch.testing.assert_close(calls(model, x, 1), expected(model, x))
    assert "RM502" in str(rm.explain(model))


def test_a_write_through_numpy_is_found_by_a_sample_and_the_program_goes_on(session: Any) -> None:
    session(verify="5", compile_options={"pack_weights": "first"})  # a copy of the weights
    model, x = small(512), torch.randn(300, 512)
    calls(model, x, 18)
    model[0].weight.detach().numpy()[:] *= 3.0
    assert not torch.allclose(calls(model, x, 1), expected(model, x), atol=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls(model, x, 12)
    torch.testing.assert_close(calls(model, x, 1), expected(model, x))
    report = str(rm.explain(model))
    assert "RM504" in report and "RM502" not in report
    routed = router_of(model).routed_calls
    calls(model, x, 8)
    assert router_of(model).routed_calls > routed


@pytest.mark.parametrize("width", [16, 512])
def test_strict_guards_compare_contents_within_64_calls(
    session: Any, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_GUARD", "strict")
    session(verify="first", compile_options={"pack_weights": "first"})
    model, x = small(width), torch.randn(300, width)
    calls(model, x, 20)
    model[0].weight.detach().numpy()[-1, -1] += 5.0
    calls(model, x, 70)
    torch.testing.assert_close(calls(model, x, 1), expected(model, x))


def test_a_write_to_a_buffer_that_leaves_no_trace_is_noticed_at_once(session: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.register_buffer("scale", torch.ones(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    session()
    model, x = Scaled().eval(), torch.randn(4, 32)
    calls(model, x, 5)
    model.scale.data.mul_(2.0)
    torch.testing.assert_close(calls(model, x, 1), expected(model, x))
    calls(model, x, 3)
    model.scale.numpy()[3] = 7.0
    torch.testing.assert_close(calls(model, x, 1), expected(model, x))


def test_only_parameters_get_an_attribute_of_ours(session: Any) -> None:
    before = dict(vars(torch.Tensor))
    session()
    assert dict(vars(torch.Tensor)) == before
    assert "data" in vars(nn.Parameter)
    model, x = small(), torch.randn(4, 96)
    calls(model, x, 5)
    model[2].bias.data.add_(1.0)
    torch.testing.assert_close(calls(model, x, 1), expected(model, x))
    rm.shutdown()
    assert "data" not in vars(nn.Parameter)


def test_dynamo_traces_a_function_that_reads_data(session: Any) -> None:
    session()
    parameter = nn.Parameter(torch.ones(3))
    compiled = torch.compile(lambda p: p.data * 2, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(parameter), torch.full((3,), 2.0))


@pytest.mark.parametrize("write", ["data", "fused", "data_copy"])
def test_a_compiled_module_hears_of_silent_writes_without_a_session(write: str) -> None:
    rm.shutdown()
    model, x = small(), torch.randn(200, 96)
    executable = rm.compile(model, (x,), options={"pack_weights": "first"})
    for _ in range(20):
        executable(x)
    if write == "data":
        model[0].weight.data.mul_(3.0)
    elif write == "data_copy":
        model[2].bias.data.copy_(torch.ones(8))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    with torch.no_grad():
        torch.testing.assert_close(executable(x), model._call_impl(x))
    del executable
    assert "data" not in vars(nn.Parameter)
