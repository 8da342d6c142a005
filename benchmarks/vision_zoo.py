"""Models of random weights: ours, eager, torch.compile, ONNX Runtime and OpenVINO.

    python benchmarks/vision_zoo.py --models resnet50,convnext_tiny --against compile,openvino
    python benchmarks/vision_zoo.py --batch 1,8 --jobs 7 --out rows.jsonl

Names are timm's, or one of ZOO below (diffusers, transformers); a package is needed only for the
models asked for. One process a model and batch, `--jobs` of them at a time, each with the cores of
its own that its threads need. All candidates are checked against eager (1e-4 of the largest
value), then timed in interleaved rounds (rm_abstract.bench.method) together with a GEMM probe.
Prints one JSON line a model and a table; a candidate that fails or differs is reported, not timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import copy
import io
import json
import os
import queue
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import rm_abstract as rm
from rm_abstract.bench import method, probes

MODELS = (
    "resnet50,efficientnet_b0,mobilenetv3_large_100,convnext_tiny,vit_base_patch16_224,"
    "swin_tiny_patch4_window7_224,bert_base,minilm,unet_small"
)
TOLERANCE = 1e-4
Candidate = Callable[[], Any]


def stub_torchvision() -> None:
    """timm imports torchvision's transforms; a build for other devices lacks its operators."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        sys.modules.pop("torchvision", None)
        library = torch.library.Library("torchvision", "DEF")
        for name in (
            "nms roi_align roi_pool ps_roi_align ps_roi_pool deform_conv2d _roi_align_backward "
            "_roi_pool_backward _ps_roi_align_backward _ps_roi_pool_backward "
            "_deform_conv2d_backward qnms qroi_align"
        ).split():
            library.define(f"{name}(Tensor a) -> Tensor")
        stub_torchvision.library = library  # type: ignore[attr-defined]  # kept alive


Built = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]


def unet_small(batch: int) -> Built:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=64,
        block_out_channels=(64, 128, 128, 256),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )
    return model, (torch.randn(batch, 3, 64, 64), torch.tensor([7]))


def encoder(batch: int, **sizes: int) -> Built:
    """A BERT whose rows have 128 tokens, none of them padding."""
    from transformers import BertConfig, BertModel

    config = BertConfig(return_dict=False, **sizes)
    model = BertModel(config, add_pooling_layer=False)
    ids = torch.randint(0, config.vocab_size, (batch, 128))
    return model, (ids, torch.ones(batch, 128, dtype=torch.long))


def minilm(batch: int) -> Built:
    return encoder(
        batch, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )


ZOO: dict[str, Callable[[int], Built]] = {
    "unet_small": unet_small,
    "bert_base": encoder,
    "minilm": minilm,
}


def build(name: str, batch: int) -> Built:
    if name in ZOO:
        return ZOO[name](batch)
    stub_torchvision()
    import timm

    model = timm.create_model(name)
    size = model.default_cfg["input_size"]
    return model, (torch.randn(batch, *size),)


def liven(model: torch.nn.Module) -> None:
    """Norms as after training: statistics and scales that are not 0 and 1."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d) and module.running_mean is not None:
            torch.nn.init.normal_(module.running_mean, 0, 0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)


def first_tensor(output: Any) -> torch.Tensor:
    while not isinstance(output, torch.Tensor):
        output = output[0]
    return output


class Whole(torch.nn.Module):
    """A model as exporters want it: one tensor as its output."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return first_tensor(self.model(*inputs))


def compiled(model: torch.nn.Module, inputs: Any) -> Candidate:
    import torch._inductor.config as inductor

    inductor.freezing = True  # its best CPU setting: weights are folded and prepacked
    module = torch.compile(copy.deepcopy(model))
    return lambda: module(*inputs)


def onnxruntime(model: torch.nn.Module, inputs: Any) -> Candidate:
    import onnxruntime as ort

    buffer = io.BytesIO()
    names = [f"x{i}" for i in range(len(inputs))]
    torch.onnx.export(
        Whole(model).eval(), inputs, buffer, dynamo=False, opset_version=17, input_names=names
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(buffer.getvalue(), options, ["CPUExecutionProvider"])
    feeds = {n: x.numpy() for n, x in zip(names, inputs, strict=True)}
    return lambda: torch.from_numpy(session.run(None, feeds)[0])


def openvino(model: torch.nn.Module, inputs: Any) -> Candidate:
    import openvino as ov

    shapes = [tuple(x.shape) for x in inputs]
    program = ov.convert_model(Whole(model).eval(), example_input=inputs, input=shapes)
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    request = ov.Core().compile_model(program, "CPU", settings).create_infer_request()
    arrays = [x.numpy() for x in inputs]

    def call() -> torch.Tensor:
        request.infer(arrays)
        return torch.from_numpy(request.get_output_tensor(0).data)

    return call


PEERS = {"compile": compiled, "onnxruntime": onnxruntime, "openvino": openvino}


def one(name: str, batch: int, against: list[str], rounds: int) -> dict[str, Any]:
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    model, inputs = build(name, batch)
    model = model.eval()
    liven(model)
    row: dict[str, Any] = {"model": name, "batch": batch, "failed": {}}
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            expected = first_tensor(model(*inputs)).clone()
        row["gflop"] = counter.get_total_flops() / 1e9
        candidates: dict[str, Candidate] = {"eager": lambda: model(*inputs)}
        for peer in against:
            try:
                candidates[peer] = PEERS[peer](model, inputs)
                candidates[peer]()
            except Exception as error:  # of any library: reported, not timed
                row["failed"][peer] = f"{type(error).__name__}: {str(error)[:120]}"
                candidates.pop(peer, None)
        rm.init("cpu")
        module = copy.deepcopy(model)
        rm.accelerate(module)
        start = time.perf_counter()
        module(*inputs)
        row["first_call_s"] = round(time.perf_counter() - start, 1)
        deadline = time.perf_counter() + 120  # a long capture goes on in the background
        while not rm.explain(module).routed and time.perf_counter() < deadline:
            module(*inputs)
        candidates["ours"] = lambda: module(*inputs)
        for peer, call in list(candidates.items()):
            error = (first_tensor(call()) - expected).abs().max() / expected.abs().max()
            if peer == "ours":
                row["error"] = float(error)
            if not float(error) <= TOLERANCE:
                row["failed"][peer] = f"differs by {float(error):.1e}"
                candidates.pop(peer)
        if "ours" not in candidates:
            raise SystemExit(f"{name}: ours {row['failed']['ours']}")
        report = rm.explain(module)
        row["routed"] = report.routed > 0
        row["native"] = round(report.native_share, 3)
        row["kept"] = {
            k: v for m in report.models for e in m["entries"] for k, v in e["kept"].items()
        }
        bounds = probes.gemm_probes(torch.float32, 1024)
        timings = method.interleave(
            {**candidates, **{p.name: p.call for p in bounds}}, rounds=rounds, round_seconds=0.2
        )
    row["ms"] = {k: round(timings[k].estimate.median * 1e3, 2) for k in candidates}
    row["best_ms"] = {k: round(min(timings[k].rounds) * 1e3, 2) for k in candidates}
    rate = max(p.amount / min(timings[p.name].rounds) for p in bounds)
    row["probe_gflop_s"] = round(rate / 1e9)
    row["share"] = {
        k: round(row["gflop"] * 1e9 / min(timings[k].rounds) / rate, 3) for k in candidates
    }
    row["over_eager"] = round(timings["ours"].speedup_over(timings["eager"]).median, 2)
    return row


def table(rows: list[dict[str, Any]], against: list[str]) -> str:
    names = ["eager", *against, "ours"]
    titles = " | ".join(f"{n} ms" for n in names)
    head = [f"| model | batch | {titles} | eager ÷ ours | native |"]
    head.append("|" + "---|" * (len(names) + 4))
    for row in rows:
        cells = [f"{row['ms'][n]:.1f}" if n in row["ms"] else "-" for n in names]
        end = f"{row['over_eager']:.2f} | {row['native']:.2f} |"
        head.append(f"| {row['model']} | {row['batch']} | {' | '.join(cells)} | {end}")
    return "\n".join(head)


def in_processes(given: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a model and batch; each job has cores of its own where several run at a time."""
    cores = sorted(os.sched_getaffinity(0))
    free: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for job in range(given.jobs):
        mine = cores[job * given.threads : (job + 1) * given.threads]
        free.put(mine if given.jobs > 1 else cores)

    def row(name: str, batch: int) -> dict[str, Any] | None:
        mine = free.get()
        pin = f"import os; os.sched_setaffinity(0, {mine}); os.execv({sys.executable!r}, {{}})"
        arguments = [sys.executable, *sys.argv, "--one", name, "--batch", str(batch)]
        try:
            child = subprocess.run(
                [sys.executable, "-c", pin.format(arguments)],
                capture_output=True,
                text=True,
                timeout=given.seconds,
            )
        except subprocess.TimeoutExpired:
            print(f"{name} {batch}: more than {given.seconds} s", flush=True)
            return None
        finally:
            free.put(mine)
        lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
        if not lines:
            print(f"{name} {batch}: {child.stderr.strip().splitlines()[-1:]}", flush=True)
            return None
        print(lines[-1], flush=True)
        if given.out:
            with open(given.out, "a") as out:
                out.write(lines[-1] + "\n")
        found: dict[str, Any] = json.loads(lines[-1])
        return found

    wanted = [(n, int(b)) for b in given.batch.split(",") for n in given.models.split(",")]
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        rows = [f.result() for f in [pool.submit(row, n, b) for n, b in reversed(wanted)]]
    return [r for r in reversed(rows) if r]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", default=MODELS)
    arguments.add_argument("--batch", default="1", help="one or more, by commas")
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--against", default="compile,onnxruntime,openvino")
    arguments.add_argument("--jobs", type=int, default=1, help="processes at a time")
    arguments.add_argument("--seconds", type=int, default=1200, help="a process, at most")
    arguments.add_argument("--out", help="a file that gets each line at once")
    arguments.add_argument("--one", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    against = [a for a in given.against.split(",") if a]
    if given.one:
        torch.set_num_threads(given.threads)
        os.environ["RM_WHEN_SLOWER"] = "compiled"  # what is timed is the program
        warnings.simplefilter("ignore")
        print(json.dumps(one(given.one, int(given.batch), against, given.rounds)))
        return
    print(table(in_processes(given), against))


if __name__ == "__main__":
    main()
