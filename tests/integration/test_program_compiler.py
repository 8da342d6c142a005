"""An engine is a compiler of programs and its gate: one of a test's own serves, if it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import rm_abstract as rm
from rm_abstract.base.decline import Decline
from rm_abstract.calls.call import CallSpec, FlatCall
from rm_abstract.engines import registry
from rm_abstract.engines.compiled_call import CompiledCall
from rm_abstract.engines.compiler import ProgramCompiler
from rm_abstract.engines.context import EngineContext
from rm_abstract.engines.eager_gate import EagerGate
from rm_abstract.engines.engine_module import EngineModule
from rm_abstract.engines.program_engine import ProgramEngine
from rm_abstract.engines.specializer import Specializer
from rm_abstract.engines.variant import Record, Variant

Function = Callable[[torch.Tensor], torch.Tensor]


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * self.factor


class FunctionProgram:
    """Implements variant.Program with a function of one tensor."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self._function(inputs[0])]

    def update_weights(self, weights: dict[str, torch.Tensor], shared: Any = None) -> None: ...

    def report(self) -> dict[str, Any]:
        return {"nodes": 2}


class FunctionCompiler:
    """Implements compiler.ProgramCompiler; it believes that all captures are one function."""

    name = "function"
    uses_core = False

    def __init__(self, module: EngineModule, function: Function) -> None:
        self.gate = EagerGate(module)
        self._function = function

    def new_call(self, engine: Specializer, spec: CallSpec) -> CompiledCall:
        return CompiledCall(engine, spec)

    def admit(self, call: FlatCall) -> None:
        if call.leaves[0].dtype != torch.float32:
            raise Decline("RM332", "another type than float32")

    def compile(self, record: Record, call: FlatCall, past: Sequence[bool]) -> Variant:
        variant = Variant(record, FunctionProgram(self._function), past)
        variant.report.signature = variant.report.artefact = "a function"
        return variant


@pytest.fixture
def serve_by() -> Iterator[Callable[[Function], nn.Module]]:
    def serve(function: Function) -> nn.Module:
        def create(module: nn.Module, context: EngineContext) -> ProgramEngine:
            own = EngineModule(module, context)
            compiler: ProgramCompiler = FunctionCompiler(own, function)
            return ProgramEngine(own, compiler)

        registry.register("native", create)
        rm.init("cpu")
        return rm.accelerate(Doubled().eval())

    yield serve
    rm.shutdown()
    registry.unregister("native")


def outputs(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(x) for _ in range(4)]


def test_its_programs_serve_and_are_reported_under_its_name(serve_by: Any) -> None:
    calls = []

    def right(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x.sin() * 2

    model, x = serve_by(right), torch.randn(5, 3)
    for output in outputs(model, x):
        torch.testing.assert_close(output, x.sin() * 2)
    assert len(calls) == 4  # the gate's, and three calls
    (entry,) = rm.explain(model).to_dict()["models"][0]["entries"]
    assert (entry["engine"], entry["signature"], entry["parity"], entry["nodes"]) == (
        *("function", "a function", "passed"),
        2,
    )
    assert entry["device"] == "cpu"


def test_its_gate_refuses_what_gives_something_else(serve_by: Any) -> None:
    model, x = serve_by(lambda x: x * 2), torch.randn(5, 3)
    with pytest.warns(rm.RoutingWarning, match="RM501"):
        results = outputs(model, x)
    for output in results:
        torch.testing.assert_close(output, x.sin() * 2)
    assert rm.explain(model).to_dict()["models"][0]["routed"] == 0


def test_it_declines_calls_before_they_are_captured(serve_by: Any) -> None:
    model, x = serve_by(lambda x: x.sin() * 2), torch.randn(5, 3, dtype=torch.float64)
    for output in outputs(model, x):
        torch.testing.assert_close(output, x.sin() * 2)
    record = rm.explain(model).to_dict()["models"][0]
    assert record["routed"] == 0
    assert "RM332" in [reason["code"] for reason in record["reasons"]]
