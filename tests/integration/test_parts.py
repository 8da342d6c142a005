"""A model that cannot be captured whole is served in parts: what PyTorch would have returned, with
whatever the model does to its parts between and inside its calls."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rm_abstract as rm
from rm_abstract.engines import trial
from rm_abstract.hooks import parts
from rm_abstract.hooks.host import SLOT

KEEPS = {"when_slower": "compiled"}  # tiny modules lose; what is tested is that they are right


class Knob:
    """An argument that no program takes (RM104)."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer, self.norm, self.factor = nn.Linear(width, width), nn.LayerNorm(width), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x).relu()) * self.factor


class Steps(nn.Module):
    """Never calls the container of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, knob: Knob) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * knob.scale
        return self.head(x)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(parts, "_WORTH_S", 0.0)
    monkeypatch.setattr(parts, "_WORTH_SHARE", 0.0)
    yield rm.init("cpu", compile_options=KEEPS)
    rm.shutdown()


def routed(model: nn.Module) -> dict[str, int]:
    """Calls served by a program, by part."""
    return {part["part"]: part["routed"] for part in rm.explain(model).models[0]["parts"]}


def same(model: nn.Module, *args: Any, calls: int = 1) -> None:
    for _ in range(calls):
        with torch.no_grad():
            found = model(*args)
            with rm.disabled():
                torch.testing.assert_close(found, model(*args), rtol=1e-4, atol=1e-5)


def ready(model: nn.Module, *args: Any, calls: int = 4) -> nn.Module:
    """Caught, refused, measured, and its parts compiled."""
    torch.manual_seed(1)
    rm.accelerate(model.eval())
    same(model, *args, calls=calls)
    return model


def test_the_parts_serve_and_the_report_names_them_with_their_shares(session: Any) -> None:
    model = ready(Steps(), torch.randn(5, 8), Knob())
    assert set(routed(model)) == {"blocks.0", "blocks.1", "head"}
    assert all(calls > 0 for calls in routed(model).values())
    report = rm.explain(model)
    assert report.routed == 0
    assert report.routed_in_parts == sum(routed(model).values())
    text = str(report)
    assert "served in parts: 3 of 3 modules tried" in text
    assert "blocks.0 (" in text
    assert "RM104" in text
    rows = json.loads(report.to_json())["models"][0]["parts"]
    assert all(0 < row["share"] <= 1 for row in rows)
    assert len(rm.explain().models) == 1  # parts are no models of their own
    same(model, torch.randn(2, 3, 8), Knob(0.5), calls=3)


def test_parts_that_are_too_short_to_gain_stay_with_pytorch(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_WORTH_S", 1e9)
    model = ready(Steps(), torch.randn(5, 8), Knob())
    assert routed(model) == {}
    assert all(SLOT not in vars(part) for part in model.modules() if part is not model)


class Shared(nn.Module):
    """One block under two names, called with several shapes in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = self.first

    def forward(self, x: torch.Tensor, knob: Knob) -> torch.Tensor:
        wide = self.second(torch.stack([x, x + 1]))
        return self.first(x) + wide.sum(0) + self.second(x[:1])


def test_a_shared_part_is_called_with_several_shapes_in_one_forward(session: Any) -> None:
    model = ready(Shared(), torch.randn(4, 8), Knob())
    assert list(routed(model)) == ["first"]
    assert routed(model)["first"] >= 3
    other = ready(Shared(), torch.randn(4, 8), Knob())
    other.first = model.first  # now a part of two models
    same(other, torch.randn(4, 8), Knob(), calls=3)
    same(model, torch.randn(4, 8), Knob(), calls=3)


class Editor(nn.Module):
    """Changes its part inside forward, in another way at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Block()
        self.step = 0

    def forward(self, x: torch.Tensor, knob: Knob) -> torch.Tensor:
        edits = (
            lambda: self.part.layer.weight.add_(0.5),
            lambda: self.part.layer.weight.data.mul_(0.5),
            lambda: setattr(self.part, "factor", self.part.factor + 1),
            lambda: setattr(self.part.layer, "bias", nn.Parameter(torch.full((8,), 3.0))),
            lambda: setattr(self.part, "norm", nn.Identity()),
        )
        if knob.scale < 0:
            edits[self.step % len(edits)]()
        return self.part(x)


def test_what_the_model_changes_in_a_part_is_seen(session: Any) -> None:
    model = ready(Editor(), torch.randn(4, 8), Knob())
    before = routed(model)["part"]
    assert before > 0
    x = torch.randn(4, 8)
    for step in range(5):
        model.step = step
        with torch.no_grad():
            old = model(x, Knob())
            found = model(x, Knob(-1.0))  # changes the part, then calls it
        assert not torch.allclose(old, found)
        same(model, x, Knob(), calls=2)  # the changed part, with and without us
        with torch.no_grad(), rm.disabled():
            torch.testing.assert_close(found, model(x, Knob()), rtol=1e-4, atol=1e-5)
    assert routed(model)["part"] > before


def test_hooks_of_a_part_run_at_every_call(session: Any) -> None:
    model = ready(Steps(), torch.randn(5, 8), Knob())
    before, seen = routed(model), []
    handle = model.blocks[0].layer.register_forward_hook(
        lambda module, args, output: seen.append(1) or output + 1
    )
    same(model, torch.randn(5, 8), Knob(), calls=3)
    assert len(seen) == 6  # ours and the one under disabled()
    assert routed(model)["blocks.0"] == before["blocks.0"]
    handle.remove()
    same(model, torch.randn(5, 8), Knob(), calls=3)
    assert len(seen) == 6


def test_gradients_pass_through_parts_as_without_us(session: Any) -> None:
    model = ready(Steps(), torch.randn(5, 8), Knob())
    before = routed(model)
    x = torch.randn(5, 8, requires_grad=True)
    model(x, Knob()).square().sum().backward()
    assert routed(model) == before
    found, x.grad = x.grad, None
    weight = model.head.weight.grad
    model.zero_grad()
    with rm.disabled():
        model(x, Knob()).square().sum().backward()
    torch.testing.assert_close(found, x.grad)
    torch.testing.assert_close(weight, model.head.weight.grad)


def test_a_part_in_training_mode_is_pytorchs(session: Any) -> None:
    model = ready(Steps(), torch.randn(5, 8), Knob())
    model.blocks[0].norm = nn.Dropout(0.9)
    model.train()
    before = routed(model)
    with torch.no_grad():
        assert (model.blocks[0](torch.ones(4, 8)) == 0).any()
        model(torch.randn(5, 8), Knob())
    assert routed(model) == before
    model.eval()
    same(model, torch.randn(5, 8), Knob(), calls=3)


class Odd(nn.Module):
    """Gives its input, a view of it, a buffer, something folded, and a transposed result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("table", torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> Any:
        return x, x[1:], self.table * 2, (x @ self.weight).t()


class Writer(nn.Module):
    """Writes into what its part gave it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Odd()

    def forward(self, x: torch.Tensor, knob: Knob) -> Any:
        x = x.clone()
        own, view, folded, turned = self.part(x)
        facts = own is x, view.data_ptr() == x[1:].data_ptr(), turned.stride()
        folded.add_(1)
        view.mul_(2)
        turned.sub_(1)
        return x, own, folded, turned, torch.tensor([float(facts[0]), facts[1], *facts[2]])


def test_a_model_may_write_into_what_a_part_gives(session: Any) -> None:
    model = ready(Writer(), torch.randn(4, 8), Knob(), calls=6)
    assert rm.explain(model).models[0]["parts"], str(rm.explain(model))


class Taker(nn.Module):
    """A part that is given the object too: what it holds takes its place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: torch.Tensor, knob: Knob) -> torch.Tensor:
        return self.inner(x) * knob.scale


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = Taker()

    def forward(self, x: torch.Tensor, knob: Knob) -> torch.Tensor:
        return self.outer(x, knob)


def test_parts_of_a_part_that_cannot_be_served_take_its_place(session: Any) -> None:
    model = ready(Nested(), torch.randn(4, 8), Knob(), calls=5)
    assert routed(model)["outer"] == 0
    assert routed(model)["outer.inner"] > 0


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.calls = Block(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.part(x) * self.calls


def test_a_model_with_effects_has_them_once_a_call(session: Any) -> None:
    model = Counter().eval()
    rm.accelerate(model)
    plain = copy.deepcopy(model)
    assert SLOT not in vars(plain) or vars(plain)[SLOT] is None
    x = torch.randn(4, 8)
    for _ in range(8):
        with torch.no_grad():
            found = model(x)
            with rm.disabled():
                torch.testing.assert_close(found, plain(x), rtol=1e-4, atol=1e-5)
    assert model.calls == 8
    assert routed(model)["part"] > 0
    rm.memory.unload(model)
    assert routed(model) == {}
    with torch.no_grad():
        for _ in range(6):
            model(x)
    assert routed(model)["part"] > 0  # chosen anew


def test_copies_leave_without_routers_and_the_end_takes_them_out(session: Any) -> None:
    model = ready(Steps(), torch.randn(5, 8), Knob())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(vars(part).get(SLOT) is None for part in other.modules())
    shallow = copy.copy(model.head)
    shallow.weight = nn.Parameter(torch.zeros(3, 8))
    with torch.no_grad():
        assert torch.equal(shallow(torch.ones(2, 8)), model.head.bias.expand(2, 3))
    explicit = rm.accelerate(model.head)  # the user names it: a model of its own from now on
    assert explicit is model.head
    assert rm.explain(model.head).models[0]["caught_by"] == "accelerate"
    rm.shutdown()
    assert all(SLOT not in vars(part) for part in model.modules())
    assert rm.explain().models


def test_threads_share_the_parts(session: Any) -> None:
    model = Steps().eval()
    rm.accelerate(model)
    x = torch.randn(5, 8)
    with torch.no_grad(), rm.disabled():
        expected = model(x, Knob())
    found: list[torch.Tensor] = []

    def work() -> None:
        with torch.no_grad():
            for _ in range(6):
                found.append(model(x, Knob()))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 18
    for output in found:
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    same(model, x, Knob(), calls=2)
    assert sum(routed(model).values()) > 0


def test_generation_of_a_model_with_effects_uses_the_parts_without_caches(session: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2
    )
    config.num_attention_heads = config.num_key_value_heads = 2
    torch.manual_seed(4)
    seen: list[int] = []

    class Watched(transformers.LlamaForCausalLM):  # type: ignore[misc,name-defined]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(len(seen))
            return super().forward(*args, **kwargs)

    model = Watched(config).eval()
    rm.accelerate(model)
    asked = {"input_ids": torch.arange(5)[None], "max_new_tokens": 6, "do_sample": False}
    asked |= {"return_dict_in_generate": True, "output_logits": True}
    with rm.disabled():
        expected = model.generate(**asked)
    calls = len(seen)
    for _ in range(2):
        found = model.generate(**asked)
        # The first logits: a later token may be another one where two are equally likely.
        torch.testing.assert_close(found.logits[0], expected.logits[0], rtol=1e-4, atol=1e-5)
    assert len(seen) == 3 * calls
    served = routed(model)
    assert any(name.endswith("mlp") and number for name, number in served.items()), str(served)
    assert not any(name.endswith("self_attn") and number for name, number in served.items())


class Between(nn.Module):
    """Does something of the test's between its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.act: Any = None

    def forward(self, x: torch.Tensor, knob: Knob) -> torch.Tensor:
        x = self.first(x)
        if self.act is not None:
            self.act()
        return self.second(x)


@pytest.mark.parametrize("before", range(4))
def test_the_end_of_the_session_inside_a_call_leaves_no_router(session: Any, before: int) -> None:
    model, x = Between().eval(), torch.randn(4, 8)
    rm.accelerate(model)
    same(model, x, Knob(), calls=before)
    expected = copy.deepcopy(model)
    model.act = rm.shutdown
    with torch.no_grad():
        found = model(x, Knob())
    torch.testing.assert_close(found, expected(x, Knob()), rtol=1e-4, atol=1e-5)
    assert all(SLOT not in vars(part) for part in model.modules())


@pytest.mark.parametrize("before", range(4))
def test_an_exception_between_two_parts_is_the_users(session: Any, before: int) -> None:
    def fail() -> None:
        raise KeyboardInterrupt("between")

    model, x = Between().eval(), torch.randn(4, 8)
    rm.accelerate(model)
    same(model, x, Knob(), calls=before)
    model.act = fail
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt, match="between"), torch.no_grad():
            model(x, Knob())
    model.act = None
    same(model, x, Knob(), calls=6)
    assert set(routed(model)) == {"first", "second"}
    assert all(routed(model).values())


def test_a_part_that_is_slower_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is told what it measured: the programs take five times PyTorch's time."""
    monkeypatch.setattr(parts, "_WORTH_S", 0.0)
    monkeypatch.setattr(parts, "_WORTH_SHARE", 0.0)
    asked: list[int] = []

    def measure(compiled: Any, eager: Any) -> tuple[float, float]:
        asked.append(1)
        return 20e-6, 4e-6

    monkeypatch.setattr(trial, "_measure", measure)
    rm.init("cpu", compile_options={"when_slower": "eager"})
    try:
        model, x = Between(), torch.randn(4, 8)
        ready(model, x, Knob(), calls=trial.CALLS + 10)
        assert len(asked) == 2
        before = routed(model)
        reasons = [r["code"] for p in rm.explain(model).models[0]["parts"] for r in p["reasons"]]
        assert reasons.count("RM111") == 2
        # Their routers left: PyTorch's own calls of the parts are all that is left, and stay so.
        same(model, x, Knob(), calls=10)
        assert routed(model) == before
        assert SLOT not in vars(model.first)
        assert SLOT not in vars(model.second)
    finally:
        rm.shutdown()


SCRIPT = """
import json, sys
import torch
import rm_abstract as rm
from rm_abstract.hooks import parts

sys.path.insert(0, sys.argv[1])
from uncapturable import Model

parts._WORTH_S = parts._WORTH_SHARE = 0.0
rm.init("cpu", compile_options={"when_slower": "compiled"})
torch.manual_seed(0)
model = rm.accelerate(Model().eval())
with torch.no_grad():
    for _ in range(5):
        found = model(torch.ones(4, 8))
record = rm.explain(model).to_dict()["models"][0]
entries = [entry for part in record["parts"] for entry in part["entries"]]
print(json.dumps({
    "codes": [reason["code"] for reason in record["reasons"]],
    "known": "found by an earlier capture" in record["reasons"][0]["detail"],
    "served": {part["part"]: part["routed"] for part in record["parts"]},
    "captured": sum(entry["capture_ms"] > 0 for entry in entries),
}))
"""

MODULE = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 1e9:
                x = x / 2
        return x
"""


def test_a_second_process_captures_nothing_again(tmp_path: Path) -> None:
    (tmp_path / "uncapturable.py").write_text(MODULE)
    environment = {**os.environ, "RM_CACHE_DIR": str(tmp_path / "cache")}
    found = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        found.append(json.loads(run.stdout.splitlines()[-1]))
    first, second = found
    assert first["codes"] == second["codes"] == ["RM203"]
    assert (first["known"], second["known"]) == (False, True)
    assert set(second["served"]) == {"layers.0", "layers.1"}
    assert all(second["served"].values())
    assert first["captured"] == 1  # the second layer is the first one over again
    assert second["captured"] == 0
