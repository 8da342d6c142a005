"""``explain()``: per model what ran where, why not, and what it cost. Facts only, with reasons."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rm_abstract.base import listed_steps, reasons

if TYPE_CHECKING:
    from rm_abstract.session import Session


@dataclass(frozen=True)
class Quality:
    """Perplexities on the first ``tokens`` tokens of a text."""

    tokens: int
    own: float
    compiled: float
    precision: str

    @property
    def delta(self) -> float:
        """Relative: 0.01 is one percent more perplexity."""
        return self.compiled / self.own - 1

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "delta": self.delta}

    def __str__(self) -> str:
        return (
            f"perplexity of {self.tokens} tokens: {self.own:.4f} in the model's own precision, "
            f"{self.compiled:.4f} compiled with precision {self.precision} ({self.delta:+.2%})"
        )


@dataclass
class Report:
    """Printable; ``to_dict()`` and ``to_json()`` give the same facts to programs."""

    device: str
    models: list[dict[str, Any]] = field(default_factory=list)
    not_intercepted: list[dict[str, str]] = field(default_factory=list)
    device_notes: list[dict[str, str]] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)  # compiled steps and losses
    kernel_checks: dict[str, Any] = field(default_factory=dict)  # of rows, in this process
    quality: Quality | None = None  # of `rm-abstract compile --quality`

    @property
    def routed(self) -> int:
        """Calls served by compiled entries."""
        return sum(model["routed"] for model in self.models)

    @property
    def routed_in_parts(self) -> int:
        """Calls of parts of models, served by compiled entries while the model ran in PyTorch."""
        return sum(part["routed"] for model in self.models for part in model.get("parts", ()))

    @property
    def eager(self) -> int:
        """Calls served by the original, the first call of each entry included."""
        return sum(model["eager"] for model in self.models)

    @property
    def native_share(self) -> float:
        """Share of compute nodes run by kernels of our registry, over all entries."""
        rows = [
            row
            for model in self.models
            for row in (model, *model.get("parts", ()), *model.get("inner", ()))
        ]
        entries = [entry for row in rows for entry in row["entries"]]
        nodes = sum(entry["nodes"] for entry in entries)
        return sum(entry["native_nodes"] for entry in entries) / nodes if nodes else 0.0

    def why_not(self) -> str:
        """Every reason that kept a call eager, in one line."""
        found = [reason for model in self.models for reason in model["reasons"]]
        return ", ".join(f"{r['code']} {r['detail']}".strip() for r in found) or (
            "no model was caught"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "routed": self.routed,
            "routed_in_parts": self.routed_in_parts,
            "eager": self.eager,
            "native_share": self.native_share,
            "models": self.models,
            "not_intercepted": self.not_intercepted,
            "training": self.training,
            "device_notes": self.device_notes,
            "kernel_checks": self.kernel_checks,
            "quality": self.quality.to_dict() if self.quality else None,
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent, default=str)

    def __str__(self) -> str:
        lines = [
            f"rm_abstract on {self.device}: {_count(self.routed, 'call')} ran compiled, "
            f"{self.eager} in PyTorch"
        ]
        lines += [f"  {note['code']} {note['message']}" for note in self.device_notes]
        for model in self.models:
            lines += _model_lines(model)
        for row in self.not_intercepted:
            lines.append(f"{row['class']}: not accelerated, {row['code']}: {row['why']}")
        for row in self.training:
            lines += _training_lines(row)
        if not (self.models or self.not_intercepted or self.training):
            lines.append("  no model was caught: load one after init(), or call accelerate(model)")
        lines += _check_lines(self.kernel_checks)
        if self.quality:
            lines.append(str(self.quality))
        return "\n".join(lines)

    __repr__ = __str__


def build(session: Session, model: Any = None) -> Report:
    """The report of one routed model (a module), or of everything the session saw."""
    notes = [*session.resolved.notes, *_cache_notes(session)]
    report = Report(
        device=session.device,
        device_notes=notes,
        kernel_checks=session.kernel_check_report(),
    )
    routers = [] if session.closed else session.routers()
    if model is None:
        routers = [found for found in routers if not found.name]  # parts are in their model's
    else:
        routers = [found for found in routers if found.module_ref() is model]
        report.models = [found.record() for found in routers]
        report.training = listed_steps.records(model)
        if not routers and not report.training:
            report.not_intercepted = [_why_absent(session, model)]
        return report
    report.models = [*session.records(), *(found.record() for found in routers)]
    report.training = listed_steps.records()
    report.not_intercepted = [
        {"class": name, "code": code, "why": why} for name, (code, why) in session.skipped.items()
    ]
    return report


def never_served(models: list[dict[str, Any]], calls: int = 20) -> list[str]:
    """One line for each model that was called at least ``calls`` times and never served."""
    lines = []
    for model in models:
        kept = [r for r in model["reasons"] if r["code"] not in reasons.ASKED_FOR]
        declined = sum(reason["calls"] for reason in kept)
        served = model["routed"] + sum(part["routed"] for part in model.get("parts", ()))
        if served or model["loop_tokens"] or declined < calls:
            continue
        most = max(kept, key=lambda reason: int(reason["calls"]))
        detail = most["detail"] or most["text"]
        lines.append(
            f"rm_abstract: 0 of {declined} calls of {model['model']} ran compiled, "
            f"{most['code']}: {detail}; {most['remedy']}"
        )
    return lines


def _training_lines(row: dict[str, Any]) -> list[str]:
    lines = [
        f"{row['name']} of {row['model']}: {_count(row['compiled'], 'step')} ran compiled, "
        f"{row['eager']} in PyTorch"
    ]
    for code, detail in row["reasons"].items():
        lines.append(f"  {code} {reasons.text_of(code)}" + (f" ({detail})" if detail else ""))
        lines.append(f"    remedy: {reasons.remedy_of(code)}")
    for program in row["programs"]:
        share = program["native_nodes"] / program["nodes"] if program["nodes"] else 0.0
        lines.append(
            f"  program: {_count(program['runs'], 'step')}, kernels of ours run "
            f"{program['native_nodes']} of {program['nodes']} operators ({share:.1%})"
        )
    return lines


def _check_lines(checks: dict[str, Any]) -> list[str]:
    if not checks:
        return []
    return [
        f"kernels: {checks['checked']} checked in {checks['milliseconds']:.1f} ms, "
        f"{checks['remembered']} known from earlier processes, {len(checks['refused'])} refused",
        *(f"  RM510 {line}" for line in checks["refused"]),
    ]


def _cache_notes(session: Session) -> list[dict[str, str]]:
    problem = session.cache_problem()
    if not problem:
        return []
    return [{"code": "RM601", "message": f"the compile cache keeps nothing on disk: {problem}"}]


def _why_absent(session: Session, model: Any) -> dict[str, str]:
    name = type(model).__qualname__
    code, why = session.skipped.get(name, ("RM116", reasons.text_of("RM116")))
    return {"class": name, "code": code, "why": why}


# How a model was found, as its user would say it.
_WAYS = {
    "train": "its eval()",
    "to": "its to()",
    "call": "its first call",
    "accelerate": "accelerate()",
    "compile": "compile()",
}


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _model_lines(model: dict[str, Any]) -> list[str]:
    lines = [
        f"{model['model']} (caught by {_WAYS.get(model['caught_by'], model['caught_by'])}): "
        f"{_count(model['routed'], 'call')} ran compiled, {model['eager']} in PyTorch, "
        f"{model['first_calls']} of them to compile and compare, "
        f"{model['compile_seconds']:.2f} s compiling"
    ]
    lines += _times(max(model["entries"], key=lambda entry: int(entry["calls"]), default={}))
    if model.get("loop_tokens"):
        lines.append(f"  {model['loop_tokens']} tokens generated without a call of the model each")
    lines += _engine_lines(model.get("generation_engine", {}))
    for why, calls in model.get("loop_declined", {}).items():
        lines.append(f"  {calls} calls of generate ran in transformers' own loop: {why}")
    drafts = model.get("drafts")
    if drafts:
        lines.append(
            f"  {drafts['accepted']} of {drafts['drafted']} tokens drafted from the text held, in "
            f"{drafts['checks']} checks of {drafts['check_us']:.0f} µs "
            f"(a step takes {drafts['step_us']:.0f} µs)"
        )
    for reason in model["reasons"]:
        detail = f" ({reason['detail']})" if reason["detail"] else ""
        lines.append(f"  {reason['calls']} x {reason['code']} {reason['text']}{detail}")
        lines.append(f"    remedy: {reason['remedy']}")
    for entry in model["entries"]:
        lines += _entry_lines(entry)
    return lines + _part_lines(model.get("parts", [])) + _inner_lines(model.get("inner", []))


def _inner_lines(inner: list[dict[str, Any]]) -> list[str]:
    """The models inside that were called on their own, such as an encoder before generation."""
    lines = []
    for part in inner:
        lines.append(
            f"  {part['part']}, called on its own: {_count(part['routed'], 'call')} ran compiled, "
            f"{part['eager']} in PyTorch"
        )
        lines += [f"  {line}" for line in _reason_lines(part["reasons"])]
        for entry in part["entries"]:
            lines += [f"  {line}" for line in _entry_lines(entry)]
    return lines


def _reason_lines(found: list[dict[str, Any]]) -> list[str]:
    return [
        f"  {reason['calls']} x {reason['code']} {reason['text']}"
        + (f" ({reason['detail']})" if reason["detail"] else "")
        for reason in found
    ]


def _part_lines(parts: list[dict[str, Any]]) -> list[str]:
    """The modules that serve a model which runs in PyTorch itself."""
    if not parts:
        return []
    served = [part for part in parts if part["routed"]]
    lines = [
        f"  served in parts: {len(served)} of {_count(len(parts), 'module')} tried; a name's share "
        "is that of a call's time in PyTorch"
    ]
    for part in parts:
        lines.append(
            f"    {part['part']} ({part['share']:.1%}): {_count(part['routed'], 'call')} ran "
            f"compiled, {part['eager']} in PyTorch"
        )
        lines += [f"    {line}" for line in _reason_lines(part["reasons"])]
        for entry in part["entries"]:
            lines += [f"    {line}" for line in _entry_lines(entry)]
    return lines


def _engine_lines(engine: dict[str, Any]) -> list[str]:
    """What an engine in a process of its own generated."""
    if not engine:
        return []
    declined = [
        f"  {calls} calls of generate were not for {engine['engine']}: {why}"
        for why, calls in engine["declined"].items()
    ]
    if not engine["starts"]:
        return declined
    facts = engine["facts"]
    version = f" {facts['version']} on {facts['platform']}" if facts else ""
    lines = [
        f"  {engine['engine']}{version}: {engine['requests']} generations, {engine['tokens']} "
        f"tokens, started {engine['starts']} times ({engine['start_seconds']:.1f} s), weights "
        f"taken again {engine['reloads']} times; {engine['checked'] or 'not compared'}"
    ]
    if crashes := engine["crashes"]:
        first = crashes[-1].splitlines()[0]
        lines.append(f"    RM303 its process ended {len(crashes)} times, last: {first}")
    return lines + declined


def _times(entry: dict[str, Any]) -> list[str]:
    """What a call takes without and with us, of the entry that served the most."""
    eager, compiled = entry.get("eager_ms"), entry.get("compiled_ms")
    if compiled is None or not entry["calls"]:
        return []
    if eager is None:
        return [f"  a call takes {compiled:.3f} ms compiled; PyTorch served none to compare with"]
    if entry["timed"] != "by turns":  # a first call also pays for what is done once: no ratio
        first = f"the first call, in PyTorch, took {eager:.3f} ms"
        return [f"  a call takes {compiled:.3f} ms compiled; {first}"]
    return [
        f"  a call takes {eager:.3f} ms in PyTorch → {compiled:.3f} ms compiled "
        f"({eager / compiled:.2f}x, measured in turns)"
    ]


def _entry_lines(entry: dict[str, Any]) -> list[str]:
    flops = entry["native_flops_share"]
    share = "FLOPs of the rest not known" if flops is None else f"{flops:.1%} of FLOPs"
    lines = [
        f"  program for {entry['signature']}: {_count(entry['calls'], 'call')}, "
        f"{_count(entry['shapes'], 'shape')}, "
        f"cache {entry['cache'] or 'unused'}, parity {entry['parity'] or 'not checked'}, "
        f"capture {entry['capture_ms']:.0f} ms, compile {entry['compile_ms']:.0f} ms",
        f"    kernels of ours run {entry['native_nodes']} of {entry['nodes']} operators "
        f"({entry['native_share']:.1%}), {share}",
    ]
    if entry.get("precision"):
        lines.append(f"    precision {entry['precision']}{_quantised(entry['quantised'])}")
    if crashes := entry.get("crashes"):
        lines.append(
            f"    RM303 its worker crashed {len(crashes)} times and was started again, last: "
            + crashes[-1].splitlines()[0]
        )
    kept = "run on the CPU" if entry["engine"] == "whole_program" else "run by PyTorch"
    for title, counts in (("kernels", entry["kernels"]), (kept, entry["kept"])):
        if counts:
            ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            lines.append(f"    {title}: " + ", ".join(f"{name} x{n}" for name, n in ranked))
    return lines


def _quantised(sizes: dict[str, int]) -> str:
    if not sizes:
        return ""
    return (
        f": {sizes['weights']} weights in {sizes['bytes'] / 1e6:.1f} MB instead of "
        f"{sizes['bytes_before'] / 1e6:.1f} MB"
    )
