"""Of layers that are alike a few are traced: the program is that of a trace of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import rm_abstract as rm
from rm_abstract import _core
from rm_abstract.capture import export, layer_list

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 9,
    "vocab_size": 64,
    "max_position_embeddings": 256,
}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, **SIZES, **TOKENS)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(
        hf.Qwen3Config(num_key_value_heads=2, head_dim=8, **SIZES, **TOKENS)
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(n_layer=9, n_embd=32, n_head=4, vocab_size=64, **TOKENS)
    ),
}


@pytest.fixture(autouse=True)
def closed_session() -> Iterator[None]:
    with torch.no_grad():
        yield
    rm.shutdown()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each trace whether it was one of the first layers only."""
    seen: list[bool] = []
    capture = export._captured

    def watched(*arguments: Any) -> Any:
        seen.append(arguments[4] is not None)
        return capture(*arguments)

    monkeypatch.setattr(export, "_captured", watched)
    return seen


@pytest.mark.parametrize("name", list(DECODERS))
def test_the_program_is_that_of_all_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both: list[tuple[Any, Any]] = []
    capture = export.capture_flat

    def twice(
        module: Any, call: Any, parameters: Any, patience: float, whole: bool, by_values: bool
    ) -> Any:
        both.append(tuple(capture(module, call, parameters, 10, w) for w in (False, True)))
        return both[-1][0]

    monkeypatch.setattr(export, "capture_flat", twice)
    rm.init("cpu", compile_options={"when_slower": "compiled"})
    torch.manual_seed(0)
    model = rm.accelerate(DECODERS[name]().eval())
    ids = torch.randint(3, 60, (1, 7))
    model.generate(ids, max_new_tokens=4, do_sample=False)
    assert len(both) == 2  # the prompt and a step
    for few, whole in both:
        assert few.extended and not whole.extended
        assert _core.ir.canonical(few.ir) == _core.ir.canonical(whole.ir)
        for part in ("weights", "input_dims", "output", "caches"):
            assert getattr(few, part) == getattr(whole, part), part
    assert rm.explain().to_dict()["models"][0]["reasons"] == []


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Deep(nn.Module):
    """Twelve layers that are alike, in a loop of the module's own."""

    def __init__(self, layer: Callable[[int], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(n) for n in range(12))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Doubles(Deep):
    """One layer far behind is another one, which only the loop knows."""

    def forward(self, x: torch.Tensor) -> Any:
        for n, layer in enumerate(self.layers):
            x = layer(x) * (2 if n == 9 else 1)
        return self.head(x)


class Collects(Deep):
    """Gives what every layer gave."""

    def forward(self, x: torch.Tensor) -> Any:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return self.head(x), torch.stack(found)


class Scaled(Layer):
    """Reads its own number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / (self.number + 1)


class Fourth(Layer):
    """Every fourth one computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.relu() if self.number % 4 == 3 else x)


class Wide(Layer):
    """The last one holds something else."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.slope = 2.0 if number == 11 else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.slope


@pytest.mark.parametrize(
    ("make", "traces"),
    [
        (Deep, [True]),
        (Doubles, [True, False]),  # the comparison with the original finds it
        (Collects, [True, False]),
        (lambda: Deep(Scaled), [True, False]),
        (lambda: Deep(Fourth), [True, False]),
        (lambda: Deep(Wide), [False]),
    ],
    ids=[
        "alike",
        "the loop counts",
        "every result is read",
        "reads its number",
        "every fourth is another",
        "holds another",
    ],
)
def test_what_is_served_is_right(
    make: Callable[[], Any], traces: list[bool], traced: list[bool]
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    for _ in range(2):  # sessions
        rm.init("cpu", compile_options={"when_slower": "compiled"}, fallback="error")
        ours = rm.accelerate(model)
        for _call in range(3):
            x = torch.randn(5, 16)
            with rm.disabled():
                expected = model(x)
            torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)
        entries = rm.explain().to_dict()["models"][0]["entries"]
        assert sum(int(e["calls"]) for e in entries) >= 2
        rm.shutdown()
        assert traced == traces  # the second session finds what the first one stored


class Mixed(Layer):
    """Attention without weights under a mask that it is given."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.softmax(x @ x.mT / 4 + mask, -1) @ x)


class Windows(Deep):
    """Layers from the ninth on see eight positions, which is all of them in a short call."""

    def __init__(self) -> None:
        super().__init__(Mixed)

    def forward(self, x: torch.Tensor) -> Any:
        places = torch.arange(x.shape[1])
        back = places[:, None] - places
        near = torch.where((back >= 0) & (back < 8), 0.0, -1e9)
        every = torch.where(back >= 0, 0.0, -1e9)
        for n, layer in enumerate(self.layers):
            x = layer(x, near if n >= 8 else every)
        return self.head(x)


class Ends(Deep):
    def forward(self, x: torch.Tensor) -> Any:
        for n, layer in enumerate(self.layers):
            if n == 8 and x.shape[1] > 8:
                break
            x = layer(x)
        return self.head(x)


class Between(Deep):
    def forward(self, x: torch.Tensor) -> Any:
        for n, layer in enumerate(self.layers):
            x = layer(x)
            if n == 8 and x.shape[1] > 8:
                x = x * 2
        return self.head(x)


class Late(Layer):
    """From the tenth on layers double what is long."""

    def late(self) -> bool:
        return self.number >= 9

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2 if self.late() and x.shape[1] > 8 else x)


class Listed(Late):
    KINDS = ("near",) * 9 + ("far",) * 3

    def late(self) -> bool:
        return self.KINDS[self.number] == "far"


class Sized(Late):
    """One has a size that is its number, the others none."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.size = number if number == 9 else 0

    def late(self) -> bool:
        return self.size > 0


class Counts(Late):
    """Layers count on an object that they share."""

    def __init__(self, number: int, shared: Any) -> None:
        super().__init__(number)
        self.shared = shared

    def late(self) -> bool:
        self.shared.depth = self.shared.depth % 12 + 1
        return bool(self.shared.depth > 9)


class Told(Late):
    """Layers count on an object that they are given."""

    def forward(self, x: torch.Tensor, told: Any) -> torch.Tensor:  # type: ignore[override]
        told.depth += 1
        return Layer.forward(self, x * 2 if told.depth > 9 and x.shape[1] > 8 else x)


class Tells(Deep):
    def __init__(self) -> None:
        super().__init__(Told)

    def forward(self, x: torch.Tensor) -> Any:
        told = SimpleNamespace(depth=0)
        for layer in self.layers:
            x = layer(x, told)
        return self.head(x)


def _counting() -> Deep:
    shared = SimpleNamespace(depth=0)
    return Deep(lambda n: Counts(n, shared))


@pytest.mark.parametrize(
    "make",
    [
        Windows,
        Ends,
        Between,
        Tells,
        _counting,
        *(lambda layer=layer: Deep(layer) for layer in (Late, Listed, Sized)),
    ],
    ids=["mask", "early exit", "between", "told", "shared", "number", "list", "size"],
)
def test_what_only_long_calls_show_is_right(make: Callable[[], Any]) -> None:
    """The first call is short, and its comparison with the original finds nothing."""
    torch.manual_seed(0)
    model = make().eval()
    rm.init("cpu", compile_options={"when_slower": "compiled"})
    ours = rm.accelerate(model)
    for length in (5, 6, 12, 20, 7):
        x = torch.randn(2, length, 16)
        with rm.disabled():
            expected = model(x)
        torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)
    entries = rm.explain().to_dict()["models"][0]["entries"]
    assert sum(int(e["calls"]) for e in entries) >= 2


def test_a_weight_that_two_layers_share_is_traced_as_it_is(traced: list[bool]) -> None:
    torch.manual_seed(0)
    model = Deep().eval()
    model.layers[7].linear.weight = model.layers[2].linear.weight
    assert layer_list.find(model) is None
    rm.init("cpu", compile_options={"when_slower": "compiled"})
    ours, x = rm.accelerate(model), torch.randn(5, 16)
    with rm.disabled():
        expected = model(x)
    for _ in range(2):
        torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)
    assert traced == [False]


def test_few_layers_are_traced(traced: list[bool]) -> None:
    model = Deep()
    model.layers = model.layers[: layer_list.FEWEST - 1]
    assert layer_list.find(model) is None
    assert layer_list.find(Deep()) == layer_list.LayerList("layers", 12, {"": {"number"}})
