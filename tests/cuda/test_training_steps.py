"""``rm.compile_step`` of models on a GPU: the steps of eager, as one plan and one graph."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
rm = pytest.importorskip("rm_abstract")

from torch import nn  # noqa: E402 # torch is there from here on
from torch.nn import functional as F  # noqa: E402

pytestmark = pytest.mark.cuda

STRICT = {"fallback": "error"}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adam with decay": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=1e-2, maximize=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_CACHE_DIR", str(tmp_path / "cache"))


def mlp(width: int = 64) -> Any:
    torch.manual_seed(0)
    layers: list[Any] = []
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10)).cuda()


def batches(width: int = 64, rows: int = 16, count: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, width, generator=generator).cuda(),
            torch.randint(0, 10, (rows,), generator=generator).cuda(),
        )
        for _ in range(count)
    ]


def eager_step(model: Any, loss_fn: Any, optimizer: Any, batch: Any, clip: Any = None) -> float:
    optimizer.zero_grad()
    loss = loss_fn(model(batch[0]), batch[1])
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return float(loss)


def follow(
    model: Any, loss_fn: Any, make: Any, data: list[Any], steps: int = 24, **how: Any
) -> Any:
    """Trains a copy by eager, the model by a compiled step; their losses agree."""
    other = copy.deepcopy(model)
    optimizer, beside = make(model.parameters()), make(other.parameters())
    step = rm.compile_step(model, loss_fn, optimizer, options=STRICT, **how)
    for i in range(steps):
        batch = data[i % len(data)]
        wanted = eager_step(other, loss_fn, beside, batch, how.get("clip_norm"))
        got = step(*batch)
        assert got.device.type == "cuda"
        assert float(got) == pytest.approx(wanted, rel=1e-4), i
    report = step.report()
    assert report["compiled"] >= steps - 3, report
    assert report["reasons"] == {}
    return step, other, optimizer, beside


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_mlp_trains_as_in_eager(name: str) -> None:
    step, *_ = follow(mlp(), F.cross_entropy, OPTIMIZERS[name], batches())
    program = step.report()["programs"][0]
    assert program["native_nodes"] == program["nodes"]
    assert all(kernel.startswith("cuda/") for kernel in program["kernels"])


def test_all_parameters_are_updated_in_one_launch_of_one_graph() -> None:
    step, *_ = follow(mlp(), F.cross_entropy, OPTIMIZERS["adam"], batches(count=1))
    program = step.report()["programs"][0]
    updates = {k: n for k, n in program["kernels"].items() if "adam" in k}
    assert updates == {"cuda/adam_update_any": 1}  # of eight parameters
    assert program["recordings"] >= 1


def test_more_parameters_than_one_launch_takes() -> None:
    torch.manual_seed(0)
    layers = [module for _ in range(9) for module in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(32, 10)).cuda()
    step, *_ = follow(model, F.cross_entropy, OPTIMIZERS["adamw"], batches(width=32))
    kernels = step.report()["programs"][0]["kernels"]
    assert kernels["cuda/adam_update_any"] == 2  # twenty parameters, twelve a launch


def test_clipping_to_a_norm() -> None:
    step, *_ = follow(mlp(), F.cross_entropy, OPTIMIZERS["adamw"], batches(), clip_norm=0.1)
    assert step.grad_norm.device.type == "cuda"


def test_parameters_and_states_stay_torchs() -> None:
    model = mlp()
    places = [p.data_ptr() for p in model.parameters()]
    data = batches()
    step, other, optimizer, _ = follow(model, F.cross_entropy, OPTIMIZERS["sgd"], data)
    assert [p.data_ptr() for p in model.parameters()] == places
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)
    # A checkpoint goes on in eager, and eager's tensors in the step.
    fresh = mlp()
    fresh.load_state_dict(model.state_dict())
    again = OPTIMIZERS["sgd"](fresh.parameters())
    # Without the copy both optimizers would share their momentum buffers.
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for batch in data:
        mine = float(step(*batch))
        assert eager_step(fresh, F.cross_entropy, again, batch) == pytest.approx(mine, rel=1e-4)
    for batch in data:
        wanted = eager_step(fresh, F.cross_entropy, again, batch)
        assert eager_step(model, F.cross_entropy, optimizer, batch) == pytest.approx(
            wanted, rel=1e-4
        )
    wanted = eager_step(fresh, F.cross_entropy, again, data[0])
    assert float(step(*data[0])) == pytest.approx(wanted, rel=1e-4)


def test_rates_that_change_reach_the_graph() -> None:
    model = mlp()
    step, other, optimizer, beside = follow(model, F.cross_entropy, OPTIMIZERS["adam"], batches())
    for i, batch in enumerate(batches() * 2):
        for group in (*optimizer.param_groups, *beside.param_groups):
            group["lr"] = 1e-3 / (i + 1)
        wanted = eager_step(other, F.cross_entropy, beside, batch)
        assert float(step(*batch)) == pytest.approx(wanted, rel=1e-4)
    assert step.report()["reasons"] == {}


def test_other_sizes_get_a_program_of_their_own() -> None:
    model = mlp()
    step, other, _, beside = follow(model, F.cross_entropy, OPTIMIZERS["adam"], batches())
    for batch in batches(rows=5) * 2:
        wanted = eager_step(other, F.cross_entropy, beside, batch)
        assert float(step(*batch)) == pytest.approx(wanted, rel=1e-4)
    assert len(step.report()["programs"]) == 2


def test_a_model_that_moves_takes_its_step_along() -> None:
    model = mlp().cpu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = rm.compile_step(model, F.cross_entropy, optimizer, options=STRICT)
    data = batches()
    for x, y in data:
        assert step(x.cpu(), y.cpu()).device.type == "cpu"
    model.cuda()
    other = copy.deepcopy(model)
    beside = torch.optim.SGD(other.parameters(), lr=0.05)
    for batch in data:
        wanted = eager_step(other, F.cross_entropy, beside, batch)
        assert float(step(*batch)) == pytest.approx(wanted, rel=1e-4)
    kernels = step.report()["programs"][0]["kernels"]
    assert all(kernel.startswith("cuda/") for kernel in kernels)


def test_accumulated_micro_batches() -> None:
    model = mlp()
    other = copy.deepcopy(model)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    beside = OPTIMIZERS["adamw"](other.parameters())
    step = rm.compile_step(model, F.cross_entropy, optimizer, accumulate=2, options=STRICT)
    data = batches()
    for i in range(12):
        x, y = data[i % len(data)]
        loss = F.cross_entropy(other(x), y)
        (loss / 2).backward()
        assert float(step(x, y)) == pytest.approx(float(loss), rel=1e-4)
        if i % 2:
            beside.step()
            beside.zero_grad()
    assert step.report()["reasons"] == {}


def test_a_compiled_loss_gives_torchs_backward() -> None:
    model = mlp()
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    beside = torch.optim.SGD(other.parameters(), lr=0.05)
    compiled = rm.compile_loss(model, F.cross_entropy, options=STRICT)
    for batch in batches() * 2:
        optimizer.zero_grad()
        loss = compiled(*batch)
        loss.backward()
        optimizer.step()
        wanted = eager_step(other, F.cross_entropy, beside, batch)
        assert float(loss) == pytest.approx(wanted, rel=1e-4)
    assert compiled.report()["compiled"] >= 6


def test_a_loss_that_is_no_number_is_eagers() -> None:
    model = mlp()
    step, other, _, beside = follow(model, F.cross_entropy, OPTIMIZERS["adam"], batches())
    x, y = batches()[0]
    x = x.clone()
    x[0, 0] = float("nan")
    eager_step(other, F.cross_entropy, beside, (x, y))
    assert torch.isnan(step(x, y))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.isnan(), q.isnan())


class Gpt(nn.Module):
    def __init__(self, words: int = 50, width: int = 64, heads: int = 4, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head, self.heads = nn.Linear(width, words, bias=False), heads

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        rows, length, width = x.shape
        parts = self.qkv(self.first(x)).split(width, dim=2)
        q, k, v = (p.view(rows, length, self.heads, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return self.head(x + self.down(F.gelu(self.up(self.second(x)))))


def language_loss(logits: Any, targets: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def texts(count: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    data = [torch.randint(0, 50, (4, 17), generator=generator).cuda() for _ in range(count)]
    return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in data]


def test_a_gpt_trains_as_in_eager() -> None:
    torch.manual_seed(0)
    step, *_ = follow(Gpt().cuda(), language_loss, OPTIMIZERS["adamw"], texts())
    kernels = step.report()["programs"][0]["kernels"]
    assert any("scatter" in kernel for kernel in kernels)  # the gradient of the table of words


# ---- mixed precision and dropout -----------------------------------------------------------------


@pytest.mark.parametrize("what", ["mlp", "gpt"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_follows_autocast(what: str, precision: str) -> None:
    torch.manual_seed(0)
    model = mlp() if what == "mlp" else Gpt().cuda()
    loss_fn, data = (F.cross_entropy, batches()) if what == "mlp" else (language_loss, texts())
    other = copy.deepcopy(model)
    optimizer, beside = (
        OPTIMIZERS["adamw"](model.parameters()),
        OPTIMIZERS["adamw"](other.parameters()),
    )
    step = rm.compile_step(model, loss_fn, optimizer, precision=precision, options=STRICT)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    for i in range(24):
        x, y = data[i % len(data)]
        beside.zero_grad()
        with torch.autocast("cuda", dtype):
            loss = loss_fn(other(x), y)
        scaler.scale(loss).backward()
        scaler.step(beside)
        scaler.update()
        got = step(x, y)
        assert got.dtype == loss.dtype == torch.float32
        assert float(got) == pytest.approx(float(loss), rel=0.02), i
    report = step.report()
    assert report["reasons"] == {}
    assert report["compiled"] >= 18, report  # a scale that was too large shows nothing
    if precision == "fp16":
        assert step.scaler.get_scale() == scaler.get_scale()
    program = report["programs"][0]
    assert program["native_nodes"] == program["nodes"]


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, x: Any) -> Any:
        return self.last(F.dropout(torch.relu(self.first(x)), 0.25, self.training))


@pytest.mark.parametrize("precision", ["auto", "bf16"])
def test_dropout_draws_in_the_program(precision: str) -> None:
    torch.manual_seed(0)
    model = Dropped().cuda()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    step = rm.compile_step(model, F.cross_entropy, optimizer, precision=precision, options=STRICT)
    x, y = batches(count=1)[0]
    losses = [float(step(x, y)) for _ in range(40)]
    program = step.report()["programs"][0]
    assert any("uniform" in kernel for kernel in program["kernels"])
    assert step.report()["compiled"] >= 37
    assert len(set(losses[3:])) == len(losses[3:])  # each draws others
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (1027,), (64, 1000)])
def test_random_numbers_are_the_hosts(dtype: str, shape: tuple[int, ...]) -> None:
    from rm_abstract import _core, device

    device.load_plugins(gpu=True)
    sizes = ",".join(map(str, shape))
    text = f'rmir 1\ninput %0 "s" : i64[2]\n%1 = uniform(%0) : {dtype}[{sizes}]\nreturn %1\n'
    for state in ([0, 0], [2**62 + 12345, 2**33 + 7], [-1, -1]):
        given = torch.tensor(state)
        wanted = _core.Program(text, {}, ["cpu"]).run([given])[0]
        got = _core.Program(text, {}, ["cuda"]).run([given.cuda()])[0]
        assert torch.equal(got.cpu(), wanted)


# ---- what no program takes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, make, batch",
    [
        ("RM701", lambda p: torch.optim.Adam(p, fused=True), lambda b: b),
        ("RM701", lambda p: torch.optim.Adam(p, capturable=True), lambda b: b),
        ("RM703", lambda p: torch.optim.Adam(p), lambda b: (b[0], b[1].cpu())),
    ],
    ids=["fused", "capturable", "targets on the CPU"],
)
def test_what_is_left_to_eager_says_why(code: str, make: Any, batch: Any) -> None:
    model = mlp()
    optimizer = make(model.parameters())
    step = rm.compile_step(model, F.cross_entropy, optimizer, options={"fallback": "allow"})
    for given in batches():
        if code == "RM703":
            with pytest.raises(RuntimeError, match="device"):  # eager's own
                step(*batch(given))
        else:
            assert torch.isfinite(step(*batch(given)))
    assert code in step.report()["reasons"]
    assert step.report()["compiled"] == 0


# ---- operators against the host's kernels --------------------------------------------------------


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("apply", [None, True, False])
@pytest.mark.parametrize("decay", ["none", "gradient", "parameter"])
def test_adam_does_what_the_hosts_kernel_does(largest: bool, apply: Any, decay: str) -> None:
    from rm_abstract import _core, device

    device.load_plugins(gpu=True)
    for shape, maximize in itertools.product(((3, 5), (1024,), (7, 1000), (1,)), (0, 1)):
        kind = f"f32[{','.join(map(str, shape))}]"
        inputs = [torch.randn(shape) for _ in range(3)] + [torch.rand(shape)]
        inputs.append(torch.tensor([0.01, 0.99, 0.1, 0.999, 0.001, 1e-8, 1e-2, 0.5]))
        names = [kind] * 4 + ["f32[8]"]
        rest = []
        if largest:
            inputs.append(torch.rand(shape))
            names.append(kind)
            rest.append(f"%{len(inputs) - 1}")
        if apply is not None:
            rest += [] if largest else ["_"]
            inputs.append(torch.tensor(apply))
            names.append("bool[]")
            rest.append(f"%{len(inputs) - 1}")
        text = "rmir 1\n" + "".join(f'input %{i} "x{i}" : {t}\n' for i, t in enumerate(names))
        results = [f"%{len(inputs) + i}" for i in range(4 if largest else 3)]
        operands = ", ".join(["%0", "%1", "%2", "%3", "%4", *rest])
        text += f'{", ".join(results)} = adam({operands}) {{decay="{decay}", maximize={maximize}}}'
        text += " : " + ", ".join([kind] * len(results)) + f"\nreturn {', '.join(results)}\n"
        wanted = _core.Program(text, {}, ["cpu"]).run(inputs)
        got = _core.Program(text, {}, ["cuda"]).run([t.cuda() for t in inputs])
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rows, columns, words", [(40, 64, 7), (1000, 1500, 300), (1, 3, 2)])
def test_rows_that_are_added_to_a_table(rows: int, columns: int, words: int) -> None:
    from rm_abstract import _core, device

    device.load_plugins(gpu=True)
    text = (
        f'rmir 1\ninput %0 "x" : f32[{words},{columns}]\ninput %1 "i" : i64[{rows},1]\n'
        f'input %2 "s" : f32[{rows},{columns}]\n'
        f"%3 = expand(%1) {{shape=<{rows},{columns}>}} : i64[{rows},{columns}]\n"
        f'%4 = scatter(%0, %3, %2) {{axis=0, kind="add"}} : f32[{words},{columns}]\nreturn %4\n'
    )
    x, s = torch.randn(words, columns), torch.randn(rows, columns)
    i = torch.randint(0, words, (rows, 1))
    wanted = x.index_add(0, i[:, 0], s)
    program = _core.Program(text, {}, ["cuda"])
    given = [x.cuda(), i.cuda(), s.cuda()]
    got = program.run(given)[0]
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(program.run(given)[0], got)  # the same order each time
    assert any("scatter_add_rows" in kernel for kernel in program.report()["kernels"])


@pytest.mark.parametrize("kind", ["set", "add", "mul", "max", "min"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_elements_that_are_scattered(kind: str, axis: int) -> None:
    from rm_abstract import _core, device

    device.load_plugins(gpu=True)
    shape, small = [6, 5, 7], [6, 5, 7]
    small[axis] = 4
    wide, narrow = ",".join(map(str, shape)), ",".join(map(str, small))
    text = (
        f'rmir 1\ninput %0 "x" : f32[{wide}]\ninput %1 "i" : i64[{narrow}]\n'
        f'input %2 "s" : f32[{narrow}]\n'
        f'%3 = scatter(%0, %1, %2) {{axis={axis}, kind="{kind}"}} : f32[{wide}]\nreturn %3\n'
    )
    x, s = torch.randn(shape), torch.randn(small)
    i = torch.randint(0, shape[axis], small)
    if kind == "set":  # of two that fall on one element either may be there
        i = torch.rand(shape).argsort(axis).narrow(axis, 0, 4).contiguous()
    wanted = _core.Program(text, {}, ["cpu"]).run([x, i, s])[0]
    got = _core.Program(text, {}, ["cuda"]).run([x.cuda(), i.cuda(), s.cuda()])[0]
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-6, atol=1e-6)
