"""``rm-abstract compile --report``: compiled programs as one HTML file, before and after.

Each program is drawn twice: the operators of the capture, and the steps that ran, in their order
and with arcs from what writes a value to what reads it. A step has its time, the bytes of its
operands and results, and the share of the bound: the time that reading the bytes or the
multiply-adds would take at the machine's measured rates, over the time it took. The file needs
nothing else: no server, no library.
"""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ROW = 20  # pixels
_ARCS = 120  # width of the column of arcs
_MOST_ARCS = 8000  # of a drawing: more hide each other
_HOT = 12  # steps listed above a drawing
_SIZES = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "bf16": 2, "f16": 2, "i16": 2}
_OPERAND = re.compile(r"([a-z]+\d*)\[([\d,]*)\]@(-?\d+)")
_NODE = re.compile(r"(%[\d, %]*) = ([\w.]+)\((.*?)\)(?: \{(.*)\})? : (.*)")


@dataclass(frozen=True)
class Rates:
    """What the machine does at best: bytes and multiply-add operations (two each) a second."""

    read: float
    products: dict[str, float]  # by element type


@dataclass(frozen=True)
class Drawn:
    """One program: its capture in the IR's text form, and (step, nanoseconds) of a run."""

    name: str
    captured: str
    steps: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Node:
    """One row of a drawing; `reads` and `writes` name values."""

    op: str
    detail: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    types: str
    ns: float | None = None
    bytes: int = 0
    bound_ns: float = 0.0

    @property
    def share(self) -> float | None:
        """Of the bound; None where nothing was measured."""
        return self.bound_ns / self.ns if self.ns else None


Operand = tuple[str, tuple[int, ...], str]  # element type, shape, buffer


def _operands(text: str) -> list[Operand]:
    found = []
    for kind, sizes, buffer in _OPERAND.findall(text):
        shape = tuple(int(size) for size in sizes.split(",") if size)
        found.append((kind, shape, buffer))
    return found


def _bytes(operands: Iterable[Operand]) -> int:
    return sum(math.prod(shape) * _SIZES.get(kind, 1) for kind, shape, _ in operands)


def _conv_flops(x: Sequence[int], w: Sequence[int], y: Sequence[int]) -> float:
    turned = w[0] == x[1] and (w[0] != y[1] or math.prod(y[2:]) > math.prod(x[2:]))
    places = math.prod(x if turned else y)
    return 2.0 * places * math.prod(w) / max(w[0], 1)


def flops(op: str, reads: Sequence[Sequence[int]], writes: Sequence[Sequence[int]]) -> float:
    """Of the operators that products are the work of; 0 for others. Shapes of present operands."""
    if not reads or not writes:
        return 0.0
    results = math.prod(writes[0])
    if op in ("gemm", "quant_linear"):
        return 2.0 * results * reads[0][-1]
    if op == "linears":
        return 2.0 * sum(math.prod(w) for w in reads if len(w) == 2 and w[1] == reads[0][-1])
    if op == "quant_linears":  # integers of N rows, then scales of N columns
        pairs = [(q, s) for q, s in itertools.pairwise(reads) if len(q) == len(s) == 2]
        return 2.0 * reads[0][-1] * sum(q[0] for q, s in pairs if q[0] == s[1])
    if op == "conv":
        return _conv_flops(reads[0], reads[1], writes[0])
    if op == "sdpa":
        q, k = reads[0], reads[1]
        return 2.0 * math.prod(q[:3]) * k[2] * (q[3] + writes[0][3])
    if op == "append_sdpa":
        cache = writes[1]
        return 4.0 * math.prod(reads[0]) * cache[2]
    return 2.0 * results * reads[1][0] if op == "recurrent" else 0.0


def executed(steps: Iterable[tuple[str, float]], rates: Rates) -> list[Node]:
    """The nodes of steps as the core describes them: ``op ( operands ) -> results  kernel``."""
    nodes = []
    for line, ns in steps:
        op, _, rest = line.partition(" (")
        before, _, after = rest.partition(" ) ->")
        reads, writes = _operands(before), _operands(after)
        work = flops(op, [shape for _, shape, _ in reads], [shape for _, shape, _ in writes])
        size = _bytes(reads) + _bytes(writes)
        peak = rates.products.get(writes[0][0] if writes else "", 0.0)
        peak = peak or max(rates.products.values(), default=0.0)
        bound = max(size / rates.read, work / peak if peak else 0.0) * 1e9
        types = ", ".join(f"{kind}{list(shape)}" for kind, shape, _ in reads)
        types += " → " + ", ".join(f"{kind}{list(shape)}" for kind, shape, _ in writes)
        nodes.append(
            Node(
                op,
                after.rpartition("  ")[2],
                tuple(buffer for *_, buffer in reads),
                tuple(buffer for *_, buffer in writes),
                types,
                ns,
                size,
                bound,
            )
        )
    return nodes


def captured(text: str) -> list[Node]:
    """The nodes of a program in the IR's text form."""
    nodes = []
    for line in text.splitlines():
        match = _NODE.fullmatch(line)
        if match is None:
            continue
        results, op, operands, attrs, types = match.groups()
        reads = tuple(dict.fromkeys(re.findall(r"%\d+", operands)))
        detail = "" if op.startswith("aten.") else (attrs or "")
        nodes.append(Node(op, detail, reads, tuple(re.findall(r"%\d+", results)), types))
    return nodes


def edges(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """(writer, reader) for each value that a later node reads: the last writer before it."""
    written: dict[str, int] = {}
    found = []
    for number, node in enumerate(nodes):
        sources = {written[value] for value in node.reads if value in written}
        found += [(source, number) for source in sorted(sources)]
        written.update(dict.fromkeys(node.writes, number))
    return found


def _amount(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def _arcs(pairs: Sequence[tuple[int, int]], rows: int) -> str:
    shortest = sorted(pairs, key=lambda pair: pair[1] - pair[0])[:_MOST_ARCS]
    paths = []
    for source, reader in shortest:
        top, bottom = (source + 0.7) * _ROW, (reader + 0.3) * _ROW
        out = _ARCS - min(_ARCS - 4, 10 + 14 * math.log2(reader - source))
        curve = (
            f"M{_ARCS},{top:.0f}C{out:.0f},{top:.0f} {out:.0f},{bottom:.0f} {_ARCS},{bottom:.0f}"
        )
        paths.append(f'<path data-a="{source}" data-b="{reader}" d="{curve}"/>')
    return f'<svg width="{_ARCS}" height="{rows * _ROW}">{"".join(paths)}</svg>'


def _row(number: int, node: Node, total: float) -> str:
    cells = [f'<td class="n">{number}</td><td class="o">{html.escape(node.op)}</td>']
    if node.ns is not None:
        part = node.ns / total if total else 0.0
        share = node.share or 0.0
        cells.append(
            f'<td class="t"><i style="width:{100 * part:.1f}%"></i>{node.ns / 1e3:.1f} µs</td>'
            f'<td class="r">{part:.1%}</td><td class="r">{_amount(node.bytes)}</td>'
            f'<td class="r">{share:.0%}</td>'
        )
    cells.append(
        f'<td class="k">{html.escape(node.detail)}</td><td class="y">{html.escape(node.types)}</td>'
    )
    tip = html.escape(f"{node.op} {node.detail}\n{node.types}", quote=True)
    return f'<tr data-i="{number}" title="{tip}">{"".join(cells)}</tr>'


def _drawing(title: str, nodes: Sequence[Node]) -> str:
    total = sum(node.ns or 0.0 for node in nodes)
    rows = "".join(_row(number, node, total) for number, node in enumerate(nodes))
    arcs = _arcs(edges(nodes), len(nodes))
    return (
        f"<details open><summary>{html.escape(title)}: {len(nodes)} rows</summary>"
        f'<div class="d">{arcs}<table>{rows}</table></div></details>'
    )


def _hot(nodes: Sequence[Node]) -> str:
    total = sum(node.ns or 0.0 for node in nodes) or 1.0
    longest = sorted(enumerate(nodes), key=lambda pair: -(pair[1].ns or 0.0))[:_HOT]
    rows = "".join(_row(number, node, total) for number, node in longest)
    head = "<tr><th>row<th>operator<th>time<th>of all<th>bytes<th>of bound<th>kernel<th>types</tr>"
    return f'<table class="h">{head}{rows}</table>'


def _section(drawn: Drawn, rates: Rates) -> str:
    after, before = executed(drawn.steps, rates), captured(drawn.captured)
    total, bound = sum(n.ns or 0.0 for n in after), sum(n.bound_ns for n in after)
    share = f"{bound / total:.0%}" if total else "none"
    return (
        f"<h2>{html.escape(drawn.name)}</h2>"
        f"<p>{len(before)} operators captured, {len(after)} steps "
        f"executed in {total / 1e6:.3f} ms: {share} of the bound.</p>"
        f"{_hot(after)}{_drawing('Executed', after)}{_drawing('Captured', before)}"
    )


def page(title: str, programs: Sequence[Drawn], rates: Rates) -> str:
    """The whole file."""
    peaks = ", ".join(f"{kind} {rate / 1e9:.0f} GFLOP/s" for kind, rate in rates.products.items())
    said = (
        f"Rates of this machine now: read {rates.read / 1e9:.1f} GB/s; products {peaks}. Of bound: "
        "the time that the bytes or the products of a step take at these rates, over its time; "
        "above 100 % where operands came from a cache."
    )
    sections = "".join(_section(drawn, rates) for drawn in programs)
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{name}</h1><p>{html.escape(said)}</p>{sections}"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


_STYLE = f"""
body{{font:13px/1.4 system-ui,sans-serif;margin:16px;color:#222}}
summary{{cursor:pointer;font-weight:600;margin:12px 0 4px}}
table{{border-collapse:collapse;table-layout:auto}}
.d{{display:flex}} .d svg{{flex:none}} path{{fill:none;stroke:#bbb;stroke-width:1}}
path.on{{stroke:#c33;stroke-width:2}}
.d tr{{height:{_ROW}px}} .d td{{height:{_ROW}px;box-sizing:border-box;overflow:hidden}}
td,th{{padding:0 8px;white-space:nowrap;text-align:left;max-width:60ch;text-overflow:ellipsis}}
tr.on{{background:#fdd}} tr:hover{{background:#eef}}
.n{{color:#999}} .o{{font-weight:600}} .r{{text-align:right}}
.k,.y{{color:#567;font-family:monospace}}
.t{{position:relative;min-width:130px;text-align:right}}
.t i{{position:absolute;left:0;top:3px;bottom:3px;background:#9cf;opacity:.6}}
.h td,.h th{{height:{_ROW}px}}
"""
# Pointing at a row marks what it reads from and what reads from it.
_SCRIPT = """
for(const d of document.querySelectorAll('.d')){
const rows=[...d.querySelectorAll('tr')],arcs=[...d.querySelectorAll('path')];
d.addEventListener('mouseover',e=>{
const r=e.target.closest('tr');if(!r)return;
const i=r.dataset.i;for(const x of d.querySelectorAll('.on'))x.classList.remove('on');
for(const p of arcs)if(p.dataset.a===i||p.dataset.b===i){p.classList.add('on');
const o=p.dataset.a===i?p.dataset.b:p.dataset.a;if(rows[o])rows[o].classList.add('on');}});}
"""
