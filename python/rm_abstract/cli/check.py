"""`rm-abstract check MODEL_DIR --device sim`: would this device run the model? Nothing is compiled
for the device and none need be there: its plugin says what it supports, operator by operator.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import click

from rm_abstract.base.errors import CompileError, DeviceUnavailableError, from_core


@click.command()
@click.argument("model_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--device", required=True, help="device to check for, such as sim, rbln, furiosa")
@click.option("--batch-size", default=1, type=click.IntRange(1), help="rows of the example call")
@click.option("--sequence-length", default=16, type=click.IntRange(2), help="its tokens")
@click.option("--auto-class", default=None, help="transformers class, such as AutoModelForCausalLM")
@click.option("--json", "as_json", is_flag=True, help="print the report as JSON")
def check(
    model_dir: Path,
    device: str,
    batch_size: int,
    sequence_length: int,
    auto_class: str | None,
    as_json: bool,
) -> None:
    """Which parts of a model a device can run, and why not the rest."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # the folder has everything: nothing is fetched
    from rm_abstract.ahead import example_inputs, load_model

    model = load_model(model_dir, auto_class)
    report = examine(model, device, example_inputs(model, batch_size, sequence_length))
    click.echo(json.dumps(report, indent=2) if as_json else _text(report))
    if not report["device_nodes"]:
        raise SystemExit(1)


def examine(module: Any, device: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The partition of one call of a module. Raises CompileError, DeviceUnavailableError."""
    from rm_abstract import _core
    from rm_abstract.capture.export import capture
    from rm_abstract.device import load_plugins
    from rm_abstract.engines.buckets import Buckets, InputRole
    from rm_abstract.engines.device_parts import support_of

    load_plugins(os.environ.get("RM_BACKEND_PATH", ""))
    kind = str(_core.control.parse_device(device)["kind"])
    rows = {row["name"]: row for row in _core.backend.backends()}
    if kind not in rows:
        raise DeviceUnavailableError(
            f"[check] expected a plugin for {kind}, got {', '.join(sorted(rows))}; try "
            "rm-abstract backends",
            code="RM401",
        )
    if rows[kind]["kernels"]:
        raise CompileError(
            f"[check] expected a device that compiles whole programs, got {kind}, which runs "
            "operators one by one; try rm-abstract compile",
            code="RM304",
        )
    try:
        captured = capture(module, (), inputs)
        ir = _core.ir.canonical(captured.ir)
        shapes = [value.shape for value in inputs.values()]
        buckets = Buckets(captured.input_dims, [InputRole(name) for name in inputs])
        static = _core.ir.substitute(ir, buckets.sizes_of(shapes))
        support = support_of(kind, 0, static)
    except _core.CoreError as error:
        raise from_core(error, CompileError) from error
    return {
        "model": type(module).__name__,
        "device": kind,
        "nodes": support.nodes,
        "device_nodes": support.device_nodes,
        "parts": [
            {"runs_on": kind if part["on_device"] else "cpu", "nodes": len(part["nodes"])}
            for part in support.parts
        ],
        "kept_on_cpu": dict(Counter(support.kept).most_common()),
    }


def _text(report: dict[str, Any]) -> str:
    share = report["device_nodes"] / report["nodes"] if report["nodes"] else 0.0
    lines = [
        f"{report['model']} on {report['device']}: {report['device_nodes']} of {report['nodes']} "
        f"nodes ({share:.1%}) in {len(report['parts'])} parts"
    ]
    for number, part in enumerate(report["parts"]):
        lines.append(f"  part {number}: {part['nodes']} nodes on {part['runs_on']}")
    lines += [f"  on the cpu: {count} x {why}" for why, count in report["kept_on_cpu"].items()]
    if not report["device_nodes"]:
        lines.append("  nothing would run on this device")
    return "\n".join(lines)
