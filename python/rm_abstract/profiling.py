"""``profile()``: what every step of the compiled programs takes, and a trace file.

Programs that exist when the block is entered are traced; calls served by PyTorch are not in it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rm_abstract.base.errors import Error
from rm_abstract.engines.base import Traceable
from rm_abstract.report_page import Drawn

if TYPE_CHECKING:
    from rm_abstract.session import Session

_SHOWN = 25  # lines of a printed profile


@dataclass(frozen=True)
class Run:
    """One run of a program. Times in nanoseconds, ``start`` of time.monotonic_ns()."""

    model: str
    signature: str
    start: int
    thread: int
    steps: Sequence[str]  # operator, operands, kernel
    times: Sequence[int]


class Profile:
    """A context manager; its results are there when the block has ended."""

    def __init__(self, session: Session, trace: str | os.PathLike[str] | None) -> None:
        self._session = session
        self._file = trace
        self._running = False
        self._programs: list[tuple[str, str, Any]] = []
        self.runs: list[Run] = []
        self.dropped = 0  # runs that were too many to keep
        self._captured: dict[tuple[str, str], str] = {}
        self.seconds = 0.0  # of the block

    def __enter__(self) -> Profile:
        if self._running:
            raise Error("[profile] expected a profile that is not running; try another profile()")
        self._running = True
        self.runs, self.dropped = [], 0
        for router in self._session.routers():
            engine = router.engine
            if isinstance(engine, Traceable):
                for signature, text in engine.captured().items():
                    self._captured[router.label, signature] = text
                for signature, program in engine.programs():
                    program.start_trace()
                    self._programs.append((router.label, signature, program))
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self.seconds = time.perf_counter() - self._start
        programs, self._programs, self._running = self._programs, [], False
        for model, signature, program in programs:
            plans, runs, dropped = program.take_trace()
            self.dropped += dropped
            self.runs += [
                Run(model, signature, start, thread, plans[plan], times)
                for plan, start, thread, times in runs
            ]
        self.runs.sort(key=lambda run: run.start)
        if self._file is not None:
            self.save_chrome_trace(self._file)

    def steps(self) -> list[dict[str, Any]]:
        """Model, signature, step, runs, total_ms and share of all steps; the longest first."""
        totals: dict[tuple[str, str, int, str], list[int]] = {}
        for run in self.runs:
            for number, (step, ns) in enumerate(zip(run.steps, run.times, strict=True)):
                total = totals.setdefault((run.model, run.signature, number, step), [0, 0])
                total[0] += 1
                total[1] += ns
        everything = sum(ns for _, ns in totals.values()) or 1
        rows = [
            {
                "model": model,
                "signature": signature,
                "number": number,
                "step": step,
                "runs": count,
                "total_ms": ns / 1e6,
                "share": ns / everything,
            }
            for (model, signature, number, step), (count, ns) in totals.items()
        ]
        return sorted(rows, key=lambda row: -row["total_ms"])

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "runs": len(self.runs),
            "dropped": self.dropped,
            "steps": self.steps(),
        }

    def drawn(self) -> list[Drawn]:
        """What ran, for report_page.page: of each plan the median run of every step."""
        plans: dict[tuple[str, str, tuple[str, ...]], list[Sequence[int]]] = {}
        for run in self.runs:
            plans.setdefault((run.model, run.signature, tuple(run.steps)), []).append(run.times)
        found = []
        for (model, signature, steps), times in plans.items():
            middle = [sorted(of_step)[len(times) // 2] for of_step in zip(*times, strict=True)]
            text = self._captured.get((model, signature), "")
            name = f"{model} {signature}, {len(times)} runs"
            found.append(Drawn(name, text, list(zip(steps, middle, strict=True))))
        return found

    def save_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a file for chrome://tracing or ui.perfetto.dev. Raises OSError."""
        events: list[dict[str, Any]] = []
        process = os.getpid()
        for run in self.runs:
            place = {"ph": "X", "pid": process, "tid": run.thread}
            said = {"name": run.model, "cat": "run", "args": {"signature": run.signature}}
            events.append({**place, **said, "ts": run.start / 1e3, "dur": sum(run.times) / 1e3})
            at = run.start
            for step, ns in zip(run.steps, run.times, strict=True):
                operator, kernel = step.split(" ", 1)[0], step.rsplit("  ", 1)[-1]
                row = {"name": operator, "cat": "step", "args": {"kernel": kernel, "step": step}}
                events.append({**place, **row, "ts": at / 1e3, "dur": ns / 1e3})
                at += ns
        data = {"traceEvents": events, "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(data), encoding="utf-8")

    def __str__(self) -> str:
        inside = sum(sum(run.times) for run in self.runs) / 1e6
        lines = [
            f"{len(self.runs)} runs of compiled programs, {inside:.2f} ms in their steps, "
            f"{self.seconds * 1e3:.2f} ms in all"
        ]
        if self.dropped:
            lines.append(f"  {self.dropped} more runs were too many to keep")
        if not self.runs:
            lines.append("  call the model a few times before: programs made inside are not traced")
        rows = self.steps()
        if rows:
            lines.append("  total ms   share  ms a run  step")
        for row in rows[:_SHOWN]:
            each = row["total_ms"] / row["runs"]
            lines.append(
                f"  {row['total_ms']:8.3f}  {row['share']:6.1%}  {each:8.4f}  {row['step']}"
            )
        if len(rows) > _SHOWN:
            lines.append(f"  and {len(rows) - _SHOWN} more steps")
        return "\n".join(lines)

    __repr__ = __str__
