"""The small framework on a GPU: every function's value and gradient, whole steps as one graph, and
nothing that waits for the device in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
rm = pytest.importorskip("rm_abstract")

from framework_cases import CASES, OPTIMIZERS, Case, Net, make_step  # noqa: E402 # torch is there

from rm_abstract import _core, nn, optim  # noqa: E402
from rm_abstract import functional as F  # noqa: E402
from rm_abstract.framework.tensor import executor  # noqa: E402

pytestmark = pytest.mark.cuda

# The plugin has no attention whose values are wider than its keys.
LEFT = {("scaled_dot_product_attention", ((1, 4, 3, 2), (1, 2, 3, 2), (1, 2, 3, 3)))}


@pytest.fixture(autouse=True)
def gpu(seed: int) -> Iterator[None]:
    torch.manual_seed(seed)
    rm.use_backend("cuda")
    yield
    rm.use_backend("cpu")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that are made from here on."""
    made: list[Any] = []
    make = _core.Program

    def keep(*arguments: Any, **named: Any) -> Any:
        made.append(make(*arguments, **named))
        return made[-1]

    monkeypatch.setattr(_core, "Program", keep)
    return made


def on(name: str, function: Callable[..., Any], values: list[Any], weights: Any = None) -> Any:
    """(value, weighed sum, tensors) on a backend; without weights only the value."""
    rm.use_backend(name)
    try:
        tensors = [rm.Tensor(v, requires_grad=True) for v in values]
        y = function(*tensors)
        return y, None if weights is None else (y * rm.Tensor(weights)).sum(), tensors
    finally:
        rm.use_backend("cuda")


def slope(case: Case, values: list[Any], weights: Any, at: int, j: int) -> float:
    """Of the weighed sum on the CPU in f64, by finite differences of one element."""
    sums = []
    for step in (1e-6, -1e-6):
        moved = [v.clone() for v in values]
        moved[at].view(-1)[j] += step
        with rm.no_grad():
            sums.append(on("cpu", case[1], moved, weights)[1].item())
    return (sums[0] - sums[1]) / 2e-6


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}{c[2]}")
def test_values_and_gradients_are_those_of_the_cpu_in_f64(case: Case) -> None:
    if (case[0], case[2]) in LEFT:
        with pytest.raises(rm.Error, match="sdpa"):
            on("cuda", case[1], [torch.randn(s) for s in case[2]])
        return
    values = [torch.randn(s, dtype=torch.float64) for s in case[2]]
    values = [v + v.sign() * 0.05 for v in values]  # off the kinks
    values = [v.float().double() for v in values]
    wanted = on("cpu", case[1], values)[0].torch()
    weights = torch.rand(wanted.shape, dtype=torch.float64) + 0.5
    y, loss, tensors = on("cuda", case[1], [v.float() for v in values], weights.float())
    assert y.torch().device.type == "cuda" and y.dtype == torch.float32
    torch.testing.assert_close(y.torch().cpu().double(), wanted, rtol=2e-3, atol=2e-4)
    loss.backward()
    for at, (v, tensor) in enumerate(zip(values, tensors, strict=True)):
        assert tensor.grad is not None and tensor.grad.torch().device.type == "cuda"
        found = tensor.grad.torch().reshape(-1).cpu()
        for j in range(0, v.numel(), max(1, v.numel() // 8)):
            expected = slope(case, values, weights, at, j)
            assert found[j].item() == pytest.approx(expected, rel=2e-3, abs=5e-4), (at, j)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_those_of_torch(dtype: Any) -> None:
    x, w, b = torch.randn(16, 32).cuda(), torch.randn(24, 32).cuda(), torch.randn(24).cuda()
    ours = [rm.Tensor(t.to(dtype), requires_grad=True) for t in (x, w, b)]
    theirs = [t.to(dtype).requires_grad_() for t in (x, w, b)]
    y = F.gelu(F.linear(*ours))
    z = torch.nn.functional.gelu(torch.nn.functional.linear(*theirs))
    torch.testing.assert_close(y.torch(), z.detach(), rtol=2e-2, atol=2e-2)
    y.sum().backward()
    z.sum().backward()
    for a, c in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad.torch(), c.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("ours, theirs, settings", OPTIMIZERS)
def test_optimizers_make_torchs_steps(ours: Any, theirs: Any, settings: dict[str, Any]) -> None:
    p = nn.Parameter(torch.randn(5))
    q = torch.nn.Parameter(p.torch().clone())
    mine, other = ours([p], **settings), theirs([q], **settings)
    for rate in (settings["lr"], settings["lr"] / 2, settings["lr"] / 2):
        mine.lr = other.param_groups[0]["lr"] = rate
        mine.zero_grad()
        other.zero_grad()
        (p * p * p).sum().backward()
        (q * q * q).sum().backward()
        mine.step()
        other.step()
        torch.testing.assert_close(p.torch(), q.detach())


def test_a_recorded_step_is_one_graph_and_trains_like_an_eager_one(compiled: list[Any]) -> None:
    eager, recorded = Net(), Net()
    recorded.load_state_dict(eager.state_dict())
    first, second = (optim.AdamW(n.parameters(), lr=1e-2, eps=1e-2) for n in (eager, recorded))
    a, b = make_step(eager, first), rm.record(make_step(recorded, second))
    for number in range(10):
        ids, target = (rm.Tensor(torch.randint(0, 4, (3, 6))) for _ in range(2))
        first.lr = second.lr = 1e-2 / (1 + number)
        assert b(ids, target).item() == pytest.approx(a(ids, target).item(), rel=1e-4)
    assert len(b.programs) == 1
    assert first.steps == second.steps == 10
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(recorded.state_dict()[name], value, rtol=1e-3, atol=1e-5)
    graphs = sorted(p.report()["recordings"] for p in compiled)
    assert graphs[-1] >= 1 and graphs[-2] == 0  # of the whole step, of no single operator


def test_losses_follow_those_of_the_cpu() -> None:
    # One batch again and again: of others a loss may rise by chance.
    batches = [[torch.randint(0, 4, (3, 6)) for _ in range(2)]] * 20
    start = {n: t.cpu() for n, t in Net().state_dict().items()}
    curves = []
    for name in ("cpu", "cuda"):
        rm.use_backend(name)
        net = Net()
        net.load_state_dict(start)
        step = rm.record(make_step(net, optim.AdamW(net.parameters(), lr=1e-2, eps=1e-2)))
        curves.append([step(rm.Tensor(x), rm.Tensor(y)).item() for x, y in batches])
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)
    assert curves[0][-1] < curves[0][0]


def test_replay_of_one_kernel_is_eager_bit_for_bit() -> None:
    recorded = rm.record(F.linear)
    for _ in range(6):  # launched, then a graph
        x, w = rm.Tensor(torch.randn(33, 65)), rm.Tensor(torch.randn(17, 65))
        assert torch.equal(recorded(x, w).torch(), F.linear(x, w).torch())


@pytest.mark.parametrize("whole", [False, True], ids=["eager", "recorded"])
def test_nothing_waits_for_the_device_in_a_step(whole: bool) -> None:
    net = Net()
    optimizer = optim.AdamW(net.parameters(), lr=1e-2)
    step = make_step(net, optimizer)
    step = rm.record(step) if whole else step
    ids, target = (rm.Tensor(torch.randint(0, 4, (3, 6))) for _ in range(2))
    losses = [step(ids, target) for _ in range(8)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(8):
            optimizer.lr = 1e-2 / (1 + number)
            losses.append(step(ids, target))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(losses[-1]) < float(losses[0])


def test_a_replay_draws_what_the_eager_step_would() -> None:
    def step(x: Any) -> Any:
        return F.dropout(F.dropout(x, 0.5), 0.25)

    x, recorded, drawn = torch.ones(50), rm.record(step), []
    for name, run in (("cpu", step), ("cuda", step), ("cuda", recorded)):
        rm.use_backend(name)
        rm.manual_seed(5)
        drawn.append([run(rm.Tensor(x)).torch().cpu() for _ in range(6)])
    for others in drawn[1:]:
        assert all(torch.equal(a, b) for a, b in zip(drawn[0], others, strict=True))


def test_arrays_come_back_and_checkpoints_cross(tmp_path: Path) -> None:
    x = rm.Tensor(torch.arange(6.0).reshape(2, 3))
    assert x.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert float(x.sum()) == 15.0 and x.torch().is_cuda
    shared = torch.ones(3, device="cuda")
    assert rm.Tensor(shared).torch().data_ptr() == shared.data_ptr()
    net = nn.Linear(3, 2)
    optimizer = optim.Adam(net.parameters(), lr=0.1)
    net(x).sum().backward()
    optimizer.step()
    file = tmp_path / "checkpoint.safetensors"
    nn.save(file, model=net, optimizer=optimizer)
    wanted = net(x).numpy()
    rm.use_backend("cpu")
    other = nn.Linear(3, 2)
    nn.load(file, model=other, optimizer=optim.Adam(other.parameters(), lr=1.0))
    torch.testing.assert_close(other.weight.torch(), net.weight.torch().cpu())
    rm.use_backend("cuda")
    again = nn.Linear(3, 2)
    again.load_state_dict(other.state_dict())
    assert (again(x).numpy() == wanted).all()


def test_the_current_stream_orders_the_work() -> None:
    x = rm.Tensor(torch.randn(512, 512))
    wanted = (x @ x @ x).torch().clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = (x @ x @ x).torch()
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(y, wanted)


def test_tensors_of_another_device_and_numbers_in_a_recording_are_refused() -> None:
    rm.use_backend("cpu")
    here = rm.Tensor(torch.ones(3))
    rm.use_backend("cuda")
    there = rm.Tensor(torch.ones(3))
    with pytest.raises(rm.Error):
        here + there
    with pytest.raises(rm.Error) as caught:
        rm.record(lambda t: t if t.sum() > 1.0 else -t)(there)
    assert caught.value.code == "RM707"
    with pytest.raises(rm.Error, match="GPUs"):
        rm.use_backend("cuda:64")
    assert executor().name == "cuda:0"
