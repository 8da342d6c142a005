"""Runs cases with PyTorch alone and served, and says where the two differ.

python edit_findings.py [COUNT [SEED [PARTS]]]     prints every finding with its case

PARTS is the share of cases whose model is a part of a root that cannot be captured (1/3).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edit_cases import PARTS, Case, draw

RUNNER = Path(__file__).with_name("edit_runner.py")
TOLERANCE = 1e-4


@dataclass
class Result:
    cases: int = 0
    findings: list[str] = field(default_factory=list)
    controls: int = 0
    controls_routed: int = 0
    not_routed: list[str] = field(default_factory=list)
    routed_calls: int = 0
    parts: int = 0  # controls served as parts of a root that cannot be captured
    parts_routed: int = 0
    part_calls: int = 0

    def add(self, other: Result) -> None:
        self.cases += other.cases
        self.findings += other.findings
        self.controls += other.controls
        self.controls_routed += other.controls_routed
        self.not_routed += other.not_routed
        self.routed_calls += other.routed_calls
        self.parts += other.parts
        self.parts_routed += other.parts_routed
        self.part_calls += other.part_calls

    def __str__(self) -> str:
        controls = f"{self.controls_routed} of {self.controls} controls routed"
        counts = f"{self.cases} cases, {len(self.findings)} findings; {controls}"
        parts = f"{self.parts_routed} of {self.parts} controls served by parts"
        calls = f"{self.routed_calls} calls by programs, {self.part_calls} of them in parts"
        missed = [f"control not routed: {name}" for name in self.not_routed]
        return "\n".join([*self.findings, *missed, f"{counts} ({parts}); {calls}"])


def close(a: Any, b: Any) -> bool:
    if not (isinstance(a, list) and isinstance(b, list) and len(a) == len(b)):
        return bool(a == b)
    return all(
        (math.isnan(p) and math.isnan(q)) or p == q or abs(p - q) <= TOLERANCE * (1 + abs(q))
        for p, q in zip(a, b, strict=True)
    )


def difference(served: list[Any], eager: list[Any], before: list[Any]) -> str | None:
    """What is wrong with one step, in words; `before` are eager's earlier steps."""
    (_, ours, printed, left), (step, right, should_print, should_leave) = served, eager
    if ours[0] != right[0]:
        return f"{step}: {str(ours)[:200]}, eager {str(right)[:100]}"
    if right[0] == "raised":
        if ours[1:] != right[1:]:
            return f"{step}: raised {ours[1:]}, eager {right[1:]}"
    elif not close(ours[1], right[1]):
        old = any(isinstance(b[1][1], list) and close(ours[1], b[1][1]) for b in before)
        kind = "the old" if old else "another"
        return f"{step}: {kind} result ({str(ours[1])[:60]}, eager {str(right[1])[:60]})"
    if (printed, left) != (should_print, should_leave):
        return f"{step}: effects {printed!r} {left}, eager's {should_print!r} {should_leave}"
    return None


def run(mode: str, cases: Path, cache: Path) -> dict[int, dict[str, Any]]:
    environment = dict(
        os.environ, RM_CACHE_DIR=str(cache), OMP_NUM_THREADS="1", RM_WHEN_SLOWER="compiled"
    )
    done = subprocess.run(
        [sys.executable, str(RUNNER), mode, str(cases)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith('{"number"'):
            found[json.loads(line)["number"]] = json.loads(line)
    if done.returncode:
        print(f"{mode}: exit status {done.returncode}\n{done.stderr[-3000:]}", file=sys.stderr)
    return found


def judge(
    cases: list[Case], served: dict[int, Any], eager: dict[int, Any], note: str
) -> Iterator[str]:
    for case in cases:
        if case.number not in eager:
            yield f"{case.name}{note}: the script itself failed"
        elif case.number not in served:
            yield f"{case.name}{note}: the served process ended"
        else:
            right = eager[case.number]["steps"]
            for at, (a, b) in enumerate(zip(served[case.number]["steps"], right, strict=True)):
                if wrong := difference(a, b, right[:at]):
                    yield f"{case.name}{note}: step {at}, {wrong}"
                    break


def check(cases: list[Case], second_process: bool) -> Result:
    """Runs the cases eager and served; with `second_process` also a later process with the same
    cache, which starts with the edit.
    """
    result = Result(len(cases))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "cases.json"
        file.write_text(json.dumps([case.to_dict() for case in cases]))
        served = run("served", file, folder / "cache")
        result.findings += judge(cases, served, run("eager", file, folder / "cache"), "")
        if second_process:
            later = run("served-edited-first", file, folder / "cache")
            right = run("eager-edited-first", file, folder / "cache")
            result.findings += judge(cases, later, right, " (second process)")
    for case in cases:
        found = served.get(case.number, {"routed": 0, "calls": 0})
        result.routed_calls += found["routed"]
        result.part_calls += found["routed"] if case.warm else 0
        if case.control:
            result.controls += 1
            result.controls_routed += found["routed"] > 0
            result.parts += case.warm > 0
            result.parts_routed += case.warm > 0 and found["routed"] > 0
            if not found["routed"]:
                result.not_routed.append(case.name)
    return result


def check_all(
    count: int,
    seed: int,
    second_process: bool,
    size: int = 20,
    jobs: int | None = None,
    parts: float = PARTS,
) -> Result:
    """Checks `count` drawn cases, `size` a process, in `jobs` processes at a time: one a core."""
    cases = draw(seed, count, parts)
    pieces = [cases[i : i + size] for i in range(0, count, size)]
    total = Result()
    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        for piece in pool.map(lambda p: check(p, second_process), pieces):
            total.add(piece)
            print(piece, flush=True)
    return total


if __name__ == "__main__":
    wanted, drawn_by, share = (*sys.argv[1:], *("200", "0", str(PARTS))[len(sys.argv) - 1 :])
    print(check_all(int(wanted), int(drawn_by), True, parts=float(share)))
