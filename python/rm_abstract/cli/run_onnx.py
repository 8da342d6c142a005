"""`rm-abstract run MODEL.onnx --input NAME=FILE.npy`: one call of an ONNX file, compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


def _arrays(context: click.Context, option: click.Parameter, pairs: tuple[str, ...]) -> Any:
    import numpy as np

    out = {}
    for pair in pairs:
        name, equals, file = pair.partition("=")
        if not equals or not Path(file).is_file():
            raise click.BadParameter(f"expected NAME=FILE.npy and that file, got {pair!r}")
        try:
            out[name] = np.load(file, allow_pickle=False)
        except ValueError as error:
            raise click.BadParameter(f"expected an array of numpy in {file!r}: {error}") from None
    return out


@click.command("run")
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--input", "inputs", multiple=True, callback=_arrays, help="NAME=FILE.npy")
@click.option(
    "--output-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="write each output to N.npy here, in the order of the outputs",
)
def run_onnx(model: Path, inputs: dict[str, Any], output_dir: Path | None) -> None:
    """Compile an ONNX file for the CPU, call it once, and print its outputs' types."""
    import numpy as np

    from rm_abstract import api

    executable = api.compile(model, device="cpu")
    results = executable(**inputs)
    for number, (name, result) in enumerate(zip(executable.output_names, results, strict=True)):
        array = np.asarray(result)
        click.echo(f"{name}: {array.dtype}{list(array.shape)}")
        if output_dir is not None:
            np.save(output_dir / f"{number}.npy", array)
