"""`rm-abstract check MODEL_DIR --device sim`: would this device run the model? None need be there:
its plugin says what it supports, operator by operator. With --compile the device's compiler says it
of the whole parts.
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
@click.option(
    "--compile",
    "compiles",
    is_flag=True,
    help="also compile its parts with the device's own compiler; nothing is kept",
)
@click.option("--json", "as_json", is_flag=True, help="print the report as JSON")
def check(
    model_dir: Path,
    device: str,
    batch_size: int,
    sequence_length: int,
    auto_class: str | None,
    compiles: bool,
    as_json: bool,
) -> None:
    """Which parts of a model a device can run, and why not the rest."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # the folder has everything: nothing is fetched
    from rm_abstract.ahead import example_inputs, load_model

    model = load_model(model_dir, auto_class)
    inputs = example_inputs(model, batch_size, sequence_length)
    report = examine(model, device, inputs, compiles)
    click.echo(json.dumps(report, indent=2) if as_json else _text(report))
    failed = [part for part in report["parts"] if part.get("error")]
    if failed or not report["device_nodes"]:
        raise SystemExit(1)


def examine(
    module: Any, device: str, inputs: dict[str, Any], compiles: bool = False
) -> dict[str, Any]:
    """The partition of one call of a module, its parts compiled where that is asked for. Raises
    CompileError, DeviceUnavailableError."""
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
    parts = [
        {"runs_on": kind if part["on_device"] else "cpu", "nodes": len(part["nodes"])}
        for part in support.parts
    ]
    if compiles:
        for row, compiled in zip(parts, _compiled(kind, module, captured, support), strict=True):
            row.update(compiled)
    report = {
        "model": type(module).__name__,
        "device": kind,
        "nodes": support.nodes,
        "device_nodes": support.device_nodes,
        "parts": parts,
        "memory": _memory(kind, support),
        "kept_on_cpu": dict(Counter(support.kept).most_common()),
    }
    if kind == "furiosa" and getattr(module, "can_generate", lambda: False)():
        report["generation"] = _furiosa_llm(module)
    return report


def _furiosa_llm(module: Any) -> dict[str, str]:
    """What the builder of furiosa-llm says of a decoder; ``why_not`` is empty when it builds it."""
    from rm_abstract.vendors.furiosa import llm
    from rm_abstract.worker.interpreter import interpreter

    python = interpreter("furiosa")
    if not llm.program(python):
        why = f"not asked: no fxb beside {python}; try {python} -m pip install furiosa-llm"
        return {"engine": llm.PACKAGE, "why_not": why}
    config = {**module.config.to_dict(), "architectures": [type(module).__name__]}
    longest = int(config.get("max_position_embeddings") or llm.LONGEST)
    answer = llm.dry_run(python, config, min(longest, llm.LONGEST))
    return {"engine": llm.PACKAGE, "why_not": answer.why}


def _memory(kind: str, support: Any) -> dict[str, int]:
    """Bytes the device's parts need, estimated from their programs, and those a device has (0: not
    known)."""
    from rm_abstract import _core
    from rm_abstract.vendors.environments import a_device_of
    from rm_abstract.worker import ir_memory

    texts = [part["text"] for part in support.parts if part["on_device"]]
    with a_device_of(kind):
        (row,) = (row for row in _core.backend.backends() if row["name"] == kind)
        has = int(row["devices"][0]["memory_bytes"]) if row["devices"] else 0
    values = max((ir_memory.most_at_once(text) for text in texts), default=0)
    return {"weights": ir_memory.weights(texts), "values": values, "device": has}


def _compiled(kind: str, module: Any, captured: Any, support: Any) -> list[dict[str, Any]]:
    """What the device's compiler made of each part, {} of the host's. One of the vendor's devices
    is made up where there is none."""
    import time

    from rm_abstract import _core
    from rm_abstract.base import config
    from rm_abstract.engines.module_weights import ModuleWeights
    from rm_abstract.vendors.environments import a_device_of
    from rm_abstract.worker import ir_text, onnx_program
    from rm_abstract.worker.pool import WorkerPool
    from rm_abstract.worker.shared_tensors import weights_block

    settings = config.resolve({})
    weights = ModuleWeights(lambda: module).of(captured)
    found: list[dict[str, Any]] = []
    with a_device_of(kind):
        (row,) = (row for row in _core.backend.backends() if row["name"] == kind)
        if not row["devices"]:
            raise DeviceUnavailableError(f"[check] {row['reason']}", code=row["code"] or "RM401")
        takes_onnx = dict(row["devices"][0]["properties"]).get("program_format") == "onnx"
        try:
            fingerprint = bytes(_core.backend.fingerprint(kind, 0))
        except _core.CoreError as error:
            raise from_core(error, DeviceUnavailableError) from None
        pool = WorkerPool(kind, fingerprint, settings.text("worker_log_dir"))
        try:
            for part in support.parts:
                if not part["on_device"]:
                    found.append({})
                    continue
                text, started = part["text"], time.monotonic()
                names = ir_text.parse(text).weights.values()
                mine = {name: weights[name] for name in names}
                code = onnx_program.to_onnx(text, mine) if takes_onnx else text.encode()
                try:
                    data = pool.worker("compile").compile(
                        0, code, [], weights_block(mine), _silent,
                        float(settings.text("timeout_s")), float(settings.text("stall_timeout_s")),
                    )  # fmt: skip
                except _core.CoreError as error:
                    found.append({"error": f"{error.reason} {error}"})
                else:
                    seconds = round(time.monotonic() - started, 1)
                    found.append({"compiled_bytes": len(data), "compiled_s": seconds})
        finally:
            pool.close()
    return found


def _silent(fraction: float, stage: str) -> None:
    """Progress nobody looks at."""


def _memory_line(memory: dict[str, int]) -> str:
    needed = memory["weights"] + memory["values"]
    line = (
        f"  memory, estimated: {memory['weights'] / (1 << 20):,.1f} MiB of weights and at most "
        f"{memory['values'] / (1 << 20):,.1f} MiB of values at a time for this call"
    )
    if not memory["device"]:
        return line
    fits = "" if needed <= memory["device"] else ": it does not fit"
    return f"{line}; the device has {memory['device'] / (1 << 30):,.0f} GiB{fits}"


def _text(report: dict[str, Any]) -> str:
    share = report["device_nodes"] / report["nodes"] if report["nodes"] else 0.0
    lines = [
        f"{report['model']} on {report['device']}: {report['device_nodes']} of {report['nodes']} "
        f"nodes ({share:.1%}) in {len(report['parts'])} parts"
    ]
    for number, part in enumerate(report["parts"]):
        line = f"  part {number}: {part['nodes']} nodes on {part['runs_on']}"
        if "compiled_bytes" in part:
            line += f", compiled in {part['compiled_s']} s to {part['compiled_bytes']:,} bytes"
        lines.append(line + (f": {part['error']}" if "error" in part else ""))
    if report["device_nodes"]:
        lines.append(_memory_line(report["memory"]))
    if "generation" in report:
        engine, why = report["generation"]["engine"], report["generation"]["why_not"]
        lines.append(f"  generation by {engine}: " + (why or "it builds this model"))
    lines += [f"  on the cpu: {count} x {why}" for why, count in report["kept_on_cpu"].items()]
    if not report["device_nodes"]:
        lines.append("  nothing would run on this device")
    return "\n".join(lines)
