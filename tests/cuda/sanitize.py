"""Small problems of every operator and kernel, for compute-sanitizer.

    for tool in memcheck racecheck initcheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python tests/cuda/sanitize.py
    done

Host arrays in and out, so that only the operators' kernels run, and every result is read; what only
plans ask for (steps of attention, groups of products) has tensors on the device. With
names (`sanitize.py softmax gemm`) only those modules. Not a test: values are not looked at.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
RNG = np.random.default_rng(0)
TYPES = ("float32", "bfloat16", "float16")


def array(*shape: int, dtype: str = "bfloat16") -> np.ndarray:
    x = RNG.standard_normal(shape).astype("float32")
    if dtype == "bfloat16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(dtype)


def ids(count: int, below: int) -> np.ndarray:
    return RNG.integers(0, below, count)


def ewise() -> Iterator[Call]:
    code = [40, 0, 0, 1, -1, 14, 0, 3, -1, -1, 42, 0, 4, 2, -1]
    for n in (64, 37):
        x, z = array(5, n, dtype="float32"), array(5, n, dtype="float32")
        yield "forward_numpy", (code, [], [x, x[0], z]), {"dtype": x.dtype}
        yield "forward_numpy", (code, [], [x, x, z]), {"dtype": x.dtype}
        yield "backward_numpy", (code, [], [x, x, z], z), {}


def norm() -> Iterator[Call]:
    for t in TYPES:
        for n in (64, 37, 2048):
            x, w = array(9, n, dtype=t), array(n, dtype=t)
            yield "forward_numpy", (x, w, w, x), {"return_sum": True}
            yield "backward_numpy", (x, x, w), {"has_bias": True}
    for n, rows in ((768, 2500), (4096, 600)):  # several rows a ring
        x, w = array(rows, n), array(n)
        yield "forward_numpy", (x[:9], w, w), {"kernel": "norm_moments_sm80"}
        yield "backward_numpy", (x, x, w), {"has_bias": True, "kernel": "norm_ring_sm90"}


def rmsnorm() -> Iterator[Call]:
    for n in (64, 37):
        x, w = array(9, n), array(n)
        yield "forward_numpy", (x, w, None, x), {"return_sum": True}
        yield "backward_numpy", (x, x, w), {}


def softmax() -> Iterator[Call]:
    for t in TYPES:
        for n in (64, 37, 4096):
            x = array(5, n, dtype=t)
            yield "forward_numpy", (x,), {}
            yield "backward_numpy", (x, x), {"log": n == 64}


def cross_entropy() -> Iterator[Call]:
    for n in (640, 37):
        x, target, f = array(5, n), ids(5, n), array(5, dtype="float32")
        yield "forward_numpy", (x, target), {}
        yield "backward_numpy", (f, x, target, f), {}


def gemv() -> Iterator[Call]:
    for m in (1, 3):
        for n, k in ((256, 512), (37, 40)):
            yield "forward_numpy", (array(m, k), array(n, k), None, array(n)), {}
            w = RNG.integers(-127, 127, (n, k)).astype("int8")
            yield "forward_numpy", (array(m, k), w, array(1, n)), {}
    for m, n, k in ((1, 40, 512), (2, 37, 520), (3, 40, 1032), (8, 33, 264)):
        x, q = array(m, k, dtype="float16"), RNG.integers(-127, 127, (n, k)).astype("int8")
        yield "forward_numpy", (x, array(n, k, dtype="float16")), {"kernel": "gemv_waves_sm90"}
        if m > 1:
            continue
        s = array(4, n, dtype="float16")
        u = RNG.integers(0, 255, (n, k // 2)).astype("uint8")
        for kernel, w in product(("gemv_quant_sm90", "gemv_tensor_sm90"), (q, u)):
            yield "forward_numpy", (x, w, s), {"kernel": kernel}
    for m, n, k in ((3, 40, 1032), (8, 300, 8192)):
        yield "forward_numpy", (array(m, k), array(n, k)), {}
    yield from groups()
    x, s = array(1, 8448, dtype="float16"), array(66, 16, dtype="float16")  # one block, long rows
    for columns in (8448, 4224):
        w = RNG.integers(0, 127, (16, columns)).astype("int8" if columns == 8448 else "uint8")
        yield "forward_numpy", (x, w, s), {"kernel": "gemv_quant_sm90"}


def device(*shape: int, dtype: str = "bfloat16") -> Any:
    import torch

    return torch.randn(*shape, device="cuda").to(getattr(torch, dtype))


def groups() -> Iterator[Call]:
    """q, k and v of a decoder, and gate times up, behind a norm."""
    for m, k, dtype in ((1, 512, "bfloat16"), (8, 512, "float16"), (1, 512, "float32")):
        x, norm = device(m, k, dtype=dtype), device(k, dtype=dtype)
        w = [device(n, k, dtype=dtype) for n in (64, 32, 32)]
        y = [device(m, n, dtype=dtype) for n in (64, 32, 32)]
        yield "group", (x, w), {"y": y, "norm": norm}
        pair = [device(96, k, dtype=dtype) for _ in range(2)]
        options = {"gated": True, "activation": "silu"}
        yield "group", (x, pair), {"y": [device(m, 96, dtype=dtype)], "norm": norm, **options}


def steps() -> Iterator[Call]:
    """Attention of one new position: keys held whole, in a ring, in a long cache, in float32."""
    import torch

    for batch, groups, capacity, d, dtype in (
        (1, 2, 200, 64, "bfloat16"),
        (8, 8, 1040, 64, "bfloat16"),
        (8, 8, 1040, 128, "float16"),
        (1, 2, 5000, 128, "bfloat16"),
        (1, 2, 300, 64, "float32"),
    ):
        q, k, v = (device(batch, n, 1, d, dtype=dtype) for n in (4 * groups, groups, groups))
        table = device(batch, 1, 1, d, dtype=dtype)
        caches = [device(batch, groups, capacity, d, dtype=dtype) for _ in range(2)]
        at = torch.tensor([capacity // 2], device="cuda")
        space = torch.empty(load("sdpa").workspace(q, caches[0]), dtype=torch.uint8, device="cuda")
        for early in (False, True):
            options = {"o": torch.empty_like(q), "ends": True, "workspace": space}
            options |= {"overlap": early, "stable_caches": early}
            yield "step", (q, k, v, table, table, at, *caches), options


def gemm() -> Iterator[Call]:
    for m, n, k in ((64, 48, 32), (17, 33, 9), (256, 128, 128), (136, 264, 520)):
        a, b = array(m, k), array(k, n)
        yield "forward_numpy", (a, b, array(n)), {"activation": "silu", "return_aux": True}
        yield "backward_numpy", (array(m, n), a, b, array(m, n)), {
            "has_bias": True, "activation": "gelu",
        }  # fmt: skip
    for m, n, k in ((9, 33, 72), (65, 97, 136), (128, 144, 264), (64, 97, 1032)):  # few rows
        options = {"trans_b": True, "activation": "gelu", "return_aux": True}
        yield "forward_numpy", (array(m, k), array(n, k), array(n), array(m, n)), options


def sdpa() -> Iterator[Call]:
    shapes = ((33, 33, 64), (1, 300, 64), (64, 128, 64), (70, 130, 128), (70, 130, 256))
    for kind, (s, t, d) in [("bfloat16", shape) for shape in shapes] + [
        ("float32", shape) for shape in shapes[1:4]
    ]:
        q, g = (array(2, 4, s, d, dtype=kind) for _ in range(2))
        k, v = (array(2, 2, t, d, dtype=kind) for _ in range(2))
        yield "forward_numpy", (q, k, v), {"causal": s == t}
        o, lse = load("sdpa").forward_numpy(q, k, v, causal=s == t)
        yield "backward_numpy", (g, q, k, v, o, lse), {"causal": s == t}

    yield from steps()


def conv2d() -> Iterator[Call]:
    for c, o, groups, image in ((16, 24, 1, 9), (3, 8, 1, 12), (16, 16, 16, 7), (12, 6, 3, 6)):
        for layout in ("nchw", "nhwc"):
            x, w = (2, c, image, image), (o, c // groups, 3, 3)
            y = (2, o, image, image)
            if layout == "nhwc":
                x, w, y = ((s[0], *s[2:], s[1]) for s in (x, w, y))
            options = {"padding": (1, 1), "groups": groups, "layout": layout, "activation": "silu"}
            args = array(*x), array(*w)
            yield "forward_numpy", (*args, array(o)), options
            yield "backward_numpy", (array(*y), *args, array(*y)), options | {"has_bias": True}
    for t in ("bfloat16", "float32"):  # a sum in parts
        x, w = array(1, 256, 4, 4, dtype=t), array(64, 256, 3, 3, dtype=t)
        yield "forward_numpy", (x, w), {"padding": (1, 1)}
        yield "backward_numpy", (array(1, 64, 4, 4, dtype=t), x, w), {"padding": (1, 1)}


def sampling() -> Iterator[Call]:
    for n in (37, 9000):
        x, u = array(3, n), np.array([0.1, 0.5, 0.9], "float32")
        yield "forward_numpy", (x,), {"temperature": 0.0}
        yield "forward_numpy", (x, u), {"top_k": 20, "top_p": 0.8}


def copy() -> Iterator[Call]:
    for shape in ((33, 40), (5, 7), (2, 3, 64), (72, 136)):
        yield "forward_numpy", (array(*shape),), {"axes": list(range(len(shape)))[::-1]}


def rope() -> Iterator[Call]:
    for d in (64, 6):
        x, cos = array(2, 3, 5, d), array(1, 1, 5, d)
        yield "forward_numpy", (x, cos, cos), {}
        yield "backward_numpy", (x, cos, cos), {"interleaved": True}


def kv_append() -> Iterator[Call]:
    new, cache = array(2, 2, 3, 64), array(2, 2, 16, 64)
    yield "forward_numpy", (new, new, cache, cache, np.array([4, 15], "int32")), {}


def embedding() -> Iterator[Call]:
    for n in (64, 37):
        yield "forward_numpy", (array(30, n), ids(9, 30)), {}
        yield "backward_numpy", (array(9, n), ids(9, 30)), {"vocabulary": 30}


def reduction() -> Iterator[Call]:
    for shape, axes in (
        ((33, 64), [1]),
        ((33, 64), [0]),
        ((5, 7, 9), [0, 2]),
        ((40000,), [0]),
        ((3000, 64), [0]),
    ):
        for kind in ("sum", "argmax"):
            yield "forward_numpy", (array(*shape), kind), {"axes": axes}


def optim() -> Iterator[Call]:
    for n in (64, 37):
        p, m, v = array(n), array(n, dtype="float32"), np.ones(n, "float32")
        yield "step_numpy", (p, p, m, v), {"kind": "adamw", "lr": 0.1}
        yield "step_numpy", (p, p), {"kind": "sgd", "lr": 0.1}


MODULES: dict[str, Callable[[], Iterator[Call]]] = {
    "ewise": ewise, "layernorm": norm, "rmsnorm": rmsnorm, "softmax": softmax,
    "cross_entropy": cross_entropy, "gemv": gemv, "gemm": gemm, "sdpa": sdpa, "conv2d": conv2d,
    "sampling": sampling, "copy": copy, "rope": rope, "kv_append": kv_append,
    "embedding": embedding, "reduction": reduction, "optim": optim,
}  # fmt: skip


def load(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"_ops_{name}")
    except ModuleNotFoundError:
        return importlib.import_module(f"rm_abstract.ops._ops_{name}")


def run(name: str) -> str:
    """Every kernel of the operator on each problem that it takes."""
    m, ran = load(name), {}
    for function, args, options in MODULES[name]():
        table = getattr(m, "backward_kernels", m.kernels) if "back" in function else m.kernels
        call = getattr(m, function)
        rows = () if function in ("step", "group") else (row for row, _ in table())
        for kernel in ("", *rows):
            chosen = {"kernel": kernel} if kernel else {}
            try:
                call(*args, **options, **chosen)
            except m.Unsupported:
                continue
            except TypeError:
                if not kernel:
                    raise
                continue  # a function without a choice of kernels
            what = kernel or (function if function in ("step", "group") else "chosen")
            ran[what] = ran.get(what, 0) + 1
    return ", ".join(f"{what} {count}" for what, count in ran.items())


def main() -> None:
    failed = False
    for name in sys.argv[1:] or MODULES:
        try:
            print(f"{name}: {run(name)}", flush=True)
        except Exception as error:
            failed = True
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
