"""The first call of 30 image models: how long it blocks, and whether the model gains afterwards.

Every model runs in two processes over one empty cache. The first captures; the second must capture
nothing, not even what failed. Afterwards calls alternate with eager's. torchvision and timm are
needed; a torchvision whose operators do not load beside this torch is used without them.

    python benchmarks/first_call.py [--only swin] [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TORCHVISION = [
    *("resnet50", "densenet121", "swin_v2_t", "mvit_v2_s", "efficientnet_b0"),
    *("mobilenet_v3_large", "regnet_y_400mf", "convnext_tiny", "vit_b_16", "maxvit_t"),
    *("shufflenet_v2_x1_0", "googlenet", "squeezenet1_1", "mnasnet1_0", "vgg11"),
]
TIMM = [
    *("tf_efficientnetv2_b0", "maxvit_tiny_rw_224", "resnet18", "vit_tiny_patch16_224"),
    *("swin_tiny_patch4_window7_224", "mixer_s32_224", "coatnet_nano_rw_224", "levit_128s"),
    *("poolformer_s12", "ghostnet_100", "edgenext_xx_small", "mobilevitv2_050"),
    *("cait_xxs24_224", "hrnet_w18_small", "dpn68"),
]
SETTLE = 50  # calls
MODELS = [f"torchvision/{name}" for name in TORCHVISION] + [f"timm/{name}" for name in TIMM]


def build(name: str) -> tuple[Any, Any]:
    """(the model, one batch of one image)."""
    import torch

    torch.manual_seed(0)
    library, _, kind = name.partition("/")
    without_operators()
    if library == "timm":
        import timm

        model = timm.create_model(kind)
        size = model.default_cfg["input_size"]
    else:
        import torchvision

        model = torchvision.models.get_model(kind)
        size = (3, 16, 224, 224) if kind.startswith("mvit") else (3, 224, 224)
    return model.eval(), torch.randn(1, *size)


def without_operators() -> None:
    """Declares what torchvision describes at its import and has not loaded; no model calls it."""
    import torch

    try:
        import torchvision  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        # Its operators are for another torch: what it misses is declared below.
        sys.modules.pop("torchvision", None)
    else:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


_kept: list[object] = []  # a library's declarations end with it


def measure(name: str, rounds: int) -> dict[str, Any]:
    import torch

    import rm_abstract as rm

    model, image = build(name)
    rm.init("cpu")
    rm.accelerate(model)

    def served() -> Any:
        return model(image)

    def eager() -> Any:
        with rm.disabled():
            return model(image)

    with torch.no_grad():
        first, cpu = time.perf_counter(), time.thread_time()
        served()
        first, cpu = time.perf_counter() - first, time.thread_time() - cpu
        captured = "rm_abstract.capture.export" in sys.modules
        for _ in range(SETTLE):  # by then a slower program is left
            served()
        eager()
        times: dict[Callable[[], Any], list[float]] = {eager: [], served: []}
        for _ in range(rounds):
            for call, found in times.items():
                start = time.perf_counter()
                call()
                found.append(time.perf_counter() - start)
    report = rm.explain(model).to_dict()["models"]
    reasons = [] if not report else [r["code"] for r in report[0]["reasons"]]
    return {
        "first": first,
        "cpu": cpu,
        "captured": captured,
        "eager_ms": statistics.median(times[eager]) * 1e3,
        "served_ms": statistics.median(times[served]) * 1e3,
        "routed": report[0]["routed"] if report else 0,
        "reasons": [code for code in reasons if code != "RM108"],
    }


def in_a_process(name: str, rounds: int, cache: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name, "--rounds", str(rounds)]
    env = {**os.environ, "RM_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name}: {done.stderr[-1500:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="models whose names contain this")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.one, asked.rounds)))
        return
    print(
        "| model | first call s (CPU) | second process s, captures | eager → served ms | reasons |"
    )
    print("|---|---|---|---|---|")
    firsts, ratios, again = [], [], 0
    with tempfile.TemporaryDirectory() as work:
        for name in [name for name in MODELS if asked.only in name]:
            cold, warm = (in_a_process(name, asked.rounds, Path(work)) for _ in range(2))
            ratio = warm["served_ms"] / warm["eager_ms"]
            firsts.append(cold["first"])
            ratios.append(ratio)
            again += warm["captured"]
            print(
                f"| {name} | {cold['first']:.2f} ({cold['cpu']:.2f}) "
                f"| {warm['first']:.2f}, {int(warm['captured'])} "
                f"| {warm['eager_ms']:.1f} → {warm['served_ms']:.1f} ({1 / ratio:.2f}x) "
                f"| {' '.join(warm['reasons'])} |",
                flush=True,
            )
    print(
        f"\n{len(firsts)} models: first call median {statistics.median(firsts):.2f} s, most "
        f"{max(firsts):.2f} s; slower than eager by more than 5 %: "
        f"{sum(r > 1.05 for r in ratios)}; captured again: {again}"
    )


if __name__ == "__main__":
    main()
