"""Which calls a session on a GPU leaves to PyTorch because of where their tensors are."""

from __future__ import annotations

import pytest
import torch

from rm_abstract import _core, device
from rm_abstract.base.decline import Decline
from rm_abstract.calls.call import CallSpec
from rm_abstract.engines.placement import GpuPlacement, core_of

GPU = torch.device("cuda", 0)


@pytest.fixture
def placement() -> GpuPlacement:
    return GpuPlacement(GPU, "gpu:0")


def test_a_model_on_another_gpu_than_the_sessions_is_left(placement: GpuPlacement) -> None:
    placement.check(GPU)
    placement.check(torch.device("cpu"))  # its weights are copied
    with pytest.raises(
        Decline, match="the model is on cuda:1, the session's device is gpu:0"
    ) as no:
        placement.check(torch.device("cuda", 1))
    assert no.value.code == "RM119"


def test_models_inside_others_are_served_where_their_weights_lie(placement: GpuPlacement) -> None:
    placement.check_inner(GPU)
    with pytest.raises(Decline, match="copied a second time; move it to gpu:0") as no:
        placement.check_inner(torch.device("cpu"))
    assert no.value.code == "RM119"


def test_caches_that_generate_did_not_make_are_left(placement: GpuPlacement) -> None:
    def call(*objects: tuple[str, str]) -> CallSpec:
        return CallSpec(tuple(f"argument{i}" for i in range(len(objects))), objects, 0)

    encoded = ("bundle", "BaseModelOutput")  # what an encoder gave is an argument like a tensor
    for where in (GPU, torch.device("cpu")):
        placement.check_call(where, call(("cache", "DeviceCache")))
        placement.check_call(where, call(encoded, ("cache", "DevicePair")))
        for cache in ("DynamicCache", "EncoderDecoderCache"):
            with pytest.raises(Decline) as own:
                placement.check_call(where, call(encoded, ("cache", cache)))
            assert own.value.code == "RM114"


def test_what_a_program_updates_on_copies_comes_back(
    placement: GpuPlacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.backends()
    core = _core.Program(
        'rmir 1\ninput %0 "new" : f32[1,2]\ninput %1 "kept" : f32[3,2] donated\n'
        'input %2 "at" : i64[1]\n%3 = index_copy(%1, %2, %0) {axis=0} : f32[3,2]\nreturn %3\n',
        {},
        ["cpu"],
    )
    assert core.updated_inputs() == [1]
    program = placement.placed(core, torch.device("cpu"))
    copies: list[list[torch.Tensor]] = []

    def copied(inputs: list[torch.Tensor]) -> list[torch.Tensor]:  # as to another device
        copies.append([t.clone() for t in inputs])
        return copies[-1]

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(program, "_there", copied)
    new, kept, at = torch.tensor([[5.0, 6.0]]), torch.zeros(3, 2), torch.tensor([1])
    assert program.is_away and not placement.placed(core, GPU).is_away
    assert program.run([new, kept, at]) == [None]
    assert kept.tolist() == [[0, 0], [5, 6], [0, 0]]
    there = program.brought([new, kept, at])
    there[1].fill_(7)
    assert kept[0].tolist() == [0, 0]  # until they are brought back
    program.bring_back(there, [new, kept, at])
    assert kept.tolist() == [[7, 7]] * 3 and at.tolist() == [1]


def test_only_programs_whose_tensors_lie_there_are_the_cores_own(placement: GpuPlacement) -> None:
    device.backends()  # loads the plugins
    core = _core.Program(
        'rmir 1\ninput %0 "x" : f32[4]\n%1 = exp(%0) : f32[4]\nreturn %1\n', {}, ["cpu"]
    )
    assert core_of(core) == (core, None)
    program, unless = core_of(placement.placed(core, GPU))
    assert program is core and unless is not None
    assert core_of(placement.placed(core, torch.device("cpu")))[0] is None
    assert core_of(object()) == (None, None)
