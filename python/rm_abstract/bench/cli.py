"""`rm-abstract bench ...`: runs a benchmark and prints Markdown; `--json` keeps the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click


@click.group()
def bench() -> None:
    """Measure against the strongest alternatives, in interleaved rounds of one run."""


_DEVICE = click.option(
    "--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True
)
_PNG = click.option(
    "--png", type=click.Path(path_type=Path), help="With --device gpu: draw bars and the bound."
)


def interval(values: dict[str, float], digits: int) -> str:
    return f"{values['median']:.{digits}f} ({values['low']:.{digits}f}-{values['high']:.{digits}f})"


def markdown(environment: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """One table over all cases; medians with 95 % intervals."""
    lines = [
        ", ".join(f"{key} {value}" for key, value in environment.items()),
        "",
        "| case | candidate | ms | x eager | share of GEMM probe | min cosine |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        for name, row in result["candidates"].items():
            cells = [
                result["case"],
                name,
                interval(row["ms"], 2),
                interval(row["over_eager"], 2),
                interval(row["share_of_gemm_probe"], 2),
                f"{row['min_cosine']:.6f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        probe = result["probe"]
        lines.append(
            f"| {result['case']} | {probe['name']} | {probe['gflop_s']:.0f} GFLOP/s | | | |"
        )
    return "\n".join(lines)


@bench.command()
@click.option(
    "--against",
    default="torch,onnxruntime",
    show_default=True,
    help="Comma-separated: torch, compile, onnxruntime.",
)
@click.option("--only", default="", help="Cases whose name contains this text.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(min=5))
@click.option("--round-seconds", default=0.3, show_default=True, type=float)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here."
)
@_DEVICE
@_PNG
def encoder(
    against: str,
    only: str,
    rounds: int,
    round_seconds: float,
    json_file: Path | None,
    device: str,
    png: Path | None,
) -> None:
    """BERT-base (on the CPU also MiniLM): forward passes."""
    from rm_abstract.bench import encoder as cases
    from rm_abstract.bench import probes

    if device == "gpu":
        from rm_abstract.bench import gpu

        on_gpu(_models(gpu.ENCODERS, only, against, rounds, round_seconds), json_file, png)
        return
    names = [name.strip() for name in against.split(",") if name.strip()]
    known = {"torch", "compile", "onnxruntime"}
    if unknown := sorted(set(names) - known):
        raise click.BadParameter(
            f"expected {', '.join(sorted(known))}, got {', '.join(unknown)}", param_hint="--against"
        )
    chosen = [case for case in cases.CASES if only in case.name]
    if not chosen:
        available = "; ".join(case.name for case in cases.CASES)
        raise click.BadParameter(f"expected part of one of: {available}", param_hint="--only")
    results = []
    for case in chosen:
        click.echo(f"{case.name} ...", err=True)
        results.append(cases.run_case(case, names, rounds, round_seconds))
    environment = probes.environment()
    click.echo(markdown(environment, results))
    if json_file is not None:
        json_file.write_text(json.dumps({"environment": environment, "results": results}, indent=1))


@bench.command()
@click.option("--only", default="", help="Cases whose name contains this text.")
@click.option("--precision", default="fp32,bf16", show_default=True, help="fp32, bf16, int8, int4.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=5))
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(min=8))
@click.option(
    "--batch",
    default=1,
    type=click.IntRange(min=1),
    help="Besides batch 1, generate this many rows at once.",
)
@click.option("--no-eager", is_flag=True, help="Leave eager out: it is slow.")
@click.option(
    "--llama-python",
    type=click.Path(exists=True, dir_okay=False),
    help="Interpreter that has llama-cpp-python and gguf; llama.cpp then takes part.",
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here."
)
@_DEVICE
@_PNG
def decode(
    only: str,
    precision: str,
    rounds: int,
    tokens: int,
    no_eager: bool,
    batch: int,
    llama_python: str | None,
    json_file: Path | None,
    device: str,
    png: Path | None,
) -> None:
    """Greedy text generation, batch 1, through `model.generate`. On a GPU: bf16 Llama shapes."""
    import dataclasses

    from rm_abstract.bench import decode as cases
    from rm_abstract.bench import probes

    if device == "gpu":
        from rm_abstract.bench import gpu

        names = _chosen(list(gpu.DECODERS), only)
        on_gpu((gpu.run_decode(name, not no_eager, rounds) for name in names), json_file, png)
        return
    wanted = [name.strip() for name in precision.split(",") if name.strip()]
    if unknown := sorted(set(wanted) - set(cases.BITS)):
        raise click.BadParameter(
            f"expected {', '.join(cases.BITS)}, got {', '.join(unknown)}", param_hint="--precision"
        )
    chosen = [case for case in cases.CASES if only in case.name and case.precision in wanted]
    if not chosen:
        available = "; ".join(case.name for case in cases.CASES)
        raise click.BadParameter(f"expected part of one of: {available}", param_hint="--only")
    environment = probes.environment()
    click.echo(", ".join(f"{key} {value}" for key, value in environment.items()))
    click.echo(f"\n{cases.HEADER}")
    results = []
    for case in chosen:  # printed as they come: a run takes minutes
        case = dataclasses.replace(case, new_tokens=tokens)
        click.echo(f"{case.name} ...", err=True)
        results.append(cases.run_case(case, llama_python, rounds, not no_eager, batch))
        click.echo(cases.markdown(results[-1]))
        if json_file is not None:
            content = {"environment": environment, "results": results}
            json_file.write_text(json.dumps(content, indent=1))


@bench.command()
@click.option("--only", default="", help="Models or requests whose name contains this text.")
@click.option("--tokens", default=200, show_default=True, type=click.IntRange(min=8))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=5))
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here."
)
def tokens(only: str, tokens: int, rounds: int, json_file: Path | None) -> None:
    """What a token costs outside the weights: toy models, many kinds of request."""
    from rm_abstract.bench import tokens as cases

    pairs = [
        (model, request)
        for model in cases.MODELS
        for request in cases.REQUESTS
        if only in f"{model} {request.name}"
    ]
    if not pairs:
        names = "; ".join([*cases.MODELS, *(request.name for request in cases.REQUESTS)])
        raise click.BadParameter(f"expected part of one of: {names}", param_hint="--only")
    listed(
        cases.HEADER,
        (cases.run(model, request, tokens, rounds) for model, request in pairs),
        cases.markdown,
        json_file,
    )


@bench.command()
@click.option("--only", default="llama-0.13b", show_default=True, help="Part of a model's name.")
@click.option("--precision", default="fp32,bf16", show_default=True, help="fp32, bf16, fp16.")
@click.option("--threads", default=4, show_default=True, type=click.IntRange(min=2))
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(min=8))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=5))
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here."
)
def threads(
    only: str, precision: str, threads: int, tokens: int, rounds: int, json_file: Path | None
) -> None:
    """Threads that generate on one model at once, against one after another."""
    from rm_abstract.bench import decode as kinds
    from rm_abstract.bench import decoders
    from rm_abstract.bench import threads as cases

    wanted = [name.strip() for name in precision.split(",") if name.strip()]
    if unknown := sorted(set(wanted) - set(kinds.DTYPES)):
        raise click.BadParameter(
            f"expected {', '.join(kinds.DTYPES)}, got {', '.join(unknown)}",
            param_hint="--precision",
        )
    shapes = [shape for shape in decoders.SHAPES if only in shape.name]
    if not shapes:
        names = ", ".join(shape.name for shape in decoders.SHAPES)
        raise click.BadParameter(f"expected part of one of: {names}", param_hint="--only")
    listed(
        cases.HEADER,
        (cases.run(shape, kind, threads, tokens, rounds) for shape in shapes for kind in wanted),
        cases.markdown,
        json_file,
    )


def listed(
    header: str,
    results: Iterable[dict[str, Any]],
    markdown: Callable[[dict[str, Any]], str],
    json_file: Path | None,
) -> None:
    """Prints rows as they come: a run takes minutes."""
    from rm_abstract.bench import probes

    environment = probes.environment()
    click.echo(", ".join(f"{key} {value}" for key, value in environment.items()))
    click.echo(f"\n{header}")
    done = []
    for result in results:
        done.append(result)
        click.echo(markdown(result))
        if json_file is not None:
            content = {"environment": environment, "results": done}
            json_file.write_text(json.dumps(content, indent=1))


@bench.command()
@click.option("--against", default="compile", show_default=True, help="compile, or nothing.")
@click.option("--only", default="", help="Cases whose name contains this text.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(min=5))
@click.option("--round-seconds", default=0.3, show_default=True, type=float)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here."
)
@_PNG
@click.option("--device", type=click.Choice(["gpu"]), default="gpu", show_default=True)
def vision(
    against: str,
    only: str,
    rounds: int,
    round_seconds: float,
    json_file: Path | None,
    png: Path | None,
    device: str,
) -> None:
    """ResNet-50, ViT and, where diffusers is, a diffusion UNet: forward passes on a GPU."""
    from rm_abstract.bench import gpu

    on_gpu(_models(gpu.IMAGES, only, against, rounds, round_seconds), json_file, png)


def _chosen(names: list[str], only: str) -> list[str]:
    chosen = [only] if only in names else [name for name in names if only in name]
    if not chosen:
        raise click.BadParameter(
            f"expected part of one of: {'; '.join(names)}", param_hint="--only"
        )
    return chosen


def _models(
    cases: list[Any], only: str, against: str, rounds: int, round_seconds: float
) -> Iterable[dict[str, Any]]:
    from rm_abstract.bench import gpu

    by_name = {case.name: case for case in cases}
    compiled = "compile" in against.split(",")
    for name in _chosen(list(by_name), only):
        try:
            yield gpu.run_model(by_name[name], compiled, rounds, round_seconds)
        except ModuleNotFoundError as error:
            click.echo(f"{name}: left out, {error}", err=True)


def on_gpu(results: Iterable[dict[str, Any]], json_file: Path | None, png: Path | None) -> None:
    """Prints rows as they come; draws them at the end."""
    from rm_abstract.bench import gpu

    try:
        gpu.check_device()
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    environment = gpu.environment()
    click.echo(", ".join(f"{key} {value}" for key, value in environment.items()))
    click.echo(f"\n{gpu.HEADER}")
    done = []
    for result in results:
        done.append(result)
        click.echo(gpu.markdown(result))
        if json_file is not None:
            content = {"environment": environment, "results": done}
            json_file.write_text(json.dumps(content, indent=1))
    if png is not None and done:
        gpu.draw(done, str(environment["device"]), png)


@bench.command()
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(min=5))
@click.option("--round-seconds", default=0.1, show_default=True, type=float)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here."
)
@_DEVICE
def dispatch(rounds: int, round_seconds: float, json_file: Path | None, device: str) -> None:
    """What a call costs besides its kernels, against torch.add and a stock module."""
    from rm_abstract.bench import dispatch as cases
    from rm_abstract.bench import probes

    if device == "gpu":
        from rm_abstract.bench import gpu

        try:
            gpu.check_device()
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
        measured = gpu.run_dispatch(rounds, round_seconds)
        click.echo(", ".join(f"{key} {value}" for key, value in gpu.environment().items()))
        click.echo(f"\n{cases.rows(measured)}")
        if json_file is not None:
            json_file.write_text(json.dumps({"result": measured}, indent=1))
        return
    environment = probes.environment()
    result = cases.run(rounds, round_seconds)
    click.echo(", ".join(f"{key} {value}" for key, value in environment.items()))
    click.echo(f"\n{cases.markdown(result)}")
    if json_file is not None:
        content = {"environment": environment, "result": result}
        json_file.write_text(json.dumps(content, indent=1))
