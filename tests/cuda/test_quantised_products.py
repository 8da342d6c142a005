"""quantize and quant_linear on a GPU: programs against float64, and generation on such weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
rm = pytest.importorskip("rm_abstract")

from problems import (  # noqa: E402 - behind the check for torch
    ACTIVATIONS,
    DTYPES,
    EPSILON,
    assert_close,
    tolerance,
)

pytestmark = pytest.mark.cuda
NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
FEW = ("gemv_quant_sm90", "gemv_tensor_sm90", "gemv_bulk_sm90", "gemv_naive_any")
MANY, GROUP = "quant_linear_dequantised_any", "gemv_group_quant_sm90"


@pytest.fixture(autouse=True)
def plugins() -> None:
    from rm_abstract import device

    device.load_plugins(gpu=True)


def padded(k: int) -> int:
    return -(-k // 64) * 64


def quantised_types(n: int, k: int, bits: int, group: int, dtype: str) -> tuple[str, str]:
    q = f"i8[{n},{padded(k)}]" if bits == 8 else f"u8[{n},{padded(k) // 2}]"
    return q, f"{NAMES[dtype]}[{-(-k // group)},{n}]"


def quantised(w: Any, bits: int, group: int) -> tuple[Any, Any, Any]:
    """q and scales of a weight as the GPU reads them, and the weight they stand for in float64.
    Computed on the host, where a division by a number is one."""
    n, k = w.shape
    groups = torch.nn.functional.pad(w.float().cpu(), (0, -k % group)).reshape(n, -1, group)
    ties = groups.abs() == groups.abs().amax(-1, keepdim=True)
    first = torch.where(ties, torch.arange(group), group).amin(-1, keepdim=True)
    most = groups.gather(-1, first)
    wanted = most.abs() / 127 if bits == 8 else most / -8
    scale = wanted.to(w.dtype).float()
    zero, low, high = (0, -127, 127) if bits == 8 else (8, 0, 15)
    integers = torch.where(
        scale == 0, torch.full_like(groups, zero), (groups / scale).round() + zero
    )
    integers = integers.clamp(low, high)
    full = ((integers - zero).double() * scale.double()).reshape(n, -1)[:, :k]
    flat = torch.nn.functional.pad(integers.reshape(n, -1)[:, :k], (0, padded(k) - k)).int()
    q = flat.to(torch.int8) if bits == 8 else (flat[:, ::2] | flat[:, 1::2] << 4).to(torch.uint8)
    return q.cuda(), scale[..., 0].t().contiguous().to(w.dtype).cuda(), full.cuda()


def weight(n: int, k: int, dtype: str) -> Any:
    w = torch.randn(n, k, device="cuda").to(DTYPES[dtype])
    w[: n // 8] *= 40
    w[n // 2 : n // 2 + 2] = 0  # groups whose scale is zero
    return w


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_weight_is_quantised_bit_for_bit(bits: int, dtype: str, seed: int) -> None:
    from rm_abstract import _core

    torch.manual_seed(seed)
    for n, k, group in ((1, 32, 32), (70, 65, 32), (33, 500, 64), (16, 384, 128), (9, 192, 128)):
        w = weight(n, k, dtype)
        q_type, scale_type = quantised_types(n, k, bits, group, dtype)
        text = (
            f'rmir 1\ninput %0 "w" : {NAMES[dtype]}[{n},{k}]\n'
            f"%1, %2 = quantize(%0) {{bits={bits}, group={group}, pairs=1, symmetric=1}}"
            f" : {q_type}, {scale_type}\nreturn %1, %2\n"
        )
        q, scales = _core.Program(text, {}, ["cuda"]).run([w])
        wanted_q, wanted_scales, _ = quantised(w, bits, group)
        what = f"{n} x {k} in groups of {group}, seed {seed}"
        assert torch.equal(scales, wanted_scales), what
        assert torch.equal(q, wanted_q), what


def product(
    m: int, w: Any, bits: int, group: int, activation: str, given: list[str], force: str = ""
) -> Any:
    """The program y = activation(x w^T + bias) + residual over a quantised constant."""
    from rm_abstract import _core

    n, k = w.shape
    dtype = str(w.dtype)[6:]
    t, (q_type, scale_type) = NAMES[dtype], quantised_types(n, k, bits, group, dtype)
    text = f'rmir 1\ninput %0 "x" : {t}[{m},{k}]\n'
    if "residual" in given:
        text += f'input %5 "r" : {t}[{m},{n}]\n'
    text += f'weight %1 "w" : {t}[{n},{k}]\n'
    if "bias" in given:
        text += f'weight %4 "b" : {t}[{n}]\n'
    text += (
        f"%2, %3 = quantize(%1) {{bits={bits}, group={group}, pairs=1, symmetric=1}}"
        f" : {q_type}, {scale_type}\n"
        f"%6 = quant_linear(%0, %2, %3, _, {'%4' if 'bias' in given else '_'},"
        f' {"%5" if "residual" in given else "_"}) {{activation="{activation}", bits={bits},'
        f" group={group}, pairs=1}} : {t}[{m},{n}]\nreturn %6\n"
    )
    return lambda weights, **more: _core.Program(
        text, weights, ["cuda"], f"quant_linear:{force}" if force else "", **more
    )


def check(m: int, n: int, k: int, bits: int, group: int, dtype: str, case: int, force: str) -> None:
    w, t = weight(n, k, dtype), DTYPES[dtype]
    name, function = ACTIVATIONS[case % 7]  # leaky_relu has no opcode
    given = [what for i, what in enumerate(("bias", "residual")) if case >> i & 1]
    weights = {"w": w}
    if "bias" in given:
        weights["b"] = torch.randn(n, device="cuda").to(t)
    program = product(m, w, bits, group, name, given, force)(weights)
    x = torch.randn(m, k, device="cuda").to(t)
    inputs = [x]
    if "residual" in given:
        inputs.append(torch.randn(m, n, device="cuda").to(t))
    _, _, full = quantised(w, bits, group)
    expected = x.double() @ full.T
    scale = float((x.double().square() @ full.square().T).sqrt().max()) + 1
    expected = function(expected + weights["b"].double() if "bias" in given else expected)
    if "residual" in given:
        expected = expected + inputs[1].double()
    # Many rows read weights that are rounded to x's type: random errors of a rounding each.
    bound = tolerance(dtype, k) + EPSILON[dtype] + 8 * 2.0**-23
    what = f"{m} x {n} x {k}, {bits} bits in groups of {group}, {name}, {given}, {force}"
    for _ in range(4):  # recorded from the third run on
        (y,) = program.run(inputs)
        assert_close(y, expected, bound, scale, what)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("bits", [8, 4])
def test_products_equal_float64(bits: int, dtype: str, seed: int) -> None:
    """Around the edges of tiles, groups and of the kernels for few rows."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    sizes = (1, 1, 2, 7, 8, 9, 16, 63, 64, 65, 128, 300)
    for case, m in enumerate(sizes):
        group = int(rng.choice([32, 64, 128, 128]))
        n = int(rng.choice([1, 8, 40, 127, 128, 129, 136, 256, 264]))
        k = int(rng.choice([32, 64, 96, 128, 192, 200, 256, 384, 512, 640]))
        check(m, n, k, bits, group, dtype, case, "")


@pytest.mark.parametrize("kernel", [*FEW, MANY])
@pytest.mark.parametrize("bits", [8, 4])
def test_every_kernel_equals_float64(bits: int, kernel: str, seed: int) -> None:
    torch.manual_seed(seed)
    several = kernel in FEW[2:] or kernel == MANY
    for case, (m, n, k) in enumerate(
        ((1, 136, 128), (1, 264, 512), (1, 2048, 2048), (8, 128, 1024), (3, 72, 256), (8, 8, 384))
    ):
        check(m if several else 1, n, k, bits, 128, "bfloat16", case, kernel)


def test_a_wide_weight_is_multiplied_in_pieces(seed: int) -> None:
    """More than 64 MiB of dequantised weights: two pieces, the second one not whole."""
    torch.manual_seed(seed)
    check(40, 16384 + 520, 2048, 8, 128, "bfloat16", 3, "")
    check(9, 16384 + 3, 2048, 4, 128, "bfloat16", 0, "")


@pytest.mark.parametrize("bits", [8, 4])
def test_kernels_check_themselves_with_guarded_memory(bits: int, tmp_path: Path) -> None:
    """The self-check has bytes behind results and workspaces that kernels must leave alone."""
    from rm_abstract import _core

    cache = _core.cache.CompileCache({"cache_dir": str(tmp_path)})
    checks = _core.SelfCheck("auto", cache)
    for m, n, k, group in ((1, 264, 512, 128), (5, 72, 256, 128), (40, 130, 200, 64)):
        w = weight(n, k, "bfloat16")
        program = product(m, w, bits, group, "silu", ["residual"])({"w": w}, checks=checks)
        x = torch.randn(m, k, device="cuda").bfloat16()
        program.run([x, torch.randn(m, n, device="cuda").bfloat16()])
    torch.cuda.synchronize()
    report = checks.report()
    assert report["refused"] == []
    assert report["checked"] >= 3  # one row, few rows, many rows


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_decoders_layer_is_the_dequantised_layer_in_five_launches(
    dtype: str, bits: int, tmp_path: Path, seed: int
) -> None:
    """Against the host's, whose weights are what the integers stand for. The first steps are
    launched one by one, later ones are a graph's."""
    from test_steps import step_text

    from rm_abstract import _core

    torch.manual_seed(seed)
    t, name = {"bf16": (torch.bfloat16, "bfloat16"), "f16": (torch.float16, "float16")}[dtype]
    shapes = {"q": (256, 256), "k": (128, 256), "v": (128, 256), "o": (256, 256)}
    shapes |= {"gate": (640, 256), "up": (640, 256), "down": (256, 640)}
    weights = {n: torch.randn(n_k).to(t) * n_k[1] ** -0.5 for n, n_k in shapes.items()}
    weights |= {n: torch.rand(256).to(t) for n in ("n1", "n2")} | {"kb": torch.randn(128).to(t)}
    plain = {n: w for n, w in weights.items() if n not in shapes}
    plain |= {n: quantised(weights[n], bits, 128)[2].to(t).cpu() for n in shapes}

    def rewritten(found: re.Match[str]) -> str:
        result, x, w, rest, activation = found.groups()
        n, k = next(s for what, s in shapes.items() if f'%{w} "{what}"' in text)
        q_type, scale_type = quantised_types(n, k, bits, 128, name)
        at = 100 + 2 * int(w)
        return (
            f"%{at}, %{at + 1} = quantize(%{w}) {{bits={bits}, group=128, pairs=1, symmetric=1}}"
            f" : {q_type}, {scale_type}\n"
            f"%{result} = quant_linear(%{x}, %{at}, %{at + 1}, _, {rest})"
            f' {{activation="{activation}", bits={bits}, group=128, pairs=1}}'
        )

    text = step_text(1, dtype)
    gemm = r'%(\d+) = gemm\(%(\d+), %(\d+), ([^)]*)\) \{activation="(\w+)", trans_b=1\}'
    quantised_text, replaced = re.subn(gemm, rewritten, text)
    assert replaced == len(shapes)
    host = _core.Program(text, plain, ["cpu"])
    checks = _core.SelfCheck("auto", _core.cache.CompileCache({"cache_dir": str(tmp_path)}))
    there = {n: w.cuda() for n, w in weights.items()}
    here = _core.Program(quantised_text, there, ["cuda"], checks=checks)
    k, v = (torch.randn(1, 2, 320, 64).to(t) for _ in range(2))
    k_there, v_there = k.cuda(), v.cuda()
    for position in (3, 4, 5, 6, 200, 319):
        x, angle = torch.randn(1, 1, 256).to(t), torch.rand(1, 1, 1, 64) * 6
        seen = torch.ones(1, 1, 1, 320, dtype=torch.bool)
        given = [x, torch.tensor(position), seen, k, v, angle.cos().to(t), angle.sin().to(t)]
        moved = [k_there if a is k else v_there if a is v else a.cuda() for a in given]
        expected, actual = host.run(given)[0].float(), here.run(moved)[0].cpu().float()
        # The host's weights are rounded to 16 bits.
        scale = float(expected.abs().max())
        assert float((actual - expected).abs().max()) <= 4e-2 * scale, (position, seed)
        for mine, right in ((k_there, k), (v_there, v)):
            assert float((mine.cpu().float() - right.float()).abs().max()) <= 0.15, (position, seed)
    counts: dict[str, int] = here.report()["kernels"]
    assert counts["cuda/gemv_group_quant_sm90"] == 2, counts
    assert counts["cuda/sdpa_step_sm80"] == 1, counts
    assert not any("norm" in kernel or "group_waves" in kernel for kernel in counts), counts
    assert here.report()["recordings"] == 1
    assert checks.report()["refused"] == []


def saved_llama(folder: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        vocab_size=200,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def loaded(folder: Path) -> Any:
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.eval().cuda()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_generation_reads_quantised_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    from rm_abstract.verification.quantised import BITS, QuantisedWeight, dequantised

    monkeypatch.setenv("RM_CACHE_DIR", str(tmp_path / "cache"))
    saved_llama(tmp_path / "model")
    twin = loaded(tmp_path / "model")
    for module in twin.modules():
        if isinstance(module, torch.nn.Linear):
            form = QuantisedWeight("", BITS[precision], 128, True, False, True)
            module.weight = torch.nn.Parameter(dequantised(module.weight.detach(), form))
    options = {"precision": precision, "when_slower": "compiled"}
    rm.init("gpu:0", fallback="error:correctness", compile_options=options)
    try:
        model = loaded(tmp_path / "model")
        ids = torch.randint(3, 200, (1, 40), device="cuda")
        asked = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
        asked |= {"pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        asked |= {"output_logits": True, "return_dict_in_generate": True}
        for _ in range(3):  # the first call of a kind is the original's
            made = model.generate(ids, **asked)
        plain = {k: v for k, v in asked.items() if not k.startswith(("output", "return"))}
        for _ in range(3):  # without logits: the loop in the core
            tokens = model.generate(ids, **plain)
        (record,) = [r for r in rm.explain(model).to_dict()["models"] if r["routed"]]
        names = {name for entry in record["entries"] for name in entry["kernels"]}
        with torch.no_grad(), rm.disabled():
            expected = twin(made.sequences[:, :-1]).logits[:, ids.shape[1] - 1 :].float()
            own = model(made.sequences[:, :-1]).logits[:, ids.shape[1] - 1 :].float()
            chosen = twin(tokens[:, :-1]).logits[:, ids.shape[1] - 1 :].float()
    finally:
        rm.shutdown()
    logits = torch.stack(made.logits, 1).float()
    scale = float(expected.abs().max())
    error = float((logits - expected).abs().max())
    assert error <= 5e-2 * scale
    if precision == "int4":  # 8 bits lie within the roundings of bf16
        assert float((expected - own).abs().max()) > error
    for kernel in (FEW[0], GROUP, MANY):  # of a token, and of the prompt
        assert f"cuda/{kernel}" in names, names
    # Every token of the loop is the best of the dequantised model's, but for near ties.
    taken = chosen.gather(-1, tokens[:, ids.shape[1] :, None])[..., 0]
    assert float((chosen.amax(-1) - taken).max()) <= 8e-2 * scale
    sizes = [entry["quantised"] for entry in record["entries"] if entry.get("quantised")]
    assert sizes and all(s["bytes"] < 0.55 * s["bytes_before"] for s in sizes)
