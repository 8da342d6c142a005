"""Compare the runs that quickstart.sh made: times, equality of the results, routing, cache.

Ends with status 1 when a compiled run's results are not those of the plain one, when nothing ran
compiled, or when the second compiled run did not come from the cache.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MIN_COSINE = 0.9999


@dataclass
class Run:
    """What one execution of a script left: its result, its wall time and, compiled, its report."""

    result: dict[str, Any]
    wall_s: float
    report: dict[str, Any] | None

    @classmethod
    def load(cls, folder: Path, script: str, mode: str) -> Run:
        name = f"{script}.{mode}"
        errors = (folder / f"{name}.stderr").read_text()
        start = errors.rfind("\n{\n")  # what --explain=json wrote when the script ended
        return cls(
            result=json.loads((folder / f"{name}.json").read_text()),
            wall_s=int((folder / f"{name}.wall_ms").read_text()) / 1e3,
            report=json.loads(errors[start:]) if start >= 0 else None,
        )

    @property
    def entries(self) -> list[dict[str, Any]]:
        models = self.report["models"] if self.report else []
        return [entry for model in models for entry in model["entries"]]


def same_results(plain: dict[str, Any], compiled: dict[str, Any]) -> tuple[bool, str]:
    """Whether two results agree, and in what words."""
    if "tokens" in plain:
        same = plain["tokens"] == compiled["tokens"]
        return same, "tokens equal" if same else "tokens differ"
    pair = [torch.tensor(result["embeddings"]).double() for result in (plain, compiled)]
    cosine = torch.cosine_similarity(*pair, dim=-1).min().item()
    return cosine >= MIN_COSINE, f"cosine >= {cosine:.7f}"


def summarise(folder: Path, script: str) -> list[str]:
    """Prints one script's table; returns what is wrong."""
    runs = {mode: Run.load(folder, script, mode) for mode in ("eager", "cold", "warm")}
    plain = runs["eager"]
    problems = []
    print(f"\n{script}.py       whole script   first call   later calls     speedup   result")
    for mode, run in runs.items():
        first_ms, median_ms = run.result["first_ms"], run.result["median_ms"]
        speedup = plain.result["median_ms"] / median_ms
        same, words = same_results(plain.result, run.result)
        label = {"eager": "plain", "cold": "compiled", "warm": "compiled, warm cache"}[mode]
        print(
            f"  {label:<22}{run.wall_s:8.2f} s {first_ms:9.1f} ms {median_ms:10.2f} ms "
            f"{speedup:9.2f} x   {words}"
        )
        if not same:
            problems.append(f"{script} {mode}: {words}")
        if mode != "eager" and not (run.report and run.report["routed"]):
            problems.append(f"{script} {mode}: no call ran compiled; see the report above")
    for mode in ("cold", "warm"):
        for entry in runs[mode].entries:
            print(
                f"  {mode}: cache {entry['cache']}, parity {entry['parity']}, "
                f"{entry['calls']} calls, native {entry['native_nodes']}/{entry['nodes']} nodes"
            )
    if not any(entry["cache"].startswith("hit") for entry in runs["warm"].entries):
        problems.append(f"{script} warm: expected a cache hit in the second process")
    return problems


def main() -> int:
    folder = Path(sys.argv[1])
    problems = []
    for script in ("embed_sentences", "generate_text"):
        problems += summarise(folder, script)
    print("\n" + ("\n".join(problems) or "results equal, compiled calls served, second run cached"))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
