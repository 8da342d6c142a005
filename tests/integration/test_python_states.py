"""Keys and values that stay in the worker of a plugin in Python: the device `mine`, torch there."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rm_abstract as rm
from rm_abstract.hooks.attaching import router_of
from rm_abstract.worker.ports import Port
from rm_abstract.worker.python_states import Copy, StateSet, TorchState, copy_states
from rm_abstract.worker.tensors import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from test_npu_generation import STRICT, eager, llama, prompt, tokens, traffic

PLUGINS = Path(__file__).resolve().parents[1] / "python_plugins"


@pytest.fixture(autouse=True)
def own_cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_CACHE_DIR", str(shared_cache))


@pytest.fixture(scope="module")
def model(shared_cache: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RM_BACKEND_PATH", str(PLUGINS))
        patch.setenv("RM_CACHE_DIR", str(shared_cache))
        patch.setenv("MINE_UPLOADS", str(shared_cache / "uploads"))
        torch.manual_seed(0)
        with rm.init("mine:0", fallback=STRICT):
            yield llama()


@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_are_the_originals_and_the_cache_never_travels(model: Any, rows: int) -> None:
    inputs = prompt(rows)
    expected = eager(model, inputs, 20)
    assert tokens(model, inputs, 20) == expected
    before = traffic(model)
    assert tokens(model, inputs, 20) == expected
    after = traffic(model)
    assert after.states == before.states and after.inputs > before.inputs


def test_programs_of_a_model_bring_its_weights_to_the_device_once(
    model: Any, shared_cache: Path
) -> None:
    for rows in (1, 3):
        inputs = prompt(rows)
        assert tokens(model, inputs) == eager(model, inputs)
    uploads = (shared_cache / "uploads").read_text().splitlines()
    contents = {(tuple(w.shape), w.detach().numpy().tobytes()) for w in model.parameters()}
    assert len(uploads) == len(set(uploads)) >= len(contents)  # a line has its worker's number


def test_states_grow_and_rows_are_reordered_in_the_worker(model: Any) -> None:
    inputs = prompt(1)
    assert tokens(model, inputs, 80) == eager(model, inputs, 80)  # beyond the first room of 64
    assert tokens(model, inputs, 8, num_beams=3) == eager(model, inputs, 8, num_beams=3)


def test_a_worker_that_dies_takes_the_states_along_and_the_generation_goes_on(model: Any) -> None:
    inputs = prompt(1)
    expected = eager(model, inputs, 16)
    assert tokens(model, inputs, 16) == expected  # it has programs, whatever test came before
    pool = router_of(model).engine.compiler.device.pool
    seen: list[int] = []

    class Killer:
        def put(self, value: torch.Tensor) -> None:
            seen.append(int(value.numel()))
            if len(seen) == 8:
                os.kill(pool.worker("execute").pid, signal.SIGKILL)

        def end(self) -> None: ...

    assert tokens(model, inputs, 16, streamer=Killer()) == expected
    assert len(seen) > 8


class Plain:
    """A vendor's state without a copy of its own: through host memory."""

    def __init__(self, port: Port) -> None:
        self.inside = TorchState(port)

    def read(self, region: Any, into: Tensor) -> None:
        self.inside.read(region, into)

    def write(self, region: Any, value: Tensor) -> None:
        self.inside.write(region, value)


def host(port: Port, values: torch.Tensor) -> Tensor:
    tensor = Tensor(port.name, port.dtype, port.shape, memoryview(bytearray(values.nbytes)))
    tensor.torch().copy_(values)
    return tensor


@pytest.mark.parametrize("make", [TorchState, Plain])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_random_copies_are_what_slices_of_torch_give(make: Any, dtype: str, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def number(end: int) -> int:
        return int(torch.randint(0, end, (), generator=draw))

    for _ in range(60):
        axis, heads, size = 2 * number(2), 2, 3
        dims = [(1 + number(4), heads, 1 + number(6), size) for _ in range(2)]
        if axis == 0:
            dims[1] = (dims[1][0], *dims[0][1:])
        ports = [Port("0", dtype, shape) for shape in dims]
        values = [torch.randn(shape, generator=draw) for shape in dims]
        kind = torch.float32 if dtype == "f32" else torch.bfloat16
        source, target = (value.to(kind) for value in values)
        sets = [StateSet.made([port], make) for port in ports]
        whole = Copy(0, 0, 0, 1 << 63, [])
        for held, port, value in zip(sets, ports, (source, target), strict=True):
            copy_states(None, held, whole, [host(port, value)])
        rows = [number(dims[0][0]) for _ in range(number(3))]
        what = Copy(axis, number(dims[0][2] + 1), number(dims[1][2] + 1), number(8), rows)
        copy_states(sets[0], sets[1], what, [])
        start, at = (what.from_start, what.to_start) if axis else (0, 0)
        most = what.count if axis else 1 << 30
        span = max(0, min(most, dims[0][2] - start, dims[1][2] - at))
        pairs = list(enumerate(rows)) if rows else [(i, i) for i in range(dims[0][0])]
        for to_row, row in pairs:
            if to_row < dims[1][0]:
                target[to_row, :, at : at + span] = source[row, :, start : start + span]
        found = host(ports[1], torch.zeros_like(target))
        copy_states(sets[1], None, whole, [found])
        assert torch.equal(found.torch(), target), what


def test_copies_between_tensors_that_do_not_fit_are_refused() -> None:
    one = StateSet.made([Port("0", "f32", (1, 2, 4, 3))], TorchState)
    for shape, dtype in (((1, 2, 4, 2), "f32"), ((1, 2, 4), "f32"), ((1, 2, 4, 3), "bf16")):
        other = StateSet.made([Port("0", dtype, shape)], TorchState)
        with pytest.raises(ValueError, match="fit"):
            copy_states(one, other, Copy(2, 0, 0, 4, []), [])
    with pytest.raises(ValueError, match="rows"):
        copy_states(one, one, Copy(2, 0, 0, 4, [1]), [])
    with pytest.raises(ValueError, match="as many"):
        copy_states(one, None, Copy(2, 0, 0, 4, []), [])
