"""Do a plugin's programs and kernels compute what torch computes?

``python -m rm_abstract.testing.execution path/to/rm_backend_x.so`` prints one JSON row a program.
The conformance suite runs it in a process of its own: the core loads the plugin here, and a plugin
has one host at a time. Whole programs go the way of a user's: compiled in a worker, serialised,
loaded twice in another, executed on different inputs. Kernels are planned by our compiler from this
plugin's rows alone, once as it chooses and once for each row it can be made to take.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rm_abstract import _core, device
from rm_abstract.base.errors import PluginError
from rm_abstract.testing import states
from rm_abstract.testing import weights as shared_weights
from rm_abstract.testing.programs import (
    IDS,
    KERNEL_PROGRAMS,
    OPERATOR_PROGRAMS,
    WHOLE_PROGRAMS,
    joined,
)
from rm_abstract.worker import ir_text, onnx_program, python_plugins
from rm_abstract.worker.dtypes import DTYPES
from rm_abstract.worker.ir_to_torch import ir_to_torch
from rm_abstract.worker.pool import WorkerPool
from rm_abstract.worker.shared_tensors import tensors_in, weights_block

_ALREADY_EXISTS, _UNIMPLEMENTED, _NOT_FOUND = 6, 12, 5  # of rm_code


@dataclass
class Row:
    """What one program showed; ``verdict`` is passed, failed or skipped."""

    program: str
    verdict: str
    detail: str = ""


class Subject:
    """The plugin, its first device, and what its numbers must be within."""

    def __init__(self, path: Path) -> None:
        device.load_plugins(given=str(path))  # ours: a simulated device computes with cpu's kernels
        if path.suffix == ".py":
            found = python_plugins.read(path)
            python_plugins.register(found)
            self.name = found.plugin.name
        else:
            self.name = _load(path)
        rows = {row["name"]: row for row in _core.backend.backends()}
        self.row = rows[self.name]
        devices = self.row["devices"]
        self.properties: dict[str, str] = dict(devices[0]["properties"]) if devices else {}
        self.tolerance = 5e-2 if self.properties.get("numerics") == "bf16" else 1e-4


def _load(path: Path) -> str:
    """The plugin's name. Raises PluginError when the package has another plugin of that name, which
    workers would take instead."""
    try:
        return str(_core.backend.load_plugin(str(path))["name"])
    except _core.CoreError as error:
        if error.code != _ALREADY_EXISTS:
            raise
    name = path.stem.removeprefix("rm_backend_")
    for row in _core.backend.backends():
        if row["name"] == name and Path(row["path"]).read_bytes() == path.read_bytes():
            return name
    raise PluginError(f"[conformance] expected a new name, got {name}, which the package has; try "
                      "another name, or to test the package's own file")  # fmt: skip


def values(text: str, seed: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Inputs and weights of a program, the same for the same seed."""
    program = ir_text.parse(text)
    generator = torch.Generator().manual_seed(seed)

    def one(kind: ir_text.Type) -> torch.Tensor:
        if kind.dtype.startswith("i"):
            return torch.randint(IDS, kind.shape, generator=generator, dtype=DTYPES[kind.dtype])
        return torch.randn(kind.shape, generator=generator, dtype=DTYPES[kind.dtype])

    generator_of_weights = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(program.types[value].shape, generator=generator_of_weights)
        for value, name in program.weights.items()
    }
    return [one(kind) for kind in program.input_types], weights


def compare(outputs: list[torch.Tensor], expected: Any, tolerance: float) -> None:
    """Raises AssertionError that names the output and the largest difference."""
    for i, (got, want) in enumerate(zip(outputs, expected, strict=True)):
        worst = float((got.double() - want.double()).abs().max())
        if not worst <= tolerance * max(1.0, float(want.double().abs().max())):
            raise AssertionError(f"output {i} differs from torch's by {worst:.3g}")


# ---- whole programs -----------------------------------------------------------------------------


def whole_programs(s: Subject) -> Iterator[Row]:
    pool = WorkerPool(s.name, bytes(_core.backend.fingerprint(s.name, 0)))
    try:
        for name, text in WHOLE_PROGRAMS.items():
            yield _row(name, lambda text=text: _whole_program(s, pool, text))  # type: ignore[misc]
        yield from _operators_one_by_one(s, pool)
        yield _row("weights of several programs", lambda: _weights(s, pool))
    finally:
        pool.close()


def _operators_one_by_one(s: Subject, pool: WorkerPool) -> Iterator[Row]:
    """Every operator the device accepts, all in one program; when that fails, each alone, so that
    the failure has a name."""
    accepted = {}
    for name, text in OPERATOR_PROGRAMS.items():
        answer = _row(name, lambda text=text: _refused(s, text))  # type: ignore[misc]
        if answer.verdict == "passed":
            accepted[name] = text
        else:
            yield answer
    if not accepted:
        return
    everything = joined(list(accepted.values()))
    together = _row("all operators", lambda: _whole_program(s, pool, everything))
    if together.verdict == "passed":
        yield from (Row(name, "passed") for name in accepted)
        return
    alone = [
        _row(name, lambda text=text: _whole_program(s, pool, text))  # type: ignore[misc]
        for name, text in accepted.items()
    ]
    yield from alone
    if not any(row.verdict == "failed" for row in alone):
        yield together


def _weights(s: Subject, pool: WorkerPool) -> str:
    for text in (shared_weights.PROMPT, shared_weights.TOKEN):
        if refused := _refused(s, text):
            return refused
    takes_onnx = s.properties.get("program_format") == "onnx"
    shared_weights.check(pool, takes_onnx, lambda got, want: compare(got, want, s.tolerance))
    return ""


def _whole_program(s: Subject, pool: WorkerPool, text: str) -> str:
    refused = _refused(s, text)
    if refused:
        return refused
    _, weights = values(text, 1)
    block = weights_block(weights)
    takes_onnx = s.properties.get("program_format") == "onnx"
    code = onnx_program.to_onnx(text, weights) if takes_onnx else text.encode()
    seen: list[float] = []
    artefact = pool.worker("compile").compile(
        0, code, [], block, lambda fraction, stage: seen.append(fraction), 600.0
    )
    if any(not f <= 1.0 for f in seen):
        raise AssertionError(f"progress went to {max(seen)}")
    if _core.backend.check_compat(s.name, 0, artefact) == "no":
        raise AssertionError("it refuses the artefact it made")
    program = ir_text.parse(text)
    kinds = [[(t.dtype, list(t.shape)) for t in types]
             for types in (program.input_types, program.output_types)]  # fmt: skip
    for _ in range(2):
        loaded = pool.worker("execute").load(0, artefact, block, *kinds, 600.0)
        for seed in (1, 2):
            inputs, _ = values(text, seed)
            slots = tensors_in(loaded.memory, loaded.inputs, [d for d, _ in kinds[0]])
            outputs = tensors_in(loaded.memory, loaded.outputs, [d for d, _ in kinds[1]])
            for slot, tensor in zip(slots, inputs, strict=True):
                slot.copy_(tensor)
            for output in outputs:
                output.fill_(float("nan") if output.is_floating_point() else -1)
            loaded.execute(600.0)
            compare(outputs, ir_to_torch(text, weights)(*inputs), s.tolerance)
    return ""


def _refused(s: Subject, text: str) -> str:
    """What the device does not take of a program, and why. Raises AssertionError without a why."""
    nodes = ir_text.parse(text).nodes
    answers = _core.backend.query_support(s.name, 0, text, len(nodes))
    refused = [f"{n.op}: {why}" for n, (yes, why) in zip(nodes, answers, strict=True) if not yes]
    if any(reason.endswith(": ") for reason in refused):
        raise AssertionError(f"it refuses without a reason: {', '.join(refused)}")
    return "it refuses " + ", ".join(refused) if refused else ""


# ---- kernels ------------------------------------------------------------------------------------


def kernel_programs(s: Subject, rows: list[tuple[str, str]]) -> Iterator[Row]:
    """``rows`` are (operator, kernel) of the plugin's table."""
    for name, text in KERNEL_PROGRAMS.items():
        yield _row(name, lambda text=text: _planned(s, text, ""))  # type: ignore[misc]
        for op, kernel in rows:
            if op not in _operators(text):
                continue
            force = f"{op}:{kernel}"
            label = f"{name} by {kernel}"
            yield _row(label, lambda t=text, f=force: _planned(s, t, f))  # type: ignore[misc]


def _operators(text: str) -> set[str]:
    """The low-level operators (docs/operators.md) the one node of a program may become."""
    op = ir_text.parse(text).nodes[0].op
    lowered = {"add": "ewise", "relu": "ewise", "gelu": "ewise", "matmul": "gemm",
               "linear": "gemm", "concat": "copy"}  # fmt: skip
    return {lowered.get(op, op)}


def _planned(s: Subject, text: str, force: str) -> str:
    inputs, weights = values(text, 1)
    try:
        program = _core.Program(_core.ir.run_passes(text), weights, [s.name], force, "first")
        outputs = program.run(inputs)
    except _core.CoreError as error:
        return f"it has no kernel for it: {error}"
    kernel = force.partition(":")[2]
    if kernel and kernel not in str(program.report()["kernels"]):
        return "the row does not take this problem"
    compare(list(outputs), ir_to_torch(text, weights)(*inputs), s.tolerance)
    return ""


def _row(name: str, body: Callable[[], str]) -> Row:
    """``body`` gives the reason it does not apply, "" when it held, or raises."""
    try:
        why = body()
    except Exception as error:  # a plugin may do anything: the suite goes on
        return Row(name, "failed", f"{type(error).__name__}: {error}")
    return Row(name, "skipped", why) if why else Row(name, "passed")


STATES, GENERATION = "--states", "--generation"  # instead of kernels' names


def _states(s: Subject) -> str:
    if s.properties.get("states") != "1":
        return "it keeps no states"
    refused = _refused(s, states.PROGRAM)
    if refused:
        return refused
    pool = WorkerPool(s.name, bytes(_core.backend.fingerprint(s.name, 0)))
    try:
        states.check(pool, lambda got, want: compare(got, want, s.tolerance))
    finally:
        pool.close()
    return ""


def _generation(s: Subject) -> Row:
    if s.properties.get("generates") != "1":
        return Row("generation", "skipped", "it leaves the loop to the core")
    if importlib.util.find_spec("transformers") is None:
        return Row("generation", "skipped", "transformers, the reference, is not installed")
    from rm_abstract.testing import generation

    methods: list[str] = []

    def compared() -> str:
        methods.append(generation.check(s.name, s.properties))
        return ""

    row = _row("generation", compared)
    return Row(f"generation of {methods[0]}", "passed") if methods else row


def main(argv: list[str] | None = None) -> int:
    path, *kernels = sys.argv[1:] if argv is None else argv
    subject = Subject(Path(path).resolve())
    if kernels in ([STATES], [GENERATION]):
        found_one = (
            _generation(subject)
            if kernels == [GENERATION]
            else _row("states", lambda: _states(subject))
        )
        print(json.dumps([asdict(found_one)]))
        return 0
    rows = [(op, kernel) for op, _, kernel in (k.partition(":") for k in kernels)]
    found = kernel_programs(subject, rows) if rows else whole_programs(subject)
    print(json.dumps([asdict(row) for row in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
