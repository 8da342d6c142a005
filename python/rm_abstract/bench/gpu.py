"""Whole models on an NVIDIA GPU by unmodified calls: eager, torch.compile, ours, and a probe of
what the device can do, by turns in one process.

Every result has the same form: candidates with their medians and 95 % intervals, and a bound that
a probe of the same rounds gives: reading the weights, or the products at the rate of a large one.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rm_abstract.bench import method

if TYPE_CHECKING:
    import torch

Call = Callable[[], object]
_GEMM = 8192
_COPY_BYTES = 1 << 30
_PATIENCE_S = 120
_CALLS = 200  # of `dispatch`, a sample: nothing waits in between


@dataclass(frozen=True)
class Case:
    """A model of random weights; `rows` and `dtype` of its inputs."""

    name: str
    build: Callable[[int], tuple[Any, tuple[Any, ...]]]
    rows: int
    dtype: str


def _bert(rows: int) -> tuple[Any, tuple[Any, ...]]:
    import torch
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()), (torch.randint(0, 30000, (rows, 128)),)


def _resnet(rows: int) -> tuple[Any, tuple[Any, ...]]:
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    config: Any = ResNetConfig()
    config.num_labels = 1000
    model: Any = ResNetForImageClassification(config)
    for module in model.modules():  # as after training
        if isinstance(module, torch.nn.BatchNorm2d):
            statistics: Any = module
            torch.nn.init.normal_(statistics.running_mean, 0, 0.1)
            torch.nn.init.uniform_(statistics.running_var, 0.5, 1.5)
    return model, (torch.randn(rows, 3, 224, 224),)


def _vit(rows: int) -> tuple[Any, tuple[Any, ...]]:
    import torch
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig()), (torch.randn(rows, 3, 224, 224),)


def _unet(rows: int) -> tuple[Any, tuple[Any, ...]]:
    """A step of the first Stable Diffusion's UNet: 860 M weights, images of 512 x 512."""
    import torch

    diffusers = importlib.import_module("diffusers")  # not a dependency: a case of its own
    model = diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
    return model, (torch.randn(rows, 4, 64, 64), torch.tensor(500.0), torch.randn(rows, 77, 768))


ENCODERS = [Case(f"bert-base bf16 {n}x128", _bert, n, "bfloat16") for n in (1, 32)]
IMAGES = [
    *(Case(f"resnet-50 bf16 {n}", _resnet, n, "bfloat16") for n in (1, 32)),
    *(Case(f"resnet-50 tf32 {n}", _resnet, n, "float32") for n in (1, 32)),
    Case("vit-base bf16 1", _vit, 1, "bfloat16"),
    Case("unet (diffusers) f16 2", _unet, 2, "float16"),
]
# Layers, hidden, intermediate, heads, key heads, vocabulary, head size.
_SHAPES = {
    "llama 0.5b": (24, 896, 4864, 14, 2, 151936, 64),
    "llama 1b": (16, 2048, 8192, 32, 8, 128256, 64),
    "llama 8b": (32, 4096, 14336, 32, 8, 128256, 128),
}
# Bits of a weight of a linear layer: our scales are of bf16, one for 128.
_BITS = {"": 16.0, " int8": 8.125, " int4": 4.125}
# Of each: rows, and tokens of the prompt.
_REQUESTS = {"": (1, 440), " 4096 keys": (1, 4024), " 8 rows": (8, 440)}
# Tokens behind the prompt of the shorter and of the longer run, whose difference is timed. Both lie
# in a cache of one size (512 or 4096 places): else the difference counted a longer prompt's time.
_FEWER, _MORE = 8, 72
DECODERS = {
    name + bits + request: (name, bits.strip() or "auto", *sizes)
    for name in _SHAPES
    for bits in _BITS
    for request, sizes in _REQUESTS.items()
    if not bits or not request
}


def check_device() -> None:
    """Raises RuntimeError with a remedy where no GPU is."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(
            "[bench] expected an NVIDIA GPU that torch can use, got none; leave --device out"
        )


def environment() -> dict[str, Any]:
    """What a figure depends on and a reader must know."""
    import torch
    import transformers

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def first_tensor(output: Any) -> torch.Tensor:
    """The first tensor of a model's output."""
    import torch

    while not isinstance(output, torch.Tensor):
        output = output[0]
    return output


def waiting(call: Call) -> Call:
    """The call with everything it started."""
    import torch

    def complete() -> None:
        call()
        torch.cuda.synchronize()

    return complete


def without_us(call: Call) -> Call:
    """The call as PyTorch makes it."""
    import rm_abstract

    def disabled() -> None:
        with rm_abstract.disabled():
            call()

    return disabled


@contextlib.contextmanager
def _session(precision: str = "auto") -> Iterator[None]:
    import rm_abstract

    options = {"when_slower": "compiled", "precision": precision}  # a program is timed
    rm_abstract.init("gpu:0", compile_options=options)
    try:
        yield
    finally:
        rm_abstract.shutdown()


def _gemm_probe(dtype: torch.dtype) -> tuple[Call, float]:
    """A square product and its operations; of float32 with tf32, as convolutions are."""
    import torch

    a = torch.randn(_GEMM, _GEMM, device="cuda").to(dtype)
    b = torch.randn(_GEMM, _GEMM, device="cuda").to(dtype)

    def product() -> None:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.mm(a, b)
        torch.backends.cuda.matmul.allow_tf32 = before

    return product, 2.0 * _GEMM**3


def _copy_probe() -> tuple[Call, float]:
    """A copy, and the bytes it reads and writes."""
    import torch

    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2.0 * _COPY_BYTES


def run_model(case: Case, against: bool, rounds: int, round_seconds: float) -> dict[str, Any]:
    """Milliseconds a call with a synchronisation; outputs are compared before anything is timed."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    import rm_abstract

    dtype = getattr(torch, case.dtype)
    torch.manual_seed(0)
    model, given = case.build(case.rows)
    model = model.eval().to("cuda", dtype)
    inputs = [t.to("cuda") for t in given]
    inputs = [t.to(dtype) if t.dim() and t.is_floating_point() else t for t in inputs]
    order = torch.channels_last  # what PyTorch's convolutions are fastest with
    theirs = copy.deepcopy(model).to(memory_format=order)
    turned = [t.contiguous(memory_format=order) if t.dim() == 4 else t for t in inputs]
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            expected = first_tensor(model(*inputs)).clone()
        with _session():
            rm_abstract.accelerate(model)
            start = time.monotonic()
            while True:  # a long capture goes on in the background
                output = first_tensor(model(*inputs))
                report = rm_abstract.explain(model)
                if report.routed > 2 or time.monotonic() - start > _PATIENCE_S:
                    break
            ready = time.monotonic() - start
            if not report.routed:
                raise RuntimeError(f"[bench] expected a routed call, got eager:\n{report}")
            calls: dict[str, Call] = {
                "rm_abstract": lambda: model(*inputs),
                "eager": without_us(lambda: theirs(*turned)),
            }
            if against:
                compiled: Any = torch.compile(theirs, mode="reduce-overhead")
                calls["compile"] = without_us(lambda: compiled(*turned))
            gemm, operations = _gemm_probe(dtype)
            moved, moved_bytes = _copy_probe()
            calls |= {"probe: gemm": gemm, "probe: copy": moved}
            timings = method.interleave(
                {name: waiting(call) for name, call in calls.items()},
                rounds=rounds,
                round_seconds=round_seconds,
            )
    rate = operations / timings["probe: gemm"].estimate.median
    bandwidth = moved_bytes / timings["probe: copy"].estimate.median
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    bounds = {
        "products at the GEMM probe's rate": 1e3 * counter.get_total_flops() / rate,
        "weights at the copy probe's bandwidth": 1e3 * weights / bandwidth,
    }
    names = [name for name in calls if not name.startswith("probe")]
    error = (output.float() - expected.float()).abs().max() / expected.float().abs().max()
    return {
        "case": case.name,
        "unit": "ms",
        "candidates": {name: vars(timings[name].estimate.scaled(1e3)) for name in names},
        "over": {
            name: vars(timings["rm_abstract"].speedup_over(timings[name])) for name in names[1:]
        },
        "bound": max(bounds.items(), key=lambda item: item[1]),
        "probes": {"gemm tflop/s": rate / 1e12, "copy tb/s": bandwidth / 1e12},
        "native_share": report.native_share,
        "seconds_to_third_call": ready,
        "error": float(error),
    }


def _decoder(name: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, inner, heads, groups, words, size = _SHAPES[name]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=size,
        intermediate_size=inner,
        vocab_size=words,
        max_position_embeddings=8192,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():  # as GPT-2 is initialised: else many layers amplify bf16's roundings
        for layer in model.model.layers:
            for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                weight.mul_((2 * layers) ** -0.5)
    return model.eval()


def _read_probe() -> tuple[Call, float]:
    """The yardstick of gemv: 4 GiB, read once by bulk copies."""
    import torch

    gemv = importlib.import_module("rm_abstract.ops._ops_gemv")
    data = torch.zeros(1 << 31, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    return lambda: gemv.read_probe(data, stream=stream), float(data.nbytes)


def run_decode(name: str, against: bool, rounds: int) -> dict[str, Any]:
    """Tokens a second of greedy `generate` in bf16, of all rows, behind a prompt. Where our weights
    are of 8 or 4 bits, theirs are still bf16; the bound reads ours."""
    import torch

    import rm_abstract

    shape, precision, rows, prompt = DECODERS[name]
    with _session(precision):
        model = _decoder(shape)
        matrices = [p.numel() for p in model.parameters() if p.dim() == 2]
        matrices.remove(model.model.embed_tokens.weight.numel())  # one row of it is read
        bits = _BITS["" if precision == "auto" else f" {precision}"]
        read = sum(matrices) * bits / 8
        read += 2.0 * sum(p.numel() for p in model.parameters() if p.dim() != 2)
        model.generation_config.eos_token_id = None  # every row is as long as asked for
        ids = torch.randint(0, _SHAPES[shape][5], (rows, prompt), device="cuda")

        def seconds(count: int) -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            torch.cuda.synchronize()
            return time.perf_counter() - start

        def rate() -> float:
            return rows * (_MORE - _FEWER) / (seconds(_MORE) - seconds(_FEWER))

        def eager() -> float:
            with rm_abstract.disabled():
                return rate()

        def static() -> float:
            model.generation_config.cache_implementation = "static"
            try:
                return eager()
            finally:
                model.generation_config.cache_implementation = None

        ways: dict[str, Callable[[], float]] = {"rm_abstract": rate}
        if against:
            ways |= {"eager": eager, "static cache + compile": static}
        probe, probe_bytes = _read_probe()
        reads = waiting(probe)
        rates: dict[str, list[float]] = {way: [] for way in ways}
        probed: list[float] = []
        for call in ways.values():  # captures, compilations, recordings
            for _ in range(3):
                call()
        for _ in range(rounds):
            for way, call in ways.items():
                rates[way].append(call())
            probed.append(probe_bytes / method.time_calls(reads, 0.05))
    estimates = {way: method.Estimate.of(values) for way, values in rates.items()}
    bandwidth = method.Estimate.of(probed).median
    ours = estimates["rm_abstract"].median
    return {
        "case": name if precision != "auto" else f"{name} bf16",
        "unit": "tokens/s",
        "candidates": {way: vars(estimate) for way, estimate in estimates.items()},
        "over": {
            way: vars(
                method.Estimate.of(
                    [a / b for a, b in zip(rates["rm_abstract"], rates[way], strict=True)]
                )
            )
            for way in list(ways)[1:]
        },
        "bound": ("weights at the read probe's bandwidth", rows * bandwidth / read),
        "probes": {"read tb/s": bandwidth / 1e12},
        "share": ours * read / bandwidth / rows,
    }


def run_dispatch(rounds: int, round_seconds: float) -> dict[str, Any]:
    """Microseconds a call on the host, where the device has next to nothing to do."""
    import torch

    import rm_abstract
    from rm_abstract.bench.dispatch import deep_module, null_module, routed

    def many(call: Call) -> Call:
        def repeated() -> None:
            for _ in range(_CALLS):
                call()
            torch.cuda.synchronize()

        return repeated

    x, y = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
    stock, null, toy = null_module().cuda(), null_module().cuda(), deep_module().cuda()
    ids = torch.arange(4, device="cuda")[None]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), _session():
        with torch.cuda.graph(graph):
            stock.forward(x)
        for module in (null, toy):
            rm_abstract.accelerate(module)
        steps = {
            "routed, 1 step": routed(null, lambda: null(x)),
            "routed, many steps": routed(toy, lambda: toy(input_ids=ids)),
        }
        timings = method.interleave(
            {
                "torch.add": many(lambda: torch.add(x, y)),
                "stock module": many(lambda: stock(x)),
                "a graph's replay": many(graph.replay),
                "routed, 1 step": many(lambda: null(x)),
                "routed, many steps": many(lambda: toy(input_ids=ids)),
            },
            rounds=rounds,
            round_seconds=round_seconds,
        )
    micro = {name: timing.estimate.scaled(1e6 / _CALLS) for name, timing in timings.items()}
    return {"us": {name: vars(estimate) for name, estimate in micro.items()}, "steps": steps}


HEADER = (
    "| case | candidate | median (95 %) | ours over it | share of the bound |\n"
    "|---|---|---|---|---|"
)


def markdown(result: dict[str, Any]) -> str:
    """Rows of a table, then the bound's."""
    name, bound = result["bound"]
    less = result["unit"] == "ms"  # less is better
    lines = []
    for way, value in result["candidates"].items():
        median = value["median"]
        span = f"{median:.3f} ({value['low']:.3f}-{value['high']:.3f}) {result['unit']}"
        over = result["over"].get(way)
        ratio = (
            "" if over is None else f"{over['median']:.2f} ({over['low']:.2f}-{over['high']:.2f})"
        )
        share = bound / median if less else median / bound
        lines.append(f"| {result['case']} | {way} | {span} | {ratio} | {share:.2f} |")
    probes = ", ".join(f"{key} {value:.2f}" for key, value in result["probes"].items())
    lines.append(f"| {result['case']} | {name} ({probes}) | {bound:.3f} {result['unit']} | | 1 |")
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], title: str, file: Path) -> None:
    """Bars a case, the bound as a line across them."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "[bench] expected matplotlib for --png; pip install matplotlib"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(3.2 * len(results), 3.6), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        names = list(result["candidates"])
        medians = [result["candidates"][n]["median"] for n in names]
        axis.bar(names, medians, color=["#2a6" if n == "rm_abstract" else "#99a" for n in names])
        axis.axhline(result["bound"][1], color="#c33", linewidth=1.2)
        axis.set_title(result["case"], fontsize=9)
        axis.set_ylabel(result["unit"], fontsize=8)
        axis.tick_params(labelsize=7, axis="x", rotation=20)
    figure.suptitle(f"{title}; red: the probe's bound", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    plt.close(figure)
