"""`rm-abstract bench ...`: runs a benchmark and prints Markdown; `--json` keeps the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.group()
def bench() -> None:
    """Measure against the strongest alternatives, in interleaved rounds of one run."""


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
def encoder(
    against: str, only: str, rounds: int, round_seconds: float, json_file: Path | None
) -> None:
    """BERT-base and MiniLM forward passes on the CPU."""
    from rm_abstract.bench import encoder as cases
    from rm_abstract.bench import probes

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
