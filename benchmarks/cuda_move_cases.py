"""Cases of the operators that mostly move bytes: optimisers, rope, copies, reductions, sampling."""

from __future__ import annotations

import torch
from cuda_cases import MIB, SETS, Case, Maker, module, pair, rows, stream

HALF, SINGLE = torch.bfloat16, torch.float32


def optim_cases(dtype: torch.dtype) -> list[Case]:
    """40 tensors, 64 MiB of parameters in all; states in float32."""
    m, tag, sets = module("optim"), str(dtype)[6:], 2
    size = torch.empty(0, dtype=dtype).element_size()
    n = 64 * MIB // size // 40 // 8 * 8
    total = 40 * n

    def tensors(t: torch.dtype, scale: float) -> list[list[torch.Tensor]]:
        make = lambda: (torch.rand(n, device="cuda") * scale).to(t)  # noqa: E731
        return [[make() for _ in range(40)] for _ in range(sets)]

    p, g, m1, v1 = (tensors(t, s) for t, s in ((dtype, 1), (dtype, 1), (SINGLE, 1), (SINGLE, 1)))
    out = []
    for kind, states in (("sgd", 0), ("sgd momentum", 1), ("adam", 2), ("adamw", 2)):
        options = {"momentum": 0.9} if "momentum" in kind else {}
        name = kind.split()[0]

        def ours(k: int, name: str = name, states: int = states, options: dict = options) -> None:
            m.step(p[k], g[k], m1[k] if states else (), v1[k] if states == 2 else (), kind=name,
                   lr=1e-3, stream=stream(), **options)  # fmt: skip

        # torch's fused step wants states of the parameters' dtype
        own = [[x.to(dtype) for x in row] for row in m1], [[x.to(dtype) for x in row] for row in v1]
        steps = [torch.ones((), device="cuda") for _ in range(40)]

        def eager(k: int, name: str = name, states: int = states, own: tuple = own,
                  steps: list = steps) -> None:  # fmt: skip
            if name == "sgd":
                torch._fused_sgd_(
                    p[k], g[k], own[0][k] if states else [], weight_decay=0.0,
                    momentum=0.9 if states else 0.0, lr=1e-3, dampening=0.0, nesterov=False,
                    maximize=False, is_first_step=False,
                )  # fmt: skip
            else:
                call = torch._fused_adam_ if name == "adam" else torch._fused_adamw_
                call(p[k], g[k], own[0][k], own[1][k], [], steps, lr=1e-3, beta1=0.9, beta2=0.999,
                     weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)  # fmt: skip

        moved = total * (3 * size + states * 2 * 4)
        out.append(Case(f"{kind} 40 tensors {tag}", moved, ours, eager, sets))
    return out


def rope_case(dtype: torch.dtype) -> Case:
    b, h, s, d = 4, 32, 2048, 128
    m, size = module("rope"), torch.empty(0, dtype=dtype).element_size()
    x, y = ([torch.randn(b, h, s, d, device="cuda").to(dtype) for _ in range(SETS)] for _ in "xy")
    cos, sin = torch.randn(2, 1, 1, s, d, device="cuda").to(dtype)
    wide = cos.expand(b, h, s, d), sin.expand(b, h, s, d)

    def plain(t: torch.Tensor) -> torch.Tensor:
        turned = torch.cat((-t[..., d // 2 :], t[..., : d // 2]), -1)
        return t * cos + turned * sin

    return pair(f"rope 4 x 32 x 2048 x 128 {str(dtype)[6:]}", 2 * b * h * s * d * size,
                lambda k: m.forward(x[k], *wide, y=y[k], stream=stream()), plain,
                lambda k: (x[k],))  # fmt: skip


def copy_cases(dtype: torch.dtype) -> list[Case]:
    m, tag = module("copy"), str(dtype)[6:]
    x, y = rows(4096, dtype), rows(4096, dtype)
    n = x[0].shape[0]
    flipped = [t.view(4096, n) for t in y]
    heads = [t.view(n // 512, 512, 32, 128).transpose(1, 2) for t in x]
    merged = [t.view(n // 512, 32, 512, 128) for t in y]
    strip = [t.view(n * 2, 2048)[:, 8:1992] for t in x]
    packed = [t.view(-1)[: n * 2 * 1984].view(n * 2, 1984) for t in y]
    halves = [t.view(2, n // 2, 4096) for t in x]
    joined = [t.view(n // 2, 8192) for t in y]
    size = x[0].element_size()
    clone = lambda t, out: out.copy_(t)  # noqa: E731
    return [
        pair(f"transpose {n} x 4096 {tag}", 128 * MIB,
             lambda k: m.forward(x[k].mT, y=flipped[k], stream=stream()), clone,
             lambda k: (x[k].mT, flipped[k])),
        pair(f"heads to rows {tag}", 128 * MIB,
             lambda k: m.forward(heads[k], y=merged[k], stream=stream()), clone,
             lambda k: (heads[k], merged[k])),
        pair(f"slice of columns {tag}", 2 * strip[0].numel() * size,
             lambda k: m.forward(strip[k], y=packed[k], stream=stream()), clone,
             lambda k: (strip[k], packed[k])),
        Case(f"concat of 2 along columns {tag}", 128 * MIB,
             lambda k: m.concat([halves[k][0], halves[k][1]], 1, y=joined[k], stream=stream()),
             lambda k: torch.cat([halves[k][0], halves[k][1]], 1, out=joined[k])),
    ]  # fmt: skip


def reduction_cases(dtype: torch.dtype) -> list[Case]:
    m, tag, out = module("reduction"), str(dtype)[6:], []
    x = rows(4096, dtype)
    n = x[0].shape[0]
    for kind, axes in (("sum", [1]), ("sum", [0]), ("sum", [0, 1]), ("max", [1]), ("argmax", [1])):
        shape = [1 if d in axes else size for d, size in enumerate((n, 4096))]
        t = torch.int64 if kind == "argmax" else dtype
        y = torch.empty(shape, device="cuda", dtype=t)
        size = m.workspace(x[0], kind, y=y)
        space = torch.empty(size, device="cuda", dtype=torch.uint8)
        call = getattr(torch, kind if kind != "max" else "amax")
        dim = axes[0] if kind == "argmax" else axes
        out.append(
            pair(f"{kind} over axes {axes} {tag}",
                 64 * MIB, lambda k, kind=kind, y=y, space=space:
                 m.forward(x[k], kind, y=y, workspace=space, stream=stream()),
                 lambda t, call=call, dim=dim: call(t, dim), lambda k: (x[k],))
        )  # fmt: skip
    return out


def table_cases() -> list[Case]:
    embedding, kv = module("embedding"), module("kv_append")
    table = torch.randn(128256, 2048, device="cuda").bfloat16()
    ids = [torch.randint(0, 128256, (16384,), device="cuda") for _ in range(SETS)]
    y = rows(2048, HALF)
    k, v = (torch.randn(32, 8, 512, 128, device="cuda").bfloat16() for _ in "kv")
    caches = [torch.zeros(2, 32, 8, 2048, 128, device="cuda").bfloat16() for _ in range(2)]
    at = torch.full((32,), 700, dtype=torch.int32, device="cuda")

    def eager(i: int) -> None:
        caches[i][0, :, :, 700:1212] = k
        caches[i][1, :, :, 700:1212] = v

    return [
        pair("embedding 16384 of 128256 x 2048 bfloat16", 128 * MIB,
             lambda i: embedding.forward(table, ids[i], y=y[i], stream=stream()),
             lambda i: torch.nn.functional.embedding(i, table), lambda i: (ids[i],)),
        Case("kv_append 32 x 8 x 512 x 128 bfloat16", 4 * k.numel() * 2,
             lambda i: kv.forward(k, v, caches[i][0], caches[i][1], at, stream=stream()), eager, 2),
    ]  # fmt: skip


def tiny_cases() -> list[Case]:
    calls = 64
    x, y = torch.randn(2, 1, 32, 1, 128, device="cuda").bfloat16()
    cos, sin = torch.randn(2, 1, 1, 1, 128, device="cuda").bfloat16().expand(2, 1, 32, 1, 128)
    total = torch.empty(1, device="cuda").bfloat16()
    flat, turned = x.view(32, 128), torch.empty(128, 32, device="cuda").bfloat16()
    table = torch.randn(1000, 2048, device="cuda").bfloat16()
    one, picked = torch.tensor([7], device="cuda"), torch.empty(1, 2048, device="cuda").bfloat16()
    k, v = torch.randn(2, 1, 8, 1, 128, device="cuda").bfloat16()
    cache, at = (
        torch.zeros(2, 1, 8, 64, 128, device="cuda").bfloat16(),
        torch.tensor([5], device="cuda"),
    )
    p, g = torch.randn(2, 2048, device="cuda")
    m1, v1 = torch.rand(2, 2048, device="cuda")
    step = [torch.ones((), device="cuda")]
    rope, copy, reduction = module("rope"), module("copy"), module("reduction")
    embedding, kv, optim = module("embedding"), module("kv_append"), module("optim")

    def turn(t: torch.Tensor) -> torch.Tensor:
        return t * cos + torch.cat((-t[..., 64:], t[..., :64]), -1) * sin

    def write(_: int) -> None:
        cache[0][:, :, 5:6] = k
        cache[1][:, :, 5:6] = v

    def adamw(_: int) -> None:
        torch._fused_adamw_([p], [g], [m1], [v1], [], step, lr=1e-3, beta1=0.9, beta2=0.999,
                            weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)  # fmt: skip

    plain = [
        ("rope 1 x 32 x 1 x 128", lambda _: rope.forward(x, cos, sin, y=y, stream=stream()),
         lambda _: turn(x)),
        ("transpose 32 x 128", lambda _: copy.forward(flat.mT, y=turned, stream=stream()),
         lambda _: turned.copy_(flat.mT)),
        ("sum of 4096", lambda _: reduction.forward(x.view(-1), "sum", y=total, stream=stream()),
         lambda _: x.sum()),
        ("embedding of 1", lambda _: embedding.forward(table, one, y=picked, stream=stream()),
         lambda _: torch.nn.functional.embedding(one, table)),
        ("kv_append of 1", lambda _: kv.forward(k, v, cache[0], cache[1], at, stream=stream()),
         write),
        ("adamw of 2048 float32",
         lambda _: optim.step([p], [g], [m1], [v1], kind="adamw", lr=1e-3, stream=stream()), adamw),
    ]  # fmt: skip
    return [Case(f"tiny {name}", 0, ours, eager, calls) for name, ours, eager in plain]


def sampling_cases(count: int, vocabulary: int) -> list[Case]:
    m, tag = module("sampling"), f"{count} x {vocabulary} bfloat16"
    x = (torch.randn(count, vocabulary, device="cuda") * 3).bfloat16()
    rng = torch.tensor([1, 0], device="cuda")
    tokens = torch.empty(count, dtype=torch.int64, device="cuda")

    def plain(_: int) -> torch.Tensor:
        """transformers' warpers and multinomial, on the device."""
        scores = x.float() / 0.8
        least = torch.topk(scores, 50)[0][..., -1, None]
        scores = scores.masked_fill(scores < least, -float("inf"))
        ordered, index = torch.sort(scores, descending=False)
        cut = ordered.softmax(-1).cumsum(-1) <= 0.1
        cut[..., -1:] = False
        scores = scores.masked_fill(cut.scatter(1, index, cut), -float("inf"))
        return torch.multinomial(scores.softmax(-1), 1)

    return [
        Case(f"argmax {tag}", 0,
             lambda _: m.forward(x, tokens=tokens, temperature=0.0, stream=stream()),
             lambda _: x.argmax(-1), 16),
        Case(f"sampling top-k 50 top-p 0.9 {tag}", 0,
             lambda _: m.forward(x, tokens=tokens, rng=rng, temperature=0.8, top_k=50, top_p=0.9,
                                 stream=stream()), plain, 4),
        Case(f"sampling top-p 0.9 {tag}", 0,
             lambda _: m.forward(x, tokens=tokens, rng=rng, temperature=0.8, top_p=0.9,
                                 stream=stream()), plain, 4),
    ]  # fmt: skip


def makers() -> list[Maker]:
    out: list[Maker] = [("optim", lambda d=d: optim_cases(d)) for d in (HALF, SINGLE)]
    out += [("rope", lambda d=d: [rope_case(d)]) for d in (HALF, SINGLE)]
    out += [("copy", lambda d=d: copy_cases(d)) for d in (HALF, SINGLE)]
    out += [("reduction", lambda d=d: reduction_cases(d)) for d in (HALF, SINGLE)]
    out += [("tables", table_cases), ("tiny_moves", tiny_cases)]
    return out + [("sampling", lambda n=n: sampling_cases(n, 128256)) for n in (1, 64)]
