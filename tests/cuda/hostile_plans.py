"""Random problems of what only plans ask for: fused steps and operators without a module of their
own, from docs/operators.md alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from arena import dense
from hostile import Maker, Problem, Result
from plugged import Plugged
from problems import ACTIVATIONS, DTYPES, EPSILON, tolerance
from programs import chains, run

_SOME = [(n, f) for n, f in ACTIVATIONS if n != "leaky_relu"]


def matrix(make: Maker, name: str, shape: tuple[int, ...], t: torch.dtype) -> torch.Tensor:
    """Rows with a pitch, sometimes columns that are the dense axis."""
    if len(shape) == 2 and make.maybe(0.2):
        return make.operand(name, shape, t, order=(1, 0))
    return make.operand(name, shape, t)


def product_scale(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double().square() @ b.double().square()).sqrt().max()) + 1


def small_sizes(make: Maker) -> tuple[int, int, int]:
    return make.size(260), make.size(260), make.size(600)


def small_gemm(make: Maker, m: Plugged) -> Problem:
    rows, columns, depth = small_sizes(make)
    t, trans = torch.float32, make.maybe()
    a = matrix(make, "a", (rows, depth), t)
    b = matrix(make, "b", (columns, depth) if trans else (depth, columns), t)
    name, function = make.one_of(*_SOME)
    bias = make.operand("bias", (columns,), t, dense=True) if make.maybe() else None
    residual = matrix(make, "residual", (rows, columns), t) if make.maybe(0.4) else None
    c, alpha = make.result("c", (rows, columns), t), make.one_of(1.0, 0.5)
    wide = b.double().mT if trans else b.double()
    wanted = function(alpha * (a.double() @ wide) + (0.0 if bias is None else bias.double())) + (
        0.0 if residual is None else residual.double()
    )
    scale = product_scale(a, wide) + (0 if residual is None else float(residual.abs().max()))
    bound = tolerance("float32", depth, 3) + 16 * 2.0**-23
    if depth * rows * columns > 1 << 14:  # tf32 is allowed where torch allows it; it does not here
        assert not torch.backends.cuda.matmul.allow_tf32
    return m.problem(
        make, f"{rows} x {columns} x {depth} trans_b {trans} {name} alpha {alpha}",
        [a, b, bias, residual], [c],
        {"trans_b": int(trans), "activation": name, "alpha": alpha},
        lambda: [Result("c", c, wanted, bound, scale)],
    )  # fmt: skip


def gemm_ewise(make: Maker, m: Plugged) -> Problem:
    rows, columns, depth = small_sizes(make)
    t, trans = torch.float32, make.maybe()
    a = matrix(make, "a", (rows, depth), t)
    b = make.operand("b", (columns, depth) if trans else (depth, columns), t,
                     scale=depth**-0.5)  # fmt: skip
    code, imm, count = chains(int(make.rng.integers(1 << 30)), 1)[0]
    others = []
    for i in range(count - 1):
        kind = make.one_of("whole", "row", "column", "one")
        shape = {"row": (1, columns), "column": (rows, 1), "one": (1, 1)}.get(kind, (rows, columns))
        others.append(make.operand(f"x{i}", shape, t).expand(rows, columns))
    c = make.result("c", (rows, columns), t)
    product = a.double() @ (b.double().mT if trans else b.double())
    wanted = run(code, imm, [product, *(x.double() for x in others)])
    # programs end with tanh, and magnify by less than this before
    bound = 64 * tolerance("float32", depth, 3) + 2.0**-16
    return m.problem(
        make, f"{rows} x {columns} x {depth} trans_b {trans} code {code}", [a, b, *others], [c],
        {"trans_b": int(trans), "code": code, "imm": imm},
        lambda: [Result("c", c, wanted, bound, 16.0)],
    )  # fmt: skip


def slopes(make: Maker, m: Plugged) -> Problem:
    t, count = torch.float32, make.one_of(1, 2, 3, 11, 12)
    inputs: list[torch.Tensor | None] = []
    outputs: list[torch.Tensor | None] = []
    right: list[Result] = []
    rows = make.size(700)
    for i in range(count):
        rows = rows if make.maybe(0.7) else make.size(700)
        n, k = make.size(150), make.size(150)
        shared = inputs[-1] if inputs and make.maybe(0.3) else None  # one x of two products
        if shared is not None and shared.shape[0] != rows:
            shared = None
        g = make.operand(f"g{i}", (rows, n), t)
        x = make.operand(f"x{i}", (rows, k), t) if shared is None else shared
        dw = make.result(f"dw{i}", (n, x.shape[1]), t)
        db = make.result(f"db{i}", (n,), t, dense=True) if make.maybe() else None
        inputs += [g, x]
        outputs += [dw, db]
        bound = tolerance("float32", rows, 3)
        right.append(Result(f"dw{i}", dw, g.double().mT @ x.double(), bound,
                            product_scale(g.mT, x)))  # fmt: skip
        if db is not None:
            right.append(Result(f"db{i}", db, g.double().sum(0), bound, float(g.norm()) + 1))
    return m.problem(make, f"{count} products of {rows} rows", inputs, outputs, {}, lambda: right)


class Steps:
    """A random program of `small_steps` (src/plan/small_program.hpp), its values in float64."""

    def __init__(self, make: Maker) -> None:
        self.make = make
        self.inputs: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.places: list[int] = []  # of each value: an input, or -1 - the part that makes it
        self.parts: list[tuple[int, int, int, list[int], list[int]]] = []
        self.made: list[int] = []  # values that parts make
        self.types: dict[int, int] = {}  # DLPack's code and bits of values that are not float32
        self.code: list[int] = []
        self.imm: list[float] = []

    def add_input(self, value: torch.Tensor, t: torch.dtype) -> int:
        name = f"in{len(self.inputs)}"
        given = self.make.operand(name, tuple(value.shape), t, value=value)
        self.inputs.append(given)
        self.values.append(given.double())
        self.places.append(len(self.inputs) - 1)
        return len(self.values) - 1

    def _add(self, op: int, a: int, b: int, dims: Any, of: list[int], value: torch.Tensor) -> None:
        self.parts.append((op, a, b, [int(d) for d in dims], of))
        self.values.append(value)
        self.places.append(-len(self.parts))
        self.made.append(len(self.values) - 1)

    def ewise(self, of: list[int]) -> None:
        code, imm, count = chains(int(self.make.rng.integers(1 << 30)), 1)[0]
        operands = [of[i % len(of)] for i in range(count)]
        first = len(self.code) // 5
        for i in range(0, len(code), 5):
            step = code[i : i + 5]
            if step[0] == 0:
                step[2] += len(self.imm)
            self.code += step
        self.imm += imm
        value = run(code, imm, [self.values[v] for v in operands])
        self._add(0, first, len(code) // 5, value.shape, operands, value)

    def _part(self, of: list[int], code: list[list[int]], value: torch.Tensor, t: int) -> int:
        first = len(self.code) // 5
        for step in code:
            self.code += step
        self._add(0, first, len(code), value.shape, of, value)
        if t != 0x220:
            self.types[len(self.values) - 1] = t
        return len(self.values) - 1

    def classes(self, of: int) -> None:
        """Integers are compared, chosen among and widened, as a loss does with classes."""
        x = self.values[of]
        t = self.make.one_of(torch.int64, torch.int64, torch.int32, torch.uint8)
        shape = [1 if self.make.maybe(0.3) else n for n in x.shape]
        draw = [torch.from_numpy(self.make.rng.integers(0, 5, shape)).cuda() for _ in "ab"]
        a, b = (self.add_input(d.expand(x.shape), t) for d in draw)
        compare = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)  # opcodes 49 to 54
        opcode, function = self.make.one_of(*enumerate(compare, 49))
        found = function(self.values[a], self.values[b])
        counts = self._part([a, b], [[opcode, 2, 0, 1, -1]], found.double(), 0x608)
        if self.make.maybe():
            flipped = torch.where(found, self.values[of], -self.values[of])
            code = [[2, 0, 1, -1, -1], [70, 0, 0, 1, 2]]
            self._part([counts, of], code, flipped, 0x220)
            return
        chosen = torch.where(found, self.values[a], self.values[b])
        ids = self._part([counts, a, b], [[70, 2, 0, 1, 2]], chosen, 0x040)
        code = [[40, 2, 0, 0, -1], [1, 0, 2, -1, -1], [42, 0, 3, 1, -1]]
        self._part([ids, of], code, 2 * chosen * x, 0x220)

    def reduce(self, of: int) -> None:
        x = self.values[of]
        kind = int(self.make.rng.integers(0, 4))
        axes = [d for d in range(x.dim()) if self.make.maybe()] or [x.dim() - 1]
        function = (torch.sum, torch.mean, torch.amax, torch.amin)[kind]
        value = function(x, dim=axes, keepdim=True)
        self._add(1, kind, sum(1 << d for d in axes), x.shape, [of], value)

    def softmax(self, of: int) -> None:
        log, x = self.make.maybe(), self.values[of]
        value = torch.log_softmax(x, -1) if log else torch.softmax(x, -1)
        self._add(2, int(log), 0, x.shape, [of], value)

    def gather(self, of: int) -> None:
        x = self.values[of]
        axis = max(range(x.dim()), key=lambda d: x.shape[d])
        shape = list(x.shape)
        shape[axis] = self.make.size(max(1, min(9, 2048 * x.shape[axis] // x.numel())))
        draw = torch.from_numpy(self.make.rng.integers(0, x.shape[axis], shape)).cuda()
        index = self.add_input(draw, self.make.one_of(torch.int64, torch.int32))
        self._add(3, axis, x.shape[axis], shape, [of, index], torch.gather(x, axis, draw))

    def problem(self, m: Plugged) -> Problem:
        """The last value is a result, others sometimes; what is none is an inner value."""
        some = [v for v in self.made[:-1] if self.make.maybe(0.3)]
        results = [v for v in [*some, self.made[-1]] if v not in self.types]
        inner = [v for v in self.made if v not in results]
        shapes = [tuple(self.values[v].shape) for v in results]
        outputs = [
            self.make.result(f"out{i}", shape, torch.float32, dense=True)
            for i, shape in enumerate(shapes)
        ]

        def place(v: int) -> list[int]:
            if self.places[v] >= 0:
                return [self.places[v]]
            at = results.index(v) if v in results else len(results) + inner.index(v)
            return [len(self.inputs) + at, 0, *dense(tuple(self.values[v].shape))]

        program = [len(inner)]
        for v in inner:
            program += [self.types.get(v, 0x220), self.values[v].numel()]
        for (op, a, b, dims, of), v in zip(self.parts, self.made, strict=True):
            program += [op, a, b, len(dims), *dims, len(of), *place(v)]
            for operand in of:
                program += place(operand)
        worst = max(float(v.abs().max()) for v in self.values) + 1

        def right() -> list[Result]:
            return [Result(f"out{i}", got, self.values[v], 2.0**-14, worst)
                    for i, (got, v) in enumerate(zip(outputs, results, strict=True))]  # fmt: skip

        ops = [("ewise", "reduce", "softmax", "gather")[part[0]] for part in self.parts]
        what = f"{ops} of {tuple(self.inputs[0].shape)}, {len(inner)} inner values"
        attrs = {"program": program, "code": self.code, "imm": self.imm or [0.0]}
        return m.problem(self.make, what, self.inputs, outputs, attrs, right)


def small_steps(make: Maker, m: Plugged) -> Problem:
    s = Steps(make)
    dims: list[int] = []
    for _ in range(make.one_of(1, 2, 2, 3, 4)):
        dims.append(make.size(max(1, min(256, 2048 // int(np.prod(dims, dtype=int))))))
    for _ in range(make.one_of(1, 2)):
        s.add_input(make.random(tuple(dims)), torch.float32)
    for _ in range(make.one_of(2, 3, 5)):
        last = s.made[-1] if s.made else 0
        shape = s.values[last].shape
        kind = make.one_of("ewise", "ewise", "classes", "reduce", "softmax", "gather")
        if kind == "gather" and max(shape) < 2:
            kind = "ewise"
        if kind == "ewise":
            floats = [i for i in range(len(s.values)) if i not in s.types and (
                s.places[i] < 0 or s.inputs[s.places[i]].is_floating_point())]  # fmt: skip
            s.ewise([i for i in floats if s.values[i].shape == shape])
        else:
            getattr(s, kind)(last)
    return s.problem(m)


def philox(seed: int, counter: int, blocks: int) -> np.ndarray:
    """Words ``[blocks, 4]`` of Philox4x32-10 on (block, counter), low words first."""
    low, words = np.uint64(0xFFFFFFFF), 32
    at = np.arange(blocks, dtype=np.uint64)
    c = [at & low, at >> np.uint64(words), np.full_like(at, counter & 0xFFFFFFFF),
         np.full_like(at, counter >> words)]  # fmt: skip
    key = [seed & 0xFFFFFFFF, seed >> words]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(words)) ^ c[1] ^ np.uint64(key[0]), b & low,
             (a >> np.uint64(words)) ^ c[3] ^ np.uint64(key[1]), a & low]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(c, axis=1)


def uniform(make: Maker, m: Plugged) -> Problem:
    seed, counter = (int(make.rng.integers(0, 1 << 63)) for _ in "sc")
    counter = make.one_of(0, 1, counter)
    state = make.operand("state", (2,), torch.int64, dense=True, offset=0,
                         value=torch.tensor([seed, counter], device="cuda"))  # fmt: skip
    t = make.one_of(torch.float32, torch.float64)
    shape = make.one_of((make.size(100_000),), (make.size(300), make.size(300)))
    y = make.result("y", shape, t)
    count = int(np.prod(shape))
    words = philox(seed, counter, -(-count // 4)).reshape(-1)[:count]
    wanted = torch.from_numpy((words >> np.uint64(8)).astype(np.float64) * 2.0**-24).cuda()
    wanted = wanted.view(shape).to(t)
    return m.problem(make, f"{shape} {t} of {seed}, {counter}", [state], [y], {},
                     lambda: [Result("y", y, wanted, 0.0)])  # fmt: skip


def scatter(make: Maker, m: Plugged) -> Problem:
    """Values are small integers and powers of two: any order gives the same bits."""
    rank, kind = make.one_of(1, 2, 3), make.one_of("set", "add", "mul", "max", "min")
    numbers = (torch.float32, torch.float32, torch.float64, torch.int64, torch.int32)
    halves = (torch.bfloat16, torch.float16)
    others = (torch.uint8, torch.bool, torch.int16) if kind == "set" else ()
    t = make.one_of(*numbers, *halves, *others)
    axis = int(make.rng.integers(0, rank))
    shape = [make.size((4000, 200, 40)[rank - 1]) for _ in range(rank)]
    source = [make.size(n) if d != axis else make.size(2 * n if kind != "set" else n)
              for d, n in enumerate(shape)]  # fmt: skip
    many = t in numbers and make.maybe(0.3)  # in few places, as counts are made
    if many:
        shape[axis], source[axis] = make.size(65), make.size(5000 // rank**3)
    draw = make.rng.integers(0, shape[axis], source)
    if kind == "set" and not many:  # every place at most once
        draw = np.argsort(make.rng.random([shape[axis] if d == axis else n
                                           for d, n in enumerate(source)]), axis)  # fmt: skip
        draw = np.take(draw, np.arange(source[axis]), axis)
    index = make.operand("index", tuple(source), make.one_of(torch.int64, torch.int32),
                         value=torch.from_numpy(draw).cuda())  # fmt: skip

    def values(name: str, size: list[int]) -> torch.Tensor:
        v = torch.from_numpy(make.rng.integers(-8, 9, size)).cuda().double()
        if t in (torch.uint8, torch.bool):
            v = v.abs()
        if kind == "mul":
            v = torch.where(v > 0, 2.0, torch.where(v < -6, -1.0, 1.0))
        if t.is_floating_point and kind in ("max", "min") and make.maybe(0.3):
            v.view(-1)[int(make.rng.integers(0, v.numel()))] = float("nan")
        return make.operand(name, tuple(size), t, value=v)

    x, src = values("x", shape), values("src", source)
    y = make.result("y", tuple(shape), t)
    reduce = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    wide = torch.float64 if t.is_floating_point else torch.int64
    at, wanted = index.long().cpu(), x.to(wide).cpu()
    if kind == "set":  # the last of src that names a place
        part = wanted.numpy()[tuple(slice(n if d != axis else None) for d, n in enumerate(source))]
        np.put_along_axis(part, at.numpy(), src.to(wide).cpu().numpy(), axis)
    else:
        # a product of more than 127 twos is infinite in float32, not in float64
        wanted = wanted.scatter_reduce(axis, at, src.to(wide).cpu(), reduce[kind])
    wanted = wanted.to(t).cuda()
    what, attrs = f"{shape} {source} {t} axis {axis} {kind}", {"axis": axis, "kind": kind}
    return m.problem(make, what, [x, index, src], [y], attrs, lambda: [Result("y", y, wanted, 0.0)])


def adams(make: Maker, m: Plugged) -> Problem:
    count, t = make.one_of(1, 2, 3, 11, 12), torch.float32
    decay, maximize = make.one_of("none", "gradient", "parameter"), make.maybe(0.3)
    numbers = torch.tensor([0.01, 1 - 1e-3 * 0.01, 0.1, 0.999, 1e-3, 1e-8, 1e-2, 0.3],
                           device="cuda")  # fmt: skip
    given = make.operand("numbers", (8,), t, dense=True, value=numbers)
    applies = make.one_of(None, True, False)
    apply = None if applies is None else make.operand(
        "apply", (), torch.bool, value=torch.tensor(applies, device="cuda"), offset=0)  # fmt: skip
    inside = make.maybe(0.3)  # results where their operands lie
    inputs: list[torch.Tensor | None] = [given, apply]
    outputs: list[torch.Tensor | None] = []
    right: list[Result] = []
    n8 = [float(x) for x in given.double()]
    for i in range(count):
        shape = make.one_of((make.size(3000),), (make.size(60), make.size(60)))
        p, g = (make.operand(f"{name}{i}", shape, t, dense=True) for name in "pg")
        a = make.operand(f"m{i}", shape, t, scale=0.1, dense=True)
        v = make.operand(f"v{i}", shape, t, value=make.random(shape).square(), dense=True)
        inputs += [p, g, a, v]
        old, slope = p.double(), -g.double() if maximize else g.double()
        slope = slope + n8[0] * old if decay == "gradient" else slope
        start = old * n8[1] if decay == "parameter" else old
        m1 = a.double() + (slope - a.double()) * n8[2]
        v1 = v.double() * n8[3] + slope.square() * n8[4]
        new = start - n8[6] * m1 / (v1.sqrt() / n8[7] + n8[5])
        wanted = (new, m1, v1) if applies is not False else (old, a.double(), v.double())
        for name, before, value in zip(("p", "m", "v"), (p, a, v), wanted, strict=True):
            out = make.in_place(before) if inside else make.result(
                f"new_{name}{i}", shape, t, dense=True)  # fmt: skip
            outputs.append(out)
            right.append(Result(f"{name}{i}", out, value, 2.0**-19, 1.0))
    return m.problem(
        make, f"{count} parameters, decay {decay}, maximize {maximize}, apply {applies}, in place "
        f"{inside}", inputs, outputs, {"decay": decay, "maximize": int(maximize)}, lambda: right,
        repeats=not inside,
    )  # fmt: skip


def weight(
    make: Maker, name: str, n: int, k: int, bits: int, group: int, t: torch.dtype
) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """(operands, the weight in float64): as it is, or integers in pairs with scales of groups."""
    if bits == 16:
        w = make.operand(name, (n, k), t, dense=True, scale=k**-0.5)
        return [w], w.double()
    low, high = (-128, 128) if bits == 8 else (-8, 8)
    padded = -(-k // 64) * 64
    q = torch.from_numpy(make.rng.integers(low, high, (n, padded))).cuda()
    scales = torch.rand(-(-k // group), n, device="cuda") * k**-0.5 / high + 1e-3
    s = make.operand(f"{name}_scales", tuple(scales.shape), t, value=scales, dense=True)
    full = q[:, :k].double() * s.double().T.repeat_interleave(group, 1)[:, :k]
    if bits == 4:
        u = (q + 8).to(torch.uint8)
        q = u[:, ::2] | (u[:, 1::2] << 4)
    kind = torch.int8 if bits == 8 else torch.uint8
    return [make.operand(name, tuple(q.shape), kind, value=q, dense=True), s], full


def linears_of(make: Maker, m: Plugged, bits: int) -> Problem:
    kinds = ("bfloat16", "float16", "float32") if bits == 16 else ("bfloat16", "float16")
    kind = make.one_of(*kinds)
    t, k, group = DTYPES[kind], make.size(4096, 8), make.one_of(128, 256)
    k = max(128, k // 128 * 128) if bits != 16 or make.maybe(0.7) else max(8, k // 8 * 8)
    gated = make.maybe(0.4)
    count = 2 if gated else make.one_of(1, 1, 2, 3)
    sizes = [make.size(3000) for _ in range(count)]
    sizes = [max(16, n // 16 * 16) for n in sizes] if make.maybe(0.7) else sizes
    sizes = [sizes[0]] * 2 if gated else sizes
    rows = make.one_of(1, 1, 1, 2, 3, 5, 8) if bits == 16 and kind != "float32" else 1
    x = make.operand("x", (rows, k), t, dense=True)
    norm = make.operand("norm", (k,), t, dense=True) if make.maybe(0.7) else None
    centred = norm is not None and bits == 16 and rows == 1 and make.maybe()
    norm_bias = make.operand("shift", (k,), t, dense=True) if centred and make.maybe(0.8) else None
    alone = count == 1 and make.maybe()
    residual = make.operand("residual", (rows, sizes[0]), t, dense=True) if alone else None
    name, function = make.one_of(*_SOME) if gated or alone else ("none", lambda v: v)
    offset = 0.0 if centred else make.one_of(0.0, 1.0)
    row = x.double()
    if centred:
        row = row - row.mean(-1, keepdim=True)
    if norm is not None:
        squares = row.square().mean(-1, keepdim=True)
        row = row * torch.rsqrt(squares + 1e-5) * (norm.double() + offset)
    if norm_bias is not None:
        row = row + norm_bias.double()
    inputs: list[torch.Tensor | None] = [x, norm, norm_bias, residual]
    constant, products, scale = [1, 2], [], 1.0
    for i, n in enumerate(sizes):
        parts, full = weight(make, f"w{i}", n, k, bits, group, t)
        bias = (
            make.operand(f"bias{i}", (n,), t, dense=True) if not gated and make.maybe(0.3) else None
        )
        constant += range(len(inputs), len(inputs) + len(parts) + 1)
        inputs += [*parts, bias]
        products.append(row @ full.T + (0.0 if bias is None else bias.double()))
        scale = max(scale, product_scale(row, full.T))
    if gated:
        wanted = [function(products[0]) * products[1]]
        scale *= float(max(p.abs().max() for p in products)) + 1
    else:
        wanted = [function(p) for p in products]
    if residual is not None:
        wanted[0] = wanted[0] + residual.double()
        scale += float(residual.abs().max())
    y = [make.result(f"y{i}", (rows, w.shape[1]), t, dense=True) for i, w in enumerate(wanted)]
    attrs: dict[str, Any] = {"activation": name, "centred": int(centred), "eps": 1e-5,
                             "gated": int(gated), "weight_offset": offset}  # fmt: skip
    if bits != 16:
        attrs |= {"bits": bits, "group": group, "pairs": 1}
    bound = tolerance(kind, k, 4) + 2.0**-14
    return m.problem(
        make, f"{rows} {sizes} x {k} {kind} {bits} bits of {group} norm {norm is not None} "
        f"{centred} {name} gated {gated} residual {alone}", inputs, list(y), attrs,
        lambda: [Result(f"y{i}", a, b, bound, scale)
                 for i, (a, b) in enumerate(zip(y, wanted, strict=True))],
        constant=[i for i in constant if inputs[i] is not None],
    )  # fmt: skip


def linears(make: Maker, m: Plugged) -> Problem:
    return linears_of(make, m, 16)


def quant_linears(make: Maker, m: Plugged) -> Problem:
    return linears_of(make, m, make.one_of(8, 4))


def append_sdpa(make: Maker, m: Plugged) -> Problem:
    """Short caches mostly, and what lies behind the position may be anything."""
    kind = make.one_of("bfloat16", "float16", "float32")
    t, dim, turns = DTYPES[kind], make.one_of(64, 64, 128, 256), make.maybe(0.7)
    batch, groups, ratio = make.size(3), make.size(4), make.one_of(1, 2, 4, 8, 16)
    keys = make.size(1500 if make.maybe(0.8) else 4000)
    at = int(make.rng.integers(0, keys)) if make.maybe() else keys - 1
    ends = make.maybe(0.7)
    heads = groups * ratio
    q = make.operand("q", (batch, heads, 1, dim), t, order=make.one_of((0, 1, 2, 3), (0, 2, 1, 3)))
    fresh = [make.operand(n, (batch, groups, 1, dim), t) for n in ("k_new", "v_new")]
    angle = torch.rand(batch, 1, 1, dim, device="cuda") * 6
    angles = [make.operand(n, (batch, 1, 1, dim), t, value=v, dense=True)
              for n, v in (("cos", angle.cos()), ("sin", angle.sin())) if turns]  # fmt: skip
    position = make.operand("position", (1,), make.one_of(torch.int64, torch.int32), dense=True,
                            value=torch.tensor([at], device="cuda"), offset=0)  # fmt: skip
    shape = (batch, groups, keys, dim)
    caches = []
    for name in ("k", "v"):
        value = make.random(shape)
        if ends:
            value[:, :, at:] = float("nan")
        cache = make.operand(name, shape, t, value=value, offset=0)
        make.in_place(cache[:, :, at : at + 1])  # no other row may change
        caches.append(cache)
    mask, seen = None, torch.ones(batch, 1, 1, keys, dtype=torch.bool, device="cuda")
    if ends:
        seen = seen & (torch.arange(keys, device="cuda") <= at)
    if make.maybe(0.4) or not ends:
        drawn = torch.rand(batch, 1, 1, keys, device="cuda") < 0.7
        drawn[..., at] = True
        mask = make.operand("mask", (batch, 1, 1, keys), torch.bool, value=drawn)
        mask = mask.expand(batch, heads, 1, keys)
        seen = seen & drawn

    def turned(x: torch.Tensor) -> torch.Tensor:
        if not turns:
            return x.double()
        cos, sin = angles
        low, high = x.double().chunk(2, -1)
        return x.double() * cos.double() + torch.cat([-high, low], -1) * sin.double()

    new = [turned(fresh[0]).to(t), fresh[1]]
    wide = []
    for cache, row in zip(caches, new, strict=True):
        full = cache.double()
        full[:, :, at : at + 1] = row.double()
        wide.append(full.nan_to_num(0.0).repeat_interleave(ratio, 1))
    score = turned(q).to(t).double() @ wide[0].mT / dim**0.5
    o_wanted = torch.softmax(score.masked_fill(~seen, -float("inf")), -1) @ wide[1]
    o = make.result("o", (batch, heads, 1, dim), t)
    rounding, largest = 4 * tolerance(kind, keys), float(wide[1].abs().max()) + 1e-3

    def right() -> list[Result]:
        rows = [c[:, :, at : at + 1] for c in caches]
        return [Result("o", o, o_wanted, rounding, largest),
                Result("k", rows[0], new[0], 2 * EPSILON[kind], 1.0),
                Result("v", rows[1], new[1], 0.0)]  # fmt: skip

    return m.problem(
        make, f"{(batch, heads, dim)} x {keys} groups {groups} at {at} {kind} ends {ends} mask "
        f"{mask is not None} turns {turns}",
        [q, *fresh, *([a.expand(q.shape) for a in angles] or [None, None]), position, mask],
        [o, *caches],
        {"scale": dim**-0.5, "ends": int(ends), "stable": int(make.maybe())}, right,
    )  # fmt: skip
