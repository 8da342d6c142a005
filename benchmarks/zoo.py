"""What people bring: models of other packages with random weights, each in a process of its own.

    python benchmarks/zoo.py OUT.jsonl --package timm,torchvision,transformers --seconds 1500
    python benchmarks/zoo.py OUT.jsonl --jobs 16
    python benchmarks/zoo.py OUT.jsonl --every 6 --against compile,onnxruntime,openvino

Of every model: served (whole, in parts, or not, with the code), the share of nodes and of FLOPs
by our kernels, the largest difference from eager (relative to the largest value), and eager's time
over ours, best of interleaved calls. With --jobs several models run at a time, each on a core of
its own. The share of FLOPs is null for models in parts. With --against, peers run beside
(vision_zoo.PEERS): medians of interleaved calls of those that agree with eager in their first
tensor; a peer that fails or differs is named. Lines of OUT are not computed again, so a run that
was ended goes on; with --seconds it ends itself. The summary at the end is about all lines of OUT.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import inspect
import json
import os
import queue
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

TOLERANCE = 1e-4
LIMIT_S = 240  # a model
CALLS = 8  # before anything is timed: captured, measured, parts captured
TIMM = (
    "resnet18 resnet26 resnet50 resnext26ts seresnet33ts wide_resnet50_2 resnetv2_50 "
    "regnetx_002 regnety_002 regnetz_b16 densenet121 dla34 vgg11_bn mobilenetv2_100 "
    "mobilenetv3_small_100 mobilenetv3_large_100 mobilenetv4_conv_small mnasnet_100 "
    "efficientnet_b0 efficientnet_lite0 tf_efficientnetv2_b0 fbnetc_100 ghostnet_100 "
    "ghostnetv2_100 lcnet_050 tinynet_e spnasnet_100 rexnet_100 hardcorenas_a mixnet_s "
    "selecsls42b repvgg_a0 mobileone_s0 repghostnet_050 fastvit_t8 convnext_atto "
    "convnextv2_atto edgenext_xx_small efficientformer_l1 efficientvit_b0 efficientvit_m0 "
    "levit_128s mobilevit_xxs mobilevitv2_050 poolformer_s12 pvt_v2_b0 xcit_nano_12_p16_224 "
    "vit_tiny_patch16_224 deit_tiny_patch16_224 cait_xxs24_224 beit_base_patch16_224 "
    "swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 coat_lite_tiny convit_tiny "
    "crossvit_tiny_240 davit_tiny focalnet_tiny_srf gcvit_xxtiny maxvit_rmlp_pico_rw_256 "
    "mixer_s32_224 gmlp_ti16_224 resmlp_12_224 nest_tiny pit_ti_224 sequencer2d_s "
    "tnt_s_legacy_patch16_224 twins_pcpvt_small visformer_tiny volo_d1_224 hrnet_w18_small "
    "inception_v3 inception_next_atto nfnet_l0 dm_nfnet_f0 cspresnet50 darknet53 dpn48b "
    "res2net50_14w_8s skresnet18 resnest14d starnet_s1 shvit_s1 tiny_vit_5m_224 repvit_m0_9 "
    "hiera_tiny_224 eva02_tiny_patch14_224 hgnet_tiny"
).split()
TORCHVISION = (
    "alexnet squeezenet1_1 shufflenet_v2_x0_5 googlenet mobilenet_v3_small mnasnet0_5 "
    "regnet_y_400mf vit_b_16 swin_v2_t maxvit_t convnext_tiny deeplabv3_mobilenet_v3_large "
    "lraspp_mobilenet_v3_large fcn_resnet50 r3d_18 s3d mvit_v2_s raft_small "
    "ssdlite320_mobilenet_v3_large fasterrcnn_mobilenet_v3_large_320_fpn"
).split()
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("embedding_size", "head_dim", "rotary_dim"), 16),
    "vocab_size": 128,
}
_STAGES = {  # widths and heads that go together
    key: None for key in ("hidden_size", "embed_dim", "num_attention_heads", "num_hidden_layers")
}
# Convolutions of the default spread let values vanish, to numbers that no two programs round alike.
_SPREAD = {"initializer_range": 0.2}
# What these architectures need besides, or instead (None: the configuration's own value stays).
OPTIONS: dict[str, dict[str, Any]] = {
    "ConvNext": {"hidden_size": None, "num_hidden_layers": None},  # those of its stages
    "ConvNextV2": {"hidden_size": None, "num_hidden_layers": None},
    "Falcon": {"head_dim": None},  # derived there
    "Funnel": {"num_hidden_layers": None, "block_sizes": [1, 1]},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]]},
    **dict.fromkeys(("MobileNetV1", "MobileViT", "MobileViTV2"), _SPREAD),
    "MobileNetV2": {"initializer_range": 0.15},
    "Lilt": {"hidden_size": 96},  # a multiple of 6
    "SqueezeBert": {"embedding_size": 64},
    **dict.fromkeys(("Swin", "Swinv2"), _STAGES),
    "Xmod": {"default_language": "en_XX"},
}
TRANSFORMERS = (
    "Albert Bert BigBird BioGpt Bloom Camembert CodeGen Cohere ConvBert CTRL "
    "Data2VecText Deberta DebertaV2 DistilBert Electra Ernie Esm Falcon FNet Funnel Gemma "
    "Gemma2 Glm GPT2 GPTBigCode GPTNeo GPTNeoX GPTJ Granite Helium LayoutLM Lilt Llama "
    "Longformer Luke Mamba MarkupLM MegatronBert Mistral Mixtral MobileBert ModernBert MPNet "
    "Mpt Nystromformer Olmo Olmo2 OpenAIGPT OPT Persimmon Phi Phi3 Qwen2 Qwen3 "
    "RemBert Roberta RobertaPreLayerNorm RoCBert RoFormer SqueezeBert StableLm Starcoder2 "
    "T5Encoder XGLM XLM XLMRoberta XLMRobertaXL XLNet Xmod Yoso "
    "Apertus Arcee Bart BigBirdPegasus Blenderbot BlenderbotSmall Canine Cohere2 DiffLlama Doge "
    "Ernie4_5 Ernie4_5_Moe Exaone4 FalconMamba Flaubert Gemma3Text Glm4 GptOss GraniteMoe IBert "
    "JetMoe LED Lfm2 LongT5 M2M100 Marian MBart MiniMax ModernBertDecoder Mra MT5 Olmo3 Olmoe "
    "Pegasus Phimoe PLBart Qwen2Moe Qwen3Moe Rwkv SeedOss SmolLM3 Splinter SwitchTransformers T5 "
    "Tapas UMT5 "
    "Beit ConvNext ConvNextV2 Cvt Data2VecVision DeiT Dinov2 Dinov2WithRegisters DPT GLPN Hiera "
    "Levit MobileNetV1 MobileNetV2 MobileViT MobileViTV2 PoolFormer RegNet ResNet Segformer Swin "
    "Swinv2 ViT ViTMAE ViTMSN Yolos "
    "Data2VecAudio Hubert SEW UniSpeech UniSpeechSat Wav2Vec2 WavLM Whisper"
).split()


class Ranking(nn.Module):
    """A model of clicks: bags of sparse features, pairwise products, a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(1000, 32, mode="sum") for _ in range(8)])
        self.dense = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.tower = nn.Sequential(nn.Linear(32 + 36, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.dense(dense)
        rows = torch.stack([x, *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))], 1)
        below = torch.tril_indices(9, 9, -1)
        pairs = (rows @ rows.transpose(1, 2))[:, below[0], below[1]]
        return self.tower(torch.cat([x, pairs], 1)).sigmoid()


class Speech(nn.Module):
    """A recogniser of words: a spectrogram, convolutions, a recurrent layer both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(80, 96, 5, 2, 2), nn.BatchNorm1d(96), nn.GELU(), nn.Conv1d(96, 96, 5, 1, 2)
        )
        self.recurrent = nn.GRU(96, 64, 2, batch_first=True, bidirectional=True)
        self.words = nn.Linear(128, 32)

    def forward(self, spectrum: torch.Tensor) -> torch.Tensor:
        x = self.convolutions(spectrum).transpose(1, 2)
        return self.words(self.recurrent(x)[0]).log_softmax(-1)


OWN = {
    "ranking": lambda: (Ranking(), (torch.randn(64, 13), torch.randint(0, 1000, (64, 8, 4)))),
    "speech": lambda: (Speech(), (torch.randn(2, 80, 400),)),
}
PACKAGES = {
    "timm": TIMM,
    "torchvision": TORCHVISION,
    "transformers": TRANSFORMERS,
    "own": [*OWN],
}


def build(package: str, name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(5)
    if package == "own":
        model, args = OWN[name]()
        return model, args, {}
    if package == "timm":
        from vision_zoo import build as image_model

        model, args = image_model(name, 1)
        return model, args, {}
    if package == "transformers":
        return _transformer(name)
    from vision_zoo import stub_torchvision

    stub_torchvision()
    import torchvision

    builder = torchvision.models.get_model_builder(name)
    # Detectors load a backbone's weights by default.
    untrained = {"weights": None, "weights_backbone": None}
    known = inspect.signature(builder).parameters
    model = builder(**{option: none for option, none in untrained.items() if option in known})
    image = torch.rand(3, 224, 224)
    if name in ("r3d_18", "s3d", "mvit_v2_s"):
        return model, (torch.rand(1, 3, 16, 224 if name != "r3d_18" else 112, 112 * 2),), {}
    if name.startswith("raft"):
        return model, (torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128)), {}
    if "320" in name:
        return model, ([image],), {}
    return model, (image[None],), {}


def _transformer(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    import transformers

    if name == "T5Encoder":
        config = transformers.T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2)
        model: Any = transformers.T5EncoderModel(config)
    else:
        kind = getattr(transformers, f"{name}Config")
        plain = kind()
        sizes: dict[str, Any] = {
            key: size for key, size in SIZES.items() if isinstance(getattr(plain, key, None), int)
        }
        sizes.update(OPTIONS.get(name, {}))
        config = kind(**{key: value for key, value in sizes.items() if value is not None})
        for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(config, token, 1)
        model = getattr(transformers, f"{name}Model")(config)
    return model, (), _transformer_inputs(model)


def _transformer_inputs(model: Any) -> dict[str, Any]:
    """What the model reads first: tokens, images or sound; and tokens of its decoder."""
    config = model.config
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 64)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        frames = [config.num_frames] if hasattr(config, "num_frames") else []
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": torch.randn(2, *frames, channels, height, width)}
    if model.main_input_name == "input_values":
        if hasattr(config, "num_mel_bins"):  # a spectrogram
            return {"input_values": torch.randn(2, config.max_length, config.num_mel_bins)}
        return {"input_values": torch.randn(2, 8000)}
    if model.main_input_name == "input_features":
        bins, length = config.num_mel_bins, 2 * getattr(config, "max_source_positions", 100)
        found = {"input_features": torch.randn(2, bins, length)}
    else:
        found = {"input_ids": torch.randint(3, 100, (2, 24))}
    if config.is_encoder_decoder:
        found["decoder_input_ids"] = torch.randint(3, 100, (2, 8))
    return found


def flat(output: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(
        dict(output) if hasattr(output, "to_tuple") else output
    )
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def difference(found: Any, expected: Any) -> float:
    """Relative to the largest value; infinite where shapes differ."""
    worst, pairs = 0.0, (flat(found), flat(expected))
    if [t.shape for t in pairs[0]] != [t.shape for t in pairs[1]]:
        return float("inf")
    for a, b in zip(*pairs, strict=True):
        if b.numel():
            scale = max(float(b.double().abs().max()), 1e-6)
            worst = max(worst, float((a.double() - b.double()).abs().max()) / scale)
    return worst


class Positional(nn.Module):
    """A model as exporters want it: its tensors by position."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> Any:
        count = len(inputs) - len(self.names)
        named = dict(zip(self.names, inputs[count:], strict=True))
        return flat(self.model(*inputs[:count], **named))[0]


def peers_of(
    model: nn.Module, args: Any, kwargs: dict[str, Any], names: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Calls of each peer that gives eager's first tensor, and why the others do not."""
    from vision_zoo import PEERS

    calls: dict[str, Any] = {}
    failed: dict[str, str] = {}
    inputs = (*args, *kwargs.values())
    with torch.no_grad():
        expected = flat(model(*args, **kwargs))[:1]
        for peer in names:
            try:
                call = PEERS[peer](Positional(model, [*kwargs]).eval(), inputs)
                error = difference(call(), expected)
            except Exception as problem:  # of any library: reported, not timed
                failed[peer] = f"{type(problem).__name__}: {str(problem)[:120]}"
                continue
            if error <= TOLERANCE:
                calls[peer] = call
            else:
                failed[peer] = f"differs by {error:.1e}"
    return calls, failed


def side_by_side(calls: dict[str, Any]) -> dict[str, float]:
    """Median ms of each, called by turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    rounds = 0
    while rounds < 5 or (rounds < 40 and time.perf_counter() - began < 6):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
        rounds += 1
    return {name: statistics.median(found) * 1e3 for name, found in times.items()}


def measure(package: str, name: str, against: list[str]) -> dict[str, Any]:
    """One line."""
    import rm_abstract as rm

    model, args, kwargs = build(package, name)
    model.eval()
    torch.set_num_threads(1)
    peers, failed = peers_of(model, args, kwargs, against)
    rm.init("cpu")
    rm.accelerate(model)
    with torch.no_grad():
        with rm.disabled():
            # The counter asks views of parameters for a gradient's function: there is none here.
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            model.requires_grad_(False)
            with FlopCounterMode(display=False, custom_mapping=_EXPERTS) as counter:
                model(*args, **kwargs)
            for weight in trained:
                weight.requires_grad_()
            expected = model(*args, **kwargs)
            counted = {str(op): n for op, n in counter.get_flop_counts().get("Global", {}).items()}
            repeats = difference(model(*args, **kwargs), expected) == 0.0
        worst = max(difference(model(*args, **kwargs), expected) for _ in range(CALLS))
        ours, theirs = [], []
        while len(ours) < 5 or (len(ours) < 40 and sum(ours) + sum(theirs) < 4):
            ours.append(_timed(model, args, kwargs))
            with rm.disabled():
                theirs.append(_timed(model, args, kwargs))
        beside: dict[str, Any] = {}
        if against:

            def plain(call: Any) -> Any:
                with rm.disabled():
                    return call()

            stock = {"eager": lambda: model(*args, **kwargs), **peers}
            calls = {peer: functools.partial(plain, call) for peer, call in stock.items()}
            calls["ours"] = lambda: model(*args, **kwargs)
            beside = {"ms": side_by_side(calls), "failed": failed}
    record = rm.explain(model).to_dict()["models"][0]
    rows = [record, *record["parts"]] if not record["routed"] else [record]
    entries = [entry for row in rows if row["routed"] for entry in row["entries"]]
    nodes = sum(entry["nodes"] for entry in entries)
    kept = sorted({op for entry in entries for op in entry["kept"]})
    return {
        "served": "whole" if record["routed"] else "parts" if entries else "no",
        "why": [reason["code"] for reason in record["reasons"]],
        "detail": record["reasons"][0]["detail"][:300] if record["reasons"] else "",
        "parts": {p["part"]: p["share"] for p in record["parts"] if p["routed"]},
        "native_nodes": sum(e["native_nodes"] for e in entries) / nodes if nodes else 0.0,
        "native_flops": _native_flops(counted, kept) if record["routed"] else None,
        "kept": kept,
        "difference": worst if repeats else None,  # eager itself gives another result each time
        "eager_ms": min(theirs) * 1e3,
        "speedup": min(theirs) / min(ours),
        "compile_s": record["compile_seconds"],
        **beside,
    }


def _expert_flops(x: Any, w: Any, *_: Any, **__: Any) -> int:
    return int(2 * x[0] * w[-2] * w[-1])


_EXPERTS = {torch.ops.aten._grouped_mm: _expert_flops}  # torch counts none


def _native_flops(counted: dict[str, int], kept: list[str]) -> float:
    """At least this share of the FLOPs that torch counts (products, convolutions, attention): all
    of an operator's count as PyTorch's when one call of it was left to PyTorch."""
    total = sum(counted.values())
    parts = {part for name in kept for part in name.split(".")}
    # As export writes it.
    parts |= {"_grouped_mm"} if "grouped_mm_fallback" in parts else set()
    left = sum(n for op, n in counted.items() if op.split(".")[-1] in parts)
    return 1.0 - left / total if total else 1.0


def _timed(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    started = time.perf_counter()
    model(*args, **kwargs)
    return time.perf_counter() - started


def child(package: str, name: str, core: int | None, against: list[str]) -> dict[str, Any]:
    limit = LIMIT_S * (2 if against else 1)
    command = [] if core is None else ["taskset", "-c", str(core)]
    command += [sys.executable, __file__, "--one", package, name, "--against", ",".join(against)]
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {limit} s"}
    with contextlib.suppress(IndexError, json.JSONDecodeError):
        return dict(json.loads(run.stdout.splitlines()[-1]))
    return {"error": (run.stderr.strip().splitlines() or ["ended without a line"])[-1][:300]}


def summary(lines: list[dict[str, Any]]) -> str:
    built = [line for line in lines if "error" not in line]
    count = {
        kind: sum(line["served"] == kind for line in built) for kind in ("whole", "parts", "no")
    }
    compared = [line for line in built if line["difference"] is not None]
    wrong = [line["model"] for line in compared if line["difference"] > TOLERANCE]
    speeds = [line["speedup"] for line in built]
    text = (
        f"{len(built)} of {len(lines)} models ran: {count['whole']} served whole, "
        f"{count['parts']} in parts, {count['no']} not; of {len(compared)} that repeat their own "
        f"results {len(wrong)} wrong {wrong}"
    )
    if speeds:
        shares = [line["native_flops"] for line in built if line["native_flops"] is not None]
        slow = [line["model"] for line in built if line["speedup"] < 0.97]
        text += (
            f"; native FLOPs, mean of the {len(shares)} where they are known: "
            f"{statistics.mean(shares) if shares else 0.0:.3f}; speed-up median "
            f"{statistics.median(speeds):.2f}, least {min(speeds):.2f}; below 0.97: {slow}"
        )
    return text + beside_summary([line for line in built if len(line.get("ms", {})) > 2])


def beside_summary(lines: list[dict[str, Any]]) -> str:
    """Of the models that at least one peer ran."""
    if not lines:
        return ""
    text = f"; {len(lines)} models with peers:"
    stock = ("ours", "eager")
    for peer in sorted({name for line in lines for name in line["ms"]} - set(stock)):
        ratios = [line["ms"][peer] / line["ms"]["ours"] for line in lines if peer in line["ms"]]
        faster = sum(ratio < 1 for ratio in ratios)
        text += f" {peer} ran {len(ratios)}, median {statistics.median(ratios):.2f} x our time"
        text += f", {faster} faster than ours;"
    best = {
        line["model"]: min(ms for name, ms in line["ms"].items() if name not in stock)
        / line["ms"]["ours"]
        for line in lines
    }
    behind = {name: round(ratio, 2) for name, ratio in best.items() if ratio < 1}
    text += f" the best peer: median {statistics.median(best.values()):.2f} x our time"
    return text + f", faster in {len(behind)}: {behind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--one", nargs=2, metavar=("PACKAGE", "MODEL"), help=argparse.SUPPRESS)
    parser.add_argument("--package", default=",".join(PACKAGES))
    parser.add_argument("--every", type=int, default=1, help="only every n-th model of the lists")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--against", default="", help="peers: compile,onnxruntime,openvino")
    chosen = parser.parse_args()
    against = [peer for peer in chosen.against.split(",") if peer]
    if chosen.one:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(*chosen.one, against)))
        return
    if chosen.out is None:
        parser.error("OUT is missing")
    text = chosen.out.read_text() if chosen.out.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    known = {line["model"] for line in lines}
    end = time.monotonic() + chosen.seconds
    cores = sorted(os.sched_getaffinity(0))[: chosen.jobs] if chosen.jobs > 1 else [None]
    free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    for core in cores:
        free.put(core)

    def measured(package: str, name: str) -> None:
        if time.monotonic() > end:
            return
        core = free.get()
        line = {"model": f"{package}/{name}", **child(package, name, core, against)}
        free.put(core)
        lines.append(line)
        with chosen.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    wanted = [(p, n) for p in chosen.package.split(",") for n in PACKAGES[p][:: chosen.every]]
    with concurrent.futures.ThreadPoolExecutor(len(cores)) as pool:
        left = [(p, n) for p, n in wanted if f"{p}/{n}" not in known]
        for done in [pool.submit(measured, p, n) for p, n in left]:
            done.result()
    print(summary(lines))


if __name__ == "__main__":
    main()
