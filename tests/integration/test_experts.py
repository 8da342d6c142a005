"""Mixtures of experts run on products of ours: models of transformers, groups that are empty or
take all rows, offsets that are wrong, and counts of integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from test_capture_operators import Wrapped
from test_special_functions import run
from torch import nn
from transformers.integrations import moe  # noqa: F401 (its operators)

import rm_abstract as rm
from rm_abstract import _core, device
from rm_abstract.capture.errors import CaptureError
from rm_abstract.capture.export import capture
from rm_abstract.capture.ir_builder import IrBuilder, Value
from rm_abstract.capture.op_map import experts
from rm_abstract.capture.op_map.call import Call
from rm_abstract.capture.outputs import builder

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 95,
}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},  # biases, [K,N]
    "Qwen2Moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
}


pytestmark = pytest.mark.usefixtures("closed_session")


def build(name: str, dtype: torch.dtype = torch.float32, spread: float = 0.3) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**COMMON, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(dtype)
    for weight in model.parameters():  # logits that differ by more than rounding
        if weight.dim() > 1:
            nn.init.normal_(weight, std=spread)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_mixture_of_experts_is_served_whole_by_kernels_of_ours(name: str) -> None:
    model = build(name)
    rm.init("cpu")
    rm.accelerate(model)
    for length in (5, 9, 16):
        ids = torch.randint(3, 90, (2, length))
        with torch.no_grad():
            with rm.disabled():
                expected = model(ids, use_cache=False).logits
            for _ in range(3):
                found = model(ids, use_cache=False).logits
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    record = rm.explain(model).to_dict()["models"][0]
    assert record["routed"]
    assert {op for entry in record["entries"] for op in entry["kept"]} == set()


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_generated_tokens_of_a_mixture_are_eagers(name: str) -> None:
    model = build(name)
    rm.init("cpu")
    rm.accelerate(model)
    ids = torch.randint(3, 90, (1, 7))
    with rm.disabled():
        expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    for _ in range(3):
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), expected)


def test_a_mixture_in_bf16_is_as_near_to_f32_as_eager_is() -> None:
    # Experts that are nearly tied are chosen by rounding: weights under which few are.
    exact, model = (build("Mixtral", dtype, 0.1) for dtype in (torch.float32, torch.bfloat16))
    ids = torch.randint(3, 90, (2, 12))
    with torch.no_grad():
        wanted = exact(ids, use_cache=False).logits
        eager = model(ids, use_cache=False).logits.float()
        rm.init("cpu")
        rm.accelerate(model)
        for _ in range(3):
            found = model(ids, use_cache=False).logits.float()
    record = rm.explain(model).to_dict()["models"][0]
    assert record["routed"] and not any(entry["kept"] for entry in record["entries"])
    assert (found - wanted).abs().mean() <= 1.25 * (eager - wanted).abs().mean()


def product_of(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """As models write it under an export: torch's own in bf16, transformers' in other types."""
    if x.dtype == torch.bfloat16:
        return torch._grouped_mm(x, w, offs=ends)
    return torch.ops.transformers.grouped_mm_fallback(x, w, ends)


def compiled(function: Any, *tensors: torch.Tensor) -> Any:
    """A call of the compiled function; nothing of it is PyTorch's."""
    device.load_plugins()
    captured = capture(Wrapped(function).eval(), tensors, {})
    assert not captured.kept, [k.op for k in captured.kept]
    text = _core.ir.run_passes(_core.ir.canonical(captured.ir))
    program = _core.Program(text, {}, ["cpu"])
    give = builder(captured.output)
    return lambda *operands: give(program.run(list(operands)), operands)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("turned", [False, True], ids=["[K,N]", "[N,K]"])
def test_groups_may_be_empty_or_hold_all_rows(dtype: torch.dtype, turned: bool) -> None:
    x = torch.randn(40, 48).to(dtype)
    w = torch.randn(4, 40, 48) if turned else torch.randn(4, 48, 40)
    w = w.to(dtype).transpose(1, 2) if turned else w.to(dtype)
    ends = torch.tensor([10, 20, 20, 40], dtype=torch.int32)
    product = compiled(product_of, x, w, ends)
    tolerance = {} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-5}
    for given in ([10, 20, 20, 40], [40, 40, 40, 40], [0, 0, 0, 40], [1, 2, 3, 40]):
        ends = torch.tensor(given, dtype=torch.int32)
        torch.testing.assert_close(product(x, w, ends), product_of(x, w, ends), **tolerance)


def test_offsets_that_fall_or_end_behind_the_rows_are_a_typed_error() -> None:
    x, w = torch.randn(6, 8), torch.randn(3, 8, 4)
    good = torch.tensor([2, 2, 6], dtype=torch.int32)
    product = compiled(product_of, x, w, good)
    for wrong in ([3, 2, 6], [-1, 2, 6], [2, 4, 9]):
        with pytest.raises(_core.CoreError, match="offsets that do not fall"):
            product(x, w, torch.tensor(wrong, dtype=torch.int32))
    torch.testing.assert_close(product(x, w, good), product_of(x, w, good))


def test_a_model_with_offsets_that_fall_gives_what_eager_gives() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 8, 4))

        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return product_of(x, self.w, ends)

    model, x = Product().eval(), torch.randn(6, 8)
    rm.init("cpu")
    rm.accelerate(model)
    for given in ([2, 2, 6], [2, 2, 6], [2, 2, 6], [3, 2, 6], [2, 4, 9], [0, 6, 6]):
        ends = torch.tensor(given, dtype=torch.int32)
        with torch.no_grad():
            torch.testing.assert_close(model(x, ends), product_of(x, model.w, ends))
    assert rm.explain(model).to_dict()["models"][0]["routed"]


class PlainExperts(nn.Module):
    """As people write them: rows sorted by expert, split where each expert's end."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 3, bias=False)
        self.weight = nn.Parameter(torch.randn(3, 12, 16))
        self.apart = nn.ParameterList(torch.randn(12, 16) for _ in range(3)) if apart else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).argmax(1)
        counts = nn.functional.one_hot(chosen, 3).sum(0).tolist()
        order = chosen.argsort(stable=True)
        weights = self.weight if self.apart is None else self.apart
        parts = x[order].split(counts, dim=0)
        made = [nn.functional.linear(parts[i], weights[i]) for i in range(3)]
        y = torch.cat(made, dim=0).tanh()
        return torch.zeros(x.shape[0], 12).index_add(0, order, y)


@pytest.mark.parametrize("apart", [False, True], ids=["one tensor of weights", "weights apart"])
def test_rows_split_by_values_are_one_product_in_groups(apart: bool) -> None:
    torch.manual_seed(6)
    model = PlainExperts(apart).eval()
    rm.init("cpu")
    rm.accelerate(model)
    with torch.no_grad():
        for rows in (9, 24, 5):
            x = torch.randn(rows, 16)
            for given in (x, x, x[:1].expand(rows, -1).contiguous()):  # all rows to one expert
                with rm.disabled():
                    expected = model(given)
                torch.testing.assert_close(model(given), expected, rtol=1e-5, atol=1e-5)
    record = rm.explain(model).to_dict()["models"][0]
    assert record["routed"] and len(record["entries"]) == 1
    assert not record["entries"][0]["kept"]


def test_parts_that_meet_other_operators_are_left_to_torch() -> None:
    class Other(PlainExperts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            counts = nn.functional.one_hot(self.gate(x).argmax(1), 3).sum(0).tolist()
            parts = x.split(counts, dim=0)
            made = [nn.functional.linear(parts[2 - i], self.weight[i]) for i in range(3)]
            return torch.cat(made, dim=0)

    with pytest.raises(CaptureError, match="a size that depends on tensor values"):
        capture(Other(False).eval(), (torch.randn(9, 16),), {})


def test_jetmoe_is_served_whole() -> None:
    torch.manual_seed(7)
    config = transformers.JetMoeConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=8,
        num_local_experts=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=95,
    )
    model = transformers.JetMoeForCausalLM(config).eval()
    rm.init("cpu")
    rm.accelerate(model)
    with torch.no_grad():
        for length in (5, 9):
            ids = torch.randint(3, 90, (2, length))
            with rm.disabled():
                expected = model(ids, use_cache=False).logits
            for _ in range(3):
                found = model(ids, use_cache=False).logits
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    record = rm.explain(model).to_dict()["models"][0]
    assert record["routed"]
    assert not any(entry["kept"] for entry in record["entries"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counts_are_torchs_at_the_edges_of_parts_and_outside(dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[0, 1, 1, 5, 7, -1, 2.5], [5, 4.999, nan, inf, -inf, 0.8, 3]], dtype=dtype)
    for bins, low, high in ((6, 0, 5), (5, 0, 5), (3, -1, 1), (100, 0.5, 3), (1, 0, 5)):
        counted = run(lambda x, n=bins, a=low, b=high: torch.histc(x, n, a, b), x)
        assert torch.equal(counted, torch.histc(x, bins, low, high))
    ids = torch.randint(0, 9, (500,)).to(dtype)
    assert torch.equal(run(lambda x: torch.histc(x, 7, 0, 6), ids), torch.histc(ids, 7, 0, 6))


@pytest.mark.parametrize("dtype", ["i32", "i64", "u8"])
def test_counts_of_integers_are_those_of_whole_numbers(dtype: str) -> None:
    """On a GPU transformers counts integers, which torch's own kernel for the CPU does not take."""
    x = torch.randint(0, 12, (400,))
    kind = {"i32": torch.int32, "i64": torch.int64, "u8": torch.uint8}[dtype]
    for bins, low, high in ((7, 0, 6), (4, 0, 3), (5, 2, 9), (9, 1, 4), (1, 0, 5)):
        b = IrBuilder()
        given = b.input("x", dtype, [400])
        call = Call(b, {"self": given, "bins": bins, "min": low, "max": high}, [(dtype, (bins,))])
        counts = experts.TABLE["histc.default"](call)
        assert isinstance(counts, Value) and counts.dtype == dtype
        (found,) = _core.Program(b.text([counts], {}), {}, ["cpu"]).run([x.to(kind)])
        assert torch.equal(found, torch.histc(x.double(), bins, low, high).to(kind))
