"""`rm-abstract compile MODEL_DIR`: fills the compile cache ahead of time, offline."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click


def _integers(context: click.Context, option: click.Parameter, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"expected positive integers such as 1,4,8, got {text!r}")
    return numbers


@click.command("compile")
@click.argument("model_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--device", default=None, help="device to compile for (default: as init() chooses)")
@click.option("--batch-size", default="1", callback=_integers, help="sizes, such as 1,4,8")
@click.option("--sequence-length", default="16", callback=_integers, help="lengths, such as 16,128")
@click.option("--auto-class", default=None, help="transformers class, such as AutoModelForCausalLM")
@click.option("--json", "as_json", is_flag=True, help="print the report as JSON")
def compile_command(
    model_dir: Path,
    device: str | None,
    batch_size: list[int],
    sequence_length: list[int],
    auto_class: str | None,
    as_json: bool,
) -> None:
    """Compile a transformers model folder into the cache for the given sizes."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # the folder has everything: nothing is fetched
    import rm_abstract

    rm_abstract.init(device, fallback="error:capture,compile,device,correctness")
    model = _load(model_dir, auto_class)
    for batch in batch_size:
        for length in sequence_length:
            # twice: the first call of a new artefact is served by the original
            for _ in range(2):
                _call(model, batch, length)
    report = rm_abstract.explain(model)
    click.echo(report.to_json() if as_json else str(report))
    if report.routed == 0:
        reasons = [reason for record in report.models for reason in record["reasons"]]
        found = ", ".join(f"{reason['code']} {reason['detail']}" for reason in reasons)
        raise click.ClickException(f"nothing was compiled: {found or 'no model was armed'}")


def _load(model_dir: Path, auto_class: str | None) -> Any:
    import transformers

    name = auto_class or _class_of(model_dir)
    loader = getattr(transformers, name, None)
    if loader is None:
        raise click.BadParameter(f"transformers has no class {name!r}", param_hint="--auto-class")
    return loader.from_pretrained(str(model_dir)).eval()


def _class_of(model_dir: Path) -> str:
    """The architecture the folder's config names, else AutoModel."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    architectures = config.get("architectures") or ["AutoModel"]
    return str(architectures[0])


def _call(model: Any, batch: int, length: int) -> None:
    """One forward on inputs of the model's own kind; values do not matter to a plan."""
    import torch

    with torch.no_grad():
        if model.main_input_name == "input_ids":
            ids = torch.ones(batch, length, dtype=torch.long, device=model.device)
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
        else:
            inputs = {
                name: torch.cat([value] * batch)[:batch].to(model.device)
                for name, value in model.dummy_inputs.items()
            }
            model(**inputs)
