"""`rm-abstract compile MODEL_DIR`: fills the compile cache ahead of time, offline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from rm_abstract.ahead import compile_ahead
from rm_abstract.report import Report

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


def _compile_file(path: Path, device: str | None, as_json: bool) -> None:
    """One program for all sizes; without one, what a call has to say first."""
    from rm_abstract import api

    made = api.compile(path, device=device or "cpu")
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
def compile_command(as_json: bool, **sizes: Any) -> None:
    """Compile a transformers model folder into the cache for the given sizes, or an ONNX file."""
    if sizes["model_dir"].is_file():
        return _compile_file(sizes["model_dir"], sizes["device"], as_json)
    report: Report = compile_ahead(**sizes)
    click.echo(report.to_json() if as_json else str(report))
    if report.routed == 0:
        raise click.ClickException(f"nothing was compiled: {report.why_not()}")
