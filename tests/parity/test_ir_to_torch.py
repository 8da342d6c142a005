"""A program turned back into torch gives what our compiler gives: each is the other's oracle."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, make

from rm_abstract import _core, device
from rm_abstract.capture.export import capture
from rm_abstract.engines.buckets import Buckets, InputRole
from rm_abstract.worker import ir_text
from rm_abstract.worker.ir_to_torch import ir_to_torch


def static_program(name: str, seed: int) -> tuple[str, dict[str, torch.Tensor], list[torch.Tensor]]:
    """A model's program for one call, its weights and the call's tensors."""
    model = make(name, seed)
    inputs = ARCHITECTURES[name].inputs(2, 7)
    captured = capture(model, (), inputs)
    tensors = list(inputs.values())
    buckets = Buckets(captured.input_dims, [InputRole(n) for n in inputs])
    text = _core.ir.substitute(captured.ir, buckets.sizes_of([t.shape for t in tensors]))
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    weights = {n: state[n].detach() for n in captured.weights} | captured.constants
    return text, weights, tensors


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_program_in_torch_gives_what_our_compiler_gives(name: str, seed: int) -> None:
    text, weights, tensors = static_program(name, seed)
    device.load_plugins()
    needed = set(ir_text.parse(text).weights.values())
    weights = {n: w for n, w in weights.items() if n in needed}
    ours = _core.Program(_core.ir.run_passes(text), weights, ["cpu", "torch"]).run(tensors)
    with torch.no_grad():
        theirs = ir_to_torch(text, weights)(*tensors)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_the_module_can_be_exported_again(seed: int) -> None:
    text, weights, tensors = static_program("bert", seed)
    module = ir_to_torch(text, weights).eval()
    again = torch.export.export(module, tuple(tensors), strict=False)
    with torch.no_grad():
        for a, b in zip(again.module()(*tensors), module(*tensors), strict=True):
            torch.testing.assert_close(a, b)


def test_a_fused_program_is_refused_by_the_name_of_its_operator(seed: int) -> None:
    text, weights, _ = static_program("bert", seed)
    with pytest.raises(ValueError, match=r"got (gemm|ewise)"):
        ir_to_torch(_core.ir.run_passes(text), weights)


def test_a_damaged_program_is_refused_with_its_line() -> None:
    with pytest.raises(ValueError, match="got '%1 ="):
        ir_text.parse('rmir 1\ninput %0 "x" : f32[2]\n%1 = neg(%0 : f32[2]\nreturn %1\n')
