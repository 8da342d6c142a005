"""sampling against its definition in float64, cuts, ties and draws exactly."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from arena import Arena
from problems import DTYPES, from_numpy, to_numpy

pytestmark = pytest.mark.cuda
KERNELS = ("sampling_cluster_sm90", "sampling_radix_any")


def kept(x: np.ndarray, temperature: float, top_k: int, top_p: float, slack: float) -> np.ndarray:
    """Probabilities in float64 after both cuts; the nucleus ends where top_p + slack is."""
    weight = np.exp((x - x.max()) / temperature)
    order = np.argsort(-x, kind="stable")
    if top_k:
        weight[order[top_k:]] = 0
    if top_p < 1:
        reached = np.cumsum(weight[order]) / weight.sum() >= top_p + slack
        if reached.any():
            weight[order[int(reached.argmax()) + 1 :]] = 0
    return weight / weight.sum()


def philox(seed: int, offset: int, row: int) -> int:
    """The first 64 bits of Philox 4x32-10."""
    c = [offset & 0xFFFFFFFF, offset >> 32, row, 0]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[1] << 32 | c[0]


def test_the_references_generator_gives_the_published_numbers() -> None:
    # Random123's kat_vectors for philox4x32-10
    assert philox(0, 0, 0) == 0xE169C58D << 32 | 0x6627E8D5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_tokens_are_drawn_from_the_cut_distribution(
    module: Callable[[str], ModuleType], dtype: str, kernel: str, seed: int
) -> None:
    m, rng = module("sampling"), np.random.default_rng(seed)
    torch.manual_seed(seed)
    for k in range(110):
        rows, n = int(rng.integers(1, 6)), int(np.exp(rng.uniform(0, np.log(262_144))))
        wide = torch.randn(rows, n + int(rng.integers(0, 3)) * 8, device="cuda") * 3
        x = wide.to(DTYPES[dtype])[:, :n]
        if k % 7 == 0:
            x[:, ::2] = -float("inf")
            x[:, 0] = 1.0
        temperature = float(rng.uniform(0.3, 2))
        top_k = int(rng.integers(1, [n + 2, 60][k % 4 // 2])) if k % 2 else 0
        top_p = float(rng.uniform(0.1, 1)) if k % 3 else 1.0
        u = torch.rand(rows, device="cuda")
        state = torch.tensor([seed + k, 2**40 + k], device="cuda")
        if k % 5 == 0:
            u = torch.tensor([philox(seed + k, 2**40 + k, r) / 2**64 for r in range(rows)])
        tokens = torch.full((rows,), -7, dtype=torch.int64, device="cuda")
        share = torch.full((rows,), -7.0, device="cuda")
        m.forward(x, None if k % 5 == 0 else u, rng=state if k % 5 == 0 else None, tokens=tokens,
                  probability=share, temperature=temperature, top_k=top_k, top_p=top_p,
                  kernel=kernel)  # fmt: skip
        host, picked, shares = x.double().cpu().numpy(), tokens.tolist(), share.tolist()
        for row, token in enumerate(picked):
            what = f"problem {k}, row {row}, n {n}, k {top_k}, p {top_p}, seed {seed}"
            assert 0 <= token < n, what
            if top_k == 1:
                assert token == int(host[row].argmax()), what
                continue
            # the end of the nucleus is uncertain by the rounding of its sum, no more
            ends = [kept(host[row], temperature, top_k, top_p, e) for e in (-1e-5, 1e-5)]
            fits = []
            for p in ends:
                below = p[:token].sum()
                near = below - 2e-5 <= float(u[row]) <= below + p[token] + 2e-5
                fits.append(bool(p[token] > 0 and near and abs(shares[row] - p[token]) < 1e-5))
            assert any(fits), f"{what}: token {token}, u {float(u[row])}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_grid_of_numbers_meets_every_kept_token_as_often_as_its_share(
    module: Callable[[str], ModuleType], kernel: str
) -> None:
    m, draws = module("sampling"), 20_000
    logits = torch.linspace(4, -4, 37, device="cuda").repeat(draws, 1)
    u = (torch.arange(draws, device="cuda") + 0.5) / draws
    tokens = torch.empty(draws, dtype=torch.int64, device="cuda")
    m.forward(logits, u, tokens=tokens, temperature=0.8, top_k=20, top_p=0.9, kernel=kernel)
    expected = kept(logits[0].double().cpu().numpy(), 0.8, 20, 0.9, 0.0) * draws
    counts = torch.bincount(tokens, minlength=37).cpu().numpy()
    assert np.abs(counts - expected).max() < 2 and bool((tokens.diff() >= 0).all())


@pytest.mark.parametrize("n", [8, 999, 50_000, 128_256, 262_144, 300_000])
@pytest.mark.parametrize("kernel", KERNELS)
def test_of_equal_logits_the_lower_indices_stay(
    module: Callable[[str], ModuleType], kernel: str, n: int
) -> None:
    m = module("sampling")
    if kernel == KERNELS[0] and n > 262_144:
        with pytest.raises(m.Unsupported, match="more than 262144"):
            m.forward_numpy(np.zeros((1, n), "float32"), temperature=0.0, kernel=kernel)
        return
    u = torch.tensor([0.0, 0.3, 0.5, 0.7, 0.999], device="cuda")
    for t in (torch.float32, torch.bfloat16):
        x = torch.zeros(5, n, device="cuda", dtype=t)
        x[:, n // 2] = -0.0
        x[:, 1] = -3.0
        tokens = torch.empty(5, dtype=torch.int64, device="cuda")
        m.forward(x, u, tokens=tokens, top_k=5, kernel=kernel)
        assert tokens.tolist() == [0, 2, 3, 4, 5], (n, t)
        x[:, 1] = 0.0
        m.forward(x, u, tokens=tokens, top_p=3.5 / n, kernel=kernel)
        assert tokens.tolist() == [0, 1, 2, 2, 3], (n, t)


@pytest.mark.parametrize("kernel", KERNELS)
def test_masses_of_long_rows_of_two_levels_are_added_without_loss(
    module: Callable[[str], ModuleType], kernel: str
) -> None:
    m, n = module("sampling"), 250_000
    x = torch.zeros(4, n, device="cuda").bfloat16()
    x[:, 1::2] = -0.3125
    u = torch.tensor([0.1, 0.5, 0.9, 0.9999], device="cuda")
    tokens, share = torch.empty(4, dtype=torch.int64, device="cuda"), torch.empty(4, device="cuda")
    for top_p in (0.4, 0.9):
        m.forward(x, u, tokens=tokens, probability=share, top_p=top_p, kernel=kernel)
        p = kept(x[0].double().cpu().numpy(), 1.0, 0, top_p, 0.0)
        for token, drawn, got in zip(tokens.tolist(), u.tolist(), share.tolist(), strict=True):
            assert abs(p[: token + 1].sum() - drawn) < 2e-5 and p[token] > 0
            assert abs(got / p[token] - 1) < 1e-4


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_without_a_finite_maximum_give_torchs_argmax(
    module: Callable[[str], ModuleType], kernel: str
) -> None:
    m, nan, inf = module("sampling"), float("nan"), float("inf")
    x = np.array(
        [[1, 3, 3, 0], [inf, 1, nan, nan], [-inf] * 4, [-inf, 2, -inf, 1], [0, inf, inf, 1]],
        "float32",
    )
    wanted = torch.from_numpy(x).argmax(1).tolist()
    assert wanted[1:3] == [2, 0]
    tokens, share = m.forward_numpy(x, temperature=0.0, kernel=kernel)
    assert tokens.tolist() == wanted == [1, 2, 0, 1, 1]
    np.testing.assert_array_equal(share, np.array([1, nan, nan, 1, nan], "float32"))
    u = np.array([0.1, 0.5, 0.5, 0.999, 0.5], "float32")
    tokens, share = m.forward_numpy(x, u, top_k=2, kernel=kernel)
    assert tokens.tolist() == [1, 2, 0, 3, 1]
    for temperature in (1e-300, 1e-30, 1e30):
        tokens, _ = m.forward_numpy(x, u, temperature=temperature, kernel=kernel)
        assert tokens[0] in (0, 1) and tokens[3] in (1, 3)


def test_the_numpy_form_gives_what_the_dlpack_form_gives_and_a_graph_draws_anew(
    module: Callable[[str], ModuleType],
) -> None:
    m = module("sampling")
    x = (torch.randn(4, 5000) * 2).bfloat16()
    state = torch.tensor([7, 0])
    tokens, share = m.forward_numpy(to_numpy(x), rng=state.numpy(), top_k=50)
    on, got = x.cuda(), torch.empty(4, dtype=torch.int64, device="cuda")
    there, device_state = torch.empty(4, device="cuda"), state.cuda()
    m.forward(on, tokens=got, probability=there, rng=device_state, top_k=50)
    assert torch.equal(from_numpy(tokens), got.cpu()) and torch.equal(
        from_numpy(share), there.cpu()
    )
    torch.cuda.synchronize()
    graph, seen = torch.cuda.CUDAGraph(), set()
    with torch.cuda.graph(graph):
        m.forward(on, tokens=got, rng=device_state, stream=torch.cuda.current_stream().cuda_stream)
        device_state[1] += 1
    for _ in range(8):
        graph.replay()
        seen.add(tuple(got.tolist()))
    assert len(seen) == 8


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_step_ends_as_torch_ends_it(
    module: Callable[[str], ModuleType], rows: int, ends: bool, padded: bool, seed: int
) -> None:
    """Over eight replays of a graph, the last of which find no row for their tokens."""
    m, arena = module("sampling"), Arena(8 << 20)
    torch.manual_seed(seed)
    places = 6
    source = torch.randint(0, 5, (8, rows), device="cuda")
    tokens = arena.result(arena.put(source[0], torch.long))
    found = arena.result(arena.put(torch.zeros(places, rows, device="cuda"), torch.long))
    length = arena.result(arena.put(torch.zeros((), device="cuda"), torch.long))
    positions = arena.result(arena.put(torch.arange(rows, device="cuda")[:, None], torch.long))
    mask = arena.result(arena.put(torch.rand(rows, 5, device="cuda") < 0.5, torch.long))
    going = arena.result(arena.put(torch.rand(rows, device="cuda") < 0.8, torch.bool))
    eos = arena.put(torch.tensor([3, 4], device="cuda"), torch.long)
    pad = arena.put(torch.tensor([9], device="cuda"), torch.long) if padded else None
    right = [t.clone() for t in (tokens, found, length, positions, going, mask)]
    arena.freeze()
    given = {"open": going, "eos": eos, "pad": pad} if ends else {}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        m.advance(tokens, found=found, length=length, positions=positions, mask=mask,
                  stream=stream, **given)  # fmt: skip
    for number in range(8):
        tokens.copy_(source[number])
        right[0].copy_(source[number])
        graph.replay()
        wanted, going_on = right[0], right[4]
        if ends:
            if pad is not None:
                wanted = torch.where(going_on, wanted, pad)
            right[4] = going_on & (wanted[:, None] != eos).all(dim=1)
        if number < places:
            right[1][number] = wanted
        right[0], right[2], right[3] = wanted, right[2] + 1, right[3] + 1
        right[5][:, number + 1 : number + 2] = 1
        all_got = (tokens, found, length, positions, going, mask)
        for got, want in zip(all_got, right, strict=True):
            assert torch.equal(got, want), f"step {number}"
    assert not arena.changed()


def test_an_end_of_a_step_that_is_not_legal_is_named(
    module: Callable[[str], ModuleType],
) -> None:
    m = module("sampling")
    tokens, found, length = (
        torch.zeros(s, dtype=torch.long, device="cuda") for s in ((2,), (4, 2), (1,))
    )
    with pytest.raises(m.InvalidArgument, match=r"found \[P, R\]"):
        m.advance(tokens, found=found[:, :1], length=length)
    with pytest.raises(m.InvalidArgument, match=r"tokens \[R\] of int64"):
        m.advance(tokens.int(), found=found, length=length)
    with pytest.raises(m.InvalidArgument, match=r"eos .* only with open"):
        m.advance(tokens, found=found, length=length, eos=tokens)
    with pytest.raises(m.InvalidArgument, match=r"mask \[R, C\]"):
        m.advance(tokens, found=found, length=length, mask=found)
    with pytest.raises(m.InvalidArgument, match="share"):
        m.advance(tokens, found=found, length=tokens[:1])


def test_what_is_not_legal_is_named(module: Callable[[str], ModuleType]) -> None:
    m, x = module("sampling"), np.zeros((2, 8), "float32")
    with pytest.raises(m.InvalidArgument, match=r"u \[R\] of float32 or rng"):
        m.forward_numpy(x)
    with pytest.raises(m.InvalidArgument, match="top_p > 0"):
        m.forward_numpy(x, np.zeros(2, "float32"), top_p=0.0)
    with pytest.raises(m.InvalidArgument, match=r"logits \[R, V\]"):
        m.forward_numpy(x[0])
    tokens, _ = m.forward_numpy(x[:0], temperature=0.0)
    assert tokens.shape == (0,)
