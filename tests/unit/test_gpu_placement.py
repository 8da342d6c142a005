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


def test_caches_of_the_user_and_generation_from_the_cpu_have_reasons_of_their_own(
    placement: GpuPlacement,
) -> None:
    def call(cache: str) -> CallSpec:
        return CallSpec(("past_key_values",), (("cache", cache),), 0)

    placement.check_call(GPU, call("DeviceCache"))
    with pytest.raises(Decline) as own:
        placement.check_call(GPU, call("DynamicCache"))
    with pytest.raises(Decline) as elsewhere:
        placement.check_call(torch.device("cpu"), call("DeviceCache"))
    assert (own.value.code, elsewhere.value.code) == ("RM114", "RM119")


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
