"""Weight-only quantisation: what programs on 8 and 4 bits give, and how they are judged."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import rm_abstract as rm
from rm_abstract import _core
from rm_abstract.verification import parity, quantised
from rm_abstract.verification.quantised import QuantisedWeight, dequantised

HEAVY = os.environ.get("RM_HEAVY") == "1"
HALVES = [torch.bfloat16, torch.float16] if HEAVY else [torch.bfloat16]
PROMPT = b"def read_file(path):\n    "


def quantising(precision: str, **options: Any) -> rm.Session:
    return rm.init(
        "cpu",
        compile_options={"precision": precision, **options},
        fallback="error:capture,compile,correctness",
    )


@pytest.fixture
def ended() -> Iterator[None]:
    with torch.no_grad():
        yield
    rm.shutdown()


@pytest.fixture
def llama(tiny_llama: Path) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


def on_dequantised(model: Any, bits: int, group: int) -> Any:
    """A plain model whose products have the weights that int8 or int4 stands for."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, torch.nn.Linear):
            form = QuantisedWeight("", bits, group, True, False)
            module.weight = torch.nn.Parameter(dequantised(module.weight, form))
    return twin


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations as few rows of them are read: integers of -127..127 in blocks of 32."""
    blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    most = blocks.abs().amax(-1, keepdim=True)
    integers = (blocks * torch.where(most > 0, 127 / most, 0)).round()
    return (integers * (most / 127)).flatten(-2)[..., : x.shape[-1]]


def on_rounded_activations(model: Any, change: Any = rounded) -> Any:
    """A plain model whose products read `change` of what they are given."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: (change(inputs[0]),))
    return twin


def entries(model: Any) -> list[dict[str, Any]]:
    (found,) = rm.explain(model).to_dict()["models"]
    return list(found["entries"])


def by_kernels(weight: torch.Tensor, form: QuantisedWeight) -> torch.Tensor:
    """What the core's kernels make of a weight: its product with the unit matrix."""
    n, k = weight.shape
    program = (
        f'rmir 1\ninput %0 "x" : f32[{k},{k}]\nweight %1 "w" : f32[{n},{k}]\n'
        f"%2 = linear(%0, %1) : f32[{k},{n}]\nreturn %2\n"
    )
    text, products = _core.ir.quantize(program, form.bits, form.group, form.symmetric)
    assert products == 1
    (result,) = _core.Program(text, {"w": weight}, ["cpu"]).run([torch.eye(k)])
    return result.t()


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [8, 4])
def test_torch_and_the_kernels_agree_on_every_weight(
    session: rm.Session, bits: int, group: int, symmetric: bool, seed: int
) -> None:
    assert session.resolved.backend == "cpu"  # loads its plugin
    torch.manual_seed(seed)
    weight = torch.randn(130, 200) * torch.logspace(-9, 4, 130)[:, None]
    weight[3] = 0
    weight[4, :40] = 0
    form = QuantisedWeight("w", bits, group, symmetric, False)
    assert torch.equal(dequantised(weight, form), by_kernels(weight, form))
    across = form._replace(transposed=True)
    assert torch.equal(dequantised(weight.t(), across).t(), dequantised(weight, form))


def test_a_weight_moves_by_half_a_step_at_most(seed: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(64, 256)
    for bits, steps in ((8, 127), (4, 8)):
        error = (dequantised(weight, QuantisedWeight("", bits, 32, True, False)) - weight).abs()
        step = weight.reshape(64, 8, 32).abs().amax(-1, keepdim=True) / steps
        # 4 bits reach from -8 to 7 steps: the far end of the other sign is cut off.
        bound = step * (0.5 if bits == 8 else 1) * 1.01
        assert (error.reshape(64, 8, 32) <= bound).all()


@pytest.mark.parametrize(("bits", "steps"), [(8, 127), (4, 8)])
def test_weights_of_a_checkpoint_in_the_same_form_are_kept_exactly(
    bits: int, steps: int, seed: int
) -> None:
    """Blocks of 32 with one fp16 scale, as GGUF's Q8_0 and Q4_0 have them."""
    generator = torch.Generator().manual_seed(seed)
    scale = (torch.rand(64, 8, 1, generator=generator) + 0.1).half().float()
    integers = torch.randint(-steps + 1, steps, (64, 8, 32), generator=generator)
    integers[:, :, 5] = -steps  # what the scale was chosen for
    weight = (integers * scale).reshape(64, 256)
    assert torch.equal(dequantised(weight, QuantisedWeight("", bits, 32, True, False)), weight)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("bits", "group"), [(8, 128), (8, 32), (4, 32), (4, 128)])
def test_torch_and_the_kernels_round_activations_to_the_same_integers(
    session: rm.Session, bits: int, group: int, rows: int, seed: int
) -> None:
    """Both round the same numbers, so ties fall the same way and only the sums' order differs."""
    assert session.resolved.backend == "cpu"
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(269, 328, generator=generator)
    x = torch.randn(rows, 328, generator=generator) * torch.logspace(-3, 3, 328)
    x[0, :40] = 0
    x[0, 64:96] = torch.arange(32) - 0.5  # ties
    x[0, 64] = 127
    program = (
        f'rmir 1\ninput %0 "x" : f32[{rows},328]\nweight %1 "w" : f32[269,328]\n'
        f"%2 = linear(%0, %1) : f32[{rows},269]\nreturn %2\n"
    )
    text, _ = _core.ir.quantize(program, bits, group, activations=8)
    few = dequantised(weight, QuantisedWeight("w", bits, group, True, False)).double()
    for run, read in ((text, rounded(x)), (_core.ir.keep_activations(text), x)):
        (result,) = _core.Program(run, {"w": weight}, ["cpu"]).run([x])
        expected = read.double() @ few.t()
        size = read.double().abs() @ few.abs().t()  # what cancels is of this size
        assert ((result - expected).abs() <= 1e-6 * size + 1e-9).all()


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        (rounded, True),
        (lambda x: rounded(x) * (torch.arange(x.shape[-1]) >= 32), False),  # without a block
        (lambda x: rounded(x).roll(32, -1), False),  # another block's weights
        (lambda x: rounded(x) + 0.5 * rounded(x).abs().mean(-1, keepdim=True), False),  # an offset
        (lambda x: (x * 4 / x.abs().amax()).round() * x.abs().amax() / 4, False),  # 3 bits
    ],
    ids=["rounded", "a block missing", "blocks swapped", "off by the sum", "too few bits"],
)
def test_the_gate_tells_8_bit_activations_from_a_wrong_kernel(
    llama: Any, change: Any, passes: bool
) -> None:
    exact = on_dequantised(llama, 4, 32)
    ids = torch.tensor([list(PROMPT)])
    with torch.no_grad():
        expected = exact(ids).logits
        actual = on_rounded_activations(exact, change)(ids).logits
    assert parity.compare(expected, actual, activation_bits=8).passed is passes


@pytest.mark.parametrize("precision", ["int8", "int4"] if HEAVY else ["int4"])
def test_few_rows_are_rounded_to_8_bits_unless_told_otherwise(
    ended: None, llama: Any, precision: str
) -> None:
    bits, group = quantised.BITS[precision], quantised.AUTO_GROUPS[precision]
    exact = on_dequantised(llama, bits, group)
    ids = torch.tensor([list(PROMPT[:8])])
    references = {"auto": on_rounded_activations(exact), "int16": exact}
    found = {}
    for activations in references:
        quantising(precision, activations=activations)
        rm.accelerate(llama)
        for _ in range(2):
            found[activations] = llama(ids, use_cache=False).logits
        (entry,) = entries(llama)
        assert entry["parity"] == "passed"
        said = {"auto": "int8"}.get(activations, activations)
        assert entry["precision"] == f"{precision}, groups of {group}, activations {said}"
        rm.shutdown()

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).norm() / b.norm())

    assert distance(found["int16"], exact(ids).logits) < 1e-3
    rounding = distance(references["auto"](ids).logits, exact(ids).logits)
    assert 1e-3 < rounding < 0.05
    assert distance(found["auto"], exact(ids).logits) == pytest.approx(rounding, rel=0.5)


@pytest.mark.parametrize(("precision", "group"), [("int8", 128), ("int4", 32)])
def test_generation_gives_the_tokens_of_the_dequantised_model(
    ended: None, llama: Any, precision: str, group: int
) -> None:
    reference = on_dequantised(llama, quantised.BITS[precision], group)
    quantising(precision, activations="int16")
    rm.accelerate(llama)
    ids = torch.tensor([list(PROMPT)])
    options = {"max_new_tokens": 80, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    llama.generate(ids, **options)  # compiles: its first steps are the original's
    assert torch.equal(llama.generate(ids, **options), reference.generate(ids, **options))
    (found,) = rm.explain(llama).to_dict()["models"]
    assert found["loop_tokens"] > 100
    for entry in found["entries"]:
        assert entry["precision"] == f"{precision}, groups of {group}, activations int16"
        # Seven products a layer and the head; the embedding that shares its weight is not among.
        assert entry["quantised"]["weights"] == 4 * 7 + 1
        assert sum(n for name, n in entry["kernels"].items() if "quant_linear" in name) == 29
        # Older transformers make the rotary angles by one small product without a weight.
        products = [n for name, n in entry["kernels"].items() if "gemm" in name]
        assert sum(products) <= 1
        few = {"int8": 0.26, "int4": 0.15}[precision]
        assert entry["quantised"]["bytes"] < few * entry["quantised"]["bytes_before"]
    assert f"precision {precision}, groups of {group}, activations int16: 29 weights in" in str(
        rm.explain(llama)
    )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_models_generate_on_few_bits(
    ended: None, tiny_llama: Path, dtype: torch.dtype
) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=dtype).eval()
    quantising("int8")
    rm.accelerate(model)
    ids = torch.tensor([list(PROMPT)] * 2)
    ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20)
    assert rm.explain(model).routed > 0
    assert bytes(ids[0].tolist()).startswith(PROMPT)
    assert {entry["parity"] for entry in entries(model)} == {"passed"}


@pytest.mark.parametrize(("precision", "cosine"), [("int8", 0.9995), ("int4", 0.9)])
def test_an_encoder_embeds_as_before(
    ended: None, minilm: Path, precision: str, cosine: float
) -> None:
    model = hf.AutoModel.from_pretrained(minilm).eval()
    ids = torch.randint(1000, 20000, (2, 24), generator=torch.Generator().manual_seed(5))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain = model(**inputs).last_hidden_state.mean(1)
    quantising(precision)
    rm.accelerate(model)
    assert torch.equal(model(**inputs).last_hidden_state.mean(1), plain)  # the original serves it
    few = model(**inputs).last_hidden_state.mean(1)
    assert torch.cosine_similarity(few, plain).min() > cosine
    assert not torch.equal(few, plain)
    assert rm.explain(model).routed == 1


def test_weights_that_lie_across_their_rows_are_quantised(ended: None, seed: int) -> None:
    torch.manual_seed(seed)
    config = hf.GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=200)
    model = hf.GPT2LMHeadModel(config).eval()
    quantising("int4", group_size=64)
    rm.accelerate(model)
    inputs = {"input_ids": torch.randint(0, 200, (2, 9))}
    model(**inputs)
    model(**inputs)
    (entry,) = entries(model)
    assert entry["parity"] == "passed" and entry["quantised"]["weights"] == 2 * 4 + 1
    assert entry["precision"] == "int4, groups of 64, activations int8"


@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_the_gate_refuses_a_program_on_other_weights(
    ended: None, llama: Any, monkeypatch: pytest.MonkeyPatch, activations: str
) -> None:
    """Weights in groups of 64 are close to those in groups of 128, and yet not the same."""
    genuine = _core.ir.quantised_weights

    def in_other_groups(text: str) -> list[Any]:
        return [(name, bits, 64, *rest) for name, bits, _, *rest in genuine(text)]

    ids = torch.tensor([list(PROMPT)])
    expected = llama(ids, use_cache=False).logits
    monkeypatch.setattr(_core.ir, "quantised_weights", in_other_groups)
    rm.init("cpu", compile_options={"precision": "int8", "activations": activations})
    rm.accelerate(llama)
    with pytest.warns(rm.RoutingWarning, match="RM501"):
        assert torch.equal(llama(ids, use_cache=False).logits, expected)
    assert torch.equal(llama(ids, use_cache=False).logits, expected)  # eager, not a wrong program


def test_precision_and_group_size_are_part_of_the_key(ended: None, llama: Any) -> None:
    ids = torch.tensor([list(PROMPT)])
    found = {}
    for precision, group in (("auto", "auto"), ("int8", "auto"), ("int4", 32), ("int4", 64)):
        rm.init("cpu", compile_options={"precision": precision, "group_size": group})
        rm.accelerate(llama)
        llama(ids, use_cache=False)
        (entry,) = entries(llama)
        assert entry["cache"] == "hit" or not found  # the capture is one for all
        found[entry["artefact"]] = llama(ids, use_cache=False).logits
        rm.shutdown()
    first, *others = found.values()
    assert len(found) == 4
    assert not any(torch.equal(first, other) for other in others)


def test_weights_written_in_place_are_quantised_again(ended: None, llama: Any) -> None:
    ids = torch.tensor([list(PROMPT)])
    quantising("int8")
    rm.accelerate(llama)
    for _ in range(2):
        before = llama(ids, use_cache=False).logits
    llama.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    for _ in range(2):
        after = llama(ids, use_cache=False).logits
    expected = on_dequantised(llama, 8, 128)(ids).logits
    assert not torch.allclose(before, after, rtol=1e-2)
    assert torch.allclose(after, expected, rtol=1e-3, atol=1e-3)
    assert entries(llama)[0]["parity"] == "passed"


@pytest.mark.parametrize("bits", [8, 4])
def test_programs_for_a_gpu_have_its_layout(bits: int) -> None:
    text = (
        'rmir 1\ninput %0 "x" : bf16[3,200]\nweight %1 "w" : bf16[96,200]\n'
        "%2 = linear(%0, %1) : bf16[3,96]\nreturn %2\n"
    )
    options = {"precision": f"int{bits}", "activations": "int8"}
    made = _core.ir.run_passes(text, options, True)
    kind = "i8[96,256]" if bits == 8 else "u8[96,128]"
    assert f"pairs=1, symmetric=1}} : {kind}, bf16[2,96]" in made
    assert "group=128" in made and "x_bits" not in made and "tile" not in made
    assert "pairs" not in _core.ir.run_passes(text, options)
    (form,) = [QuantisedWeight(*row) for row in _core.ir.quantised_weights(made)]
    assert form == QuantisedWeight("w", bits, 128, True, False, True)
    assert form.bytes_of((96, 200)) == 96 * (256 * bits // 8 + 2 * 2)
    with pytest.raises(_core.CoreError, match="quantize"):
        _core.Program(made, {"w": torch.zeros(96, 200).bfloat16()}, ["cpu"]).run(
            [torch.zeros(3, 200).bfloat16()]
        )
    with pytest.raises(_core.CoreError, match="16 bits with pairs"):
        _core.ir.quantize(text, bits, activations=8, pairs=True)


def test_scales_of_a_gpus_weights_are_of_the_weights_type() -> None:
    weight = (torch.randn(4, 256) * 3).bfloat16()
    form = QuantisedWeight("w", 8, 128, True, False, True)
    groups = weight.float().reshape(4, 2, 128)
    scale = (groups.abs().amax(-1, keepdim=True) / 127).bfloat16().float()
    wanted = ((groups / scale).round().clamp(-127, 127) * scale).reshape(4, 256).bfloat16()
    assert torch.equal(dequantised(weight, form), wanted)
    assert not torch.equal(dequantised(weight, form._replace(pairs=False)), wanted)


def test_programs_of_one_model_hold_quantised_weights_once(
    ended: None, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    genuine = _core.Program

    def noted(*arguments: Any, **options: Any) -> Any:
        made.append((genuine(*arguments, **options), options["shared"]))
        return made[-1][0]

    monkeypatch.setattr(_core, "Program", noted)
    quantising("int8")
    rm.accelerate(llama)
    ids = torch.tensor([list(PROMPT)])
    llama(ids, use_cache=False)
    llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4)
    assert len(made) >= 3  # a forward, a prefill and a step
    assert all(pool is made[0][1] for _, pool in made)
    size = entries(llama)[0]["quantised"]["bytes"]
    assert made[0][1].bytes() < size * 1.05
    for program, _ in made:
        assert program.report()["derived_bytes"] >= size
