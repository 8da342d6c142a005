"""`rm-abstract compile MODEL_DIR`: fills the compile cache ahead of time, offline."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from rm_abstract.ahead import compile_ahead
from rm_abstract.report import Report
from rm_abstract.report_page import Drawn

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _integers(context: click.Context, option: click.Parameter, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"expected positive integers such as 1,4,8, got {text!r}")
    return numbers


def ahead_options(command: _Command) -> _Command:
    """What `compile` and `cache warm` ask for."""
    options = [
        click.argument("model_dir", type=click.Path(exists=True, path_type=Path)),
        click.option("--device", help="device to compile for (default: as init() chooses)"),
        click.option("--batch-size", default="1", callback=_integers, help="sizes, such as 1,4,8"),
        click.option(
            "--sequence-length", default="16", callback=_integers, help="lengths, such as 16,128"
        ),
        click.option("--auto-class", help="transformers class, such as AutoModelForCausalLM"),
        click.option("--json", "as_json", is_flag=True, help="print the report as JSON"),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _write_page(path: Path, model: Path, programs: Sequence[Drawn]) -> None:
    """The page, with the rates of this machine, which are measured here (about a second)."""
    import torch

    from rm_abstract.bench import method, probes
    from rm_abstract.report_page import Rates, page

    def best(of: Sequence[probes.Probe]) -> float:
        return max(probe.amount / method.time_calls(probe.call, 0.05) for probe in of)

    kinds = {"f32": torch.float32, "bf16": torch.bfloat16}
    products = {name: best(probes.gemm_probes(kind, 1024)) for name, kind in kinds.items()}
    rates = Rates(best(probes.read_probes()), products)
    path.write_text(page(f"rm-abstract: {model.name}", programs, rates), encoding="utf-8")


def _compile_file(path: Path, as_json: bool, drawing: Path | None, sizes: dict[str, Any]) -> None:
    """One program for all sizes; without one, what a call has to say first."""
    from rm_abstract import api

    made = api.compile(path, device=sizes["device"] or "cpu")
    if drawing is not None:
        batch, length = sizes["batch_size"][0], sizes["sequence_length"][0]
        _write_page(drawing, path, [made.drawn(batch, length)])
    waits = made.waits_for
    if as_json:
        row = {"inputs": made.input_names, "outputs": made.output_names, "waits_for": waits}
        click.echo(json.dumps(row))
        return
    click.echo(f"inputs: {', '.join(made.input_names)}; outputs: {', '.join(made.output_names)}")
    click.echo(f"compiled by its first call, for {', '.join(waits)}" if waits else "compiled")


@click.command("compile")
@ahead_options
@click.option("--precision", help="of the weights of products: auto, int8, int4")
@click.option("--group-size", help="weights that share a scale: auto, 32, 64, 128")
@click.option("--activations", help="what few rows of them are rounded to: auto, int8, int16")
@click.option(
    "--quality",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="a text: print the perplexity on it in the model's own precision and compiled",
)
@click.option(
    "--report",
    "drawing",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="an HTML file: the graph before and after, with time, bytes and share of the bound",
)
def compile_command(as_json: bool, drawing: Path | None, **sizes: Any) -> None:
    """Compile a transformers model folder into the cache for the given sizes, or an ONNX file."""
    if sizes["model_dir"].is_file():
        return _compile_file(sizes["model_dir"], as_json, drawing, sizes)
    if drawing is not None:
        folder, file = sizes["model_dir"], drawing
        sizes["draw"] = lambda profile: _write_page(file, folder, profile.drawn())
    report: Report = compile_ahead(**sizes)
    click.echo(report.to_json() if as_json else str(report))
    if report.routed == 0:
        raise click.ClickException(f"nothing was compiled: {report.why_not()}")
