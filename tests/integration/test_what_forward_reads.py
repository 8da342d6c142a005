"""A forward that reads or changes something besides its arguments and its tensors: same results and
same effects as without us, on every call, and a report that says which calls a program served.
"""

from __future__ import annotations

import logging
import random
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

import rm_abstract as rm

X = torch.arange(32.0).reshape(4, 8) / 32
SCALE = 2.0
OPTIONS = types.SimpleNamespace(scale=2.0)
LOG = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def session() -> Iterator[Any]:
    torch.manual_seed(0)
    yield rm.init("cpu")
    rm.shutdown()


def quiet(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", rm.RoutingWarning)
        return call()


def report(model: nn.Module) -> dict[str, Any]:
    return rm.explain(model).to_dict()["models"][0]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.n = 0
        self.seen: list[Any] = []
        self.kept: dict[str, Any] = {}
        self.register_buffer("steps", torch.zeros(()))


class Counts(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return self.inner(x)


class KeepsAList(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(x.shape[0]))
        return self.inner(x)


class KeepsATensor(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept["last"] = y = self.inner(x)
        return y.relu()


class CountsInABuffer(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        return self.inner(x) + self.steps


class RemembersASize(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n = x.shape[0]
        return self.inner(x)


def state(module: Any) -> list[Any]:
    last = module.kept.get("last")
    return [module.n, list(module.seen), last, float(module.steps)]


@pytest.mark.parametrize(
    "kind", [Counts, KeepsAList, KeepsATensor, CountsInABuffer, RemembersASize]
)
def test_a_forward_with_state_of_its_own_keeps_it_call_by_call(kind: type[Base]) -> None:
    torch.manual_seed(0)
    with rm.disabled():
        plain = kind().eval()
    torch.manual_seed(0)
    ours = kind().eval()
    rm.accelerate(ours)
    for x in (X, X, X, X[:3], X[:2], X[:1], X):
        with rm.disabled(), torch.no_grad():
            expected = plain(x)
        torch.testing.assert_close(quiet(lambda x=x: ours(x)), expected)
        torch.testing.assert_close(state(ours), state(plain))
    assert report(ours)["routed"] == 0
    assert "RM205" in str(rm.explain(ours))


def test_a_policy_of_errors_does_not_run_a_forward_with_effects_twice() -> None:
    rm.shutdown()
    rm.init("cpu", fallback="error")
    model = Counts().eval()
    with torch.no_grad():
        model(X)
        with pytest.raises(rm.Error, match="RM205"):
            model(X)
    assert model.n == 2


def test_what_is_set_up_by_the_first_call_does_not_keep_a_module_eager() -> None:
    class Lazy(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if "table" not in self.kept:
                self.kept["table"] = torch.full((8,), 2.0)
            return self.inner(x) * self.kept["table"]

    model = Lazy().eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", rm.RoutingWarning)
        outputs = [model(X) for _ in range(4)]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])
    assert report(model)["routed"] >= 1


def test_a_print_a_log_line_and_a_warning_come_with_every_call(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Tells(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("rows", x.shape[0])
            LOG.warning("rows %d", x.shape[0])
            return self.inner(x)

    model = Tells().eval()
    for _ in range(3):
        quiet(lambda: model(X))
    assert capsys.readouterr().out == "rows 4\n" * 3
    assert [r.getMessage() for r in caplog.records if r.name == __name__] == ["rows 4"] * 3


def test_pythons_random_stream_is_used_as_without_us() -> None:
    class Jitters(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * random.random()

    model = Jitters().eval()
    random.seed(1)
    with rm.disabled():
        expected = [quiet(lambda: model(X)) for _ in range(4)]
    random.seed(1)
    torch.testing.assert_close([quiet(lambda: model(X)) for _ in range(4)], expected)


def test_containers_given_as_arguments_are_changed_as_without_us() -> None:
    class Adds(Base):
        def forward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            given["y"] = self.inner(given["x"])
            return given

    model = Adds().eval()
    for _ in range(3):
        given = {"x": X}
        assert quiet(lambda given=given: model(given)) is given
        assert list(given) == ["x", "y"]


def test_gradients_a_forward_switches_on_itself_are_not_lost() -> None:
    class Switches(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                return self.inner(x)

    model = Switches().eval()
    assert all(quiet(lambda: model(X)).requires_grad for _ in range(3))


class Config:
    scale = 2.0


class Reads(Base):
    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.table = {"scale": 2.0}
        self.rows = [2.0]
        self.pair = (2.0, [2.0])
        self.config_object = Config()
        self.tensors = [torch.full((8,), 2.0)]
        self.hidden = [nn.Linear(8, 8)]
        for parameter in self.hidden[0].parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * SCALE * OPTIONS.scale * self.factor * helper()
        y = y * self.table["scale"] * self.rows[0] * self.pair[0] * self.pair[1][0]
        return self.hidden[0](y * self.config_object.scale * self.tensors[0])


def helper() -> float:
    return HELPED[0]


HELPED = [2.0]


def set_global(_: Reads) -> None:
    globals()["SCALE"] = 3.0


def set_namespace(_: Reads) -> None:
    OPTIONS.scale = 3.0


def set_what_a_helper_reads(_: Reads) -> None:
    HELPED[0] = 3.0


def set_class_attribute(_: Reads) -> None:
    Reads.factor = 3.0


def set_dict(model: Reads) -> None:
    model.table["scale"] = 3.0


def set_list(model: Reads) -> None:
    model.rows[0] = 3.0


def set_tuple(model: Reads) -> None:
    model.pair = (3.0, model.pair[1])


def set_inside_a_tuple(model: Reads) -> None:
    model.pair[1][0] = 3.0


def set_object(model: Reads) -> None:
    model.config_object.scale = 3.0


def set_class_of_object(_: Reads) -> None:
    Config.scale = 3.0


def write_listed_tensor(model: Reads) -> None:
    model.tensors[0].mul_(2)


def replace_listed_tensor(model: Reads) -> None:
    model.tensors[0] = torch.full((8,), 3.0)


def write_weight_of_a_hidden_module(model: Reads) -> None:
    model.hidden[0].weight.mul_(2)


CHANGES = [
    *(set_global, set_namespace, set_what_a_helper_reads, set_class_attribute, set_dict, set_list),
    *(set_tuple, set_inside_a_tuple, set_object, set_class_of_object, write_listed_tensor),
    *(replace_listed_tensor, write_weight_of_a_hidden_module),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_whatever_a_forward_reads_is_read_anew_when_it_changed(
    change: Callable[[Reads], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SCALE", SCALE), ("HELPED", [2.0])):
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setattr(OPTIONS, "scale", 2.0)
    monkeypatch.setattr(Reads, "factor", 2.0)
    monkeypatch.setattr(Config, "scale", 2.0)
    model = Reads().eval()
    with torch.no_grad():
        for _ in range(3):
            before = model(X)
        assert report(model)["routed"] == 2
        with torch.no_grad():
            change(model)
        with rm.disabled():
            expected = model(X)
        assert not torch.allclose(expected, before)
        for _ in range(3):
            torch.testing.assert_close(model(X), expected, rtol=1e-4, atol=1e-4)
        assert report(model)["routed"] == 4


def scaled(factor: float, weight: torch.Tensor) -> nn.Module:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.hidden = [weight]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * factor * self.hidden[0]

    torch.manual_seed(0)
    return Scaled().eval()


@pytest.mark.parametrize(("factor", "hidden"), [(3.0, 2.0), (2.0, 3.0)])
def test_a_capture_from_the_cache_is_not_used_for_other_captured_values(
    factor: float, hidden: float
) -> None:
    first = scaled(2.0, torch.full((8,), 2.0))
    other = scaled(factor, torch.full((8,), hidden))
    with torch.no_grad():
        for _ in range(2):
            expected = first(X) * 1.5
        rm.shutdown()
        rm.init("cpu")
        rm.accelerate(other)
        for _ in range(3):
            torch.testing.assert_close(other(X), expected)


def calling(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    class Calls(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(self.inner(x))

    torch.manual_seed(0)
    return Calls().eval()


def test_captured_functions_of_one_name_are_told_apart_in_the_cache() -> None:
    x = torch.zeros(2, 8)  # where the two agree: the gate would pass one for the other
    models = [calling(lambda y: y.relu()), calling(lambda y: y.relu() * (1 + y.detach().floor()))]
    with torch.no_grad():
        models[0].inner.bias.fill_(0.5)
        models[1].inner.bias.fill_(0.5)
        for model in models:
            for given in (x, x, X * 50):
                with rm.disabled():
                    expected = model(given)
                torch.testing.assert_close(model(given), expected, rtol=1e-4, atol=1e-3)


def test_products_in_f64_are_left_to_torch() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double().eval()
    with torch.no_grad():
        for _ in range(3):
            with rm.disabled():
                expected = model(X.double())
            torch.testing.assert_close(model(X.double()), expected)
    assert report(model)["routed"] == 2
    assert "run by PyTorch: aten.linear.default x1" in str(rm.explain(model))


def test_an_ordered_dict_comes_back_as_one_and_routed() -> None:
    class Named(Base):
        def forward(self, x: torch.Tensor) -> OrderedDict[str, torch.Tensor]:
            return OrderedDict(out=self.inner(x), aux=x + 1)

    model = Named().eval()
    with torch.no_grad():
        for _ in range(3):
            output = model(X)
            assert type(output) is OrderedDict and list(output) == ["out", "aux"]
    assert report(model)["routed"] == 2


def test_a_recurrent_layer_in_evaluation_is_not_said_to_draw_random_numbers() -> None:
    model = nn.Sequential(nn.GRU(4, 4, batch_first=True)).double().eval()
    with pytest.warns(rm.RoutingWarning, match=r"RM207.*every length.*gru"), torch.no_grad():
        model(torch.randn(2, 2, 4).double())


def test_a_number_taken_out_of_a_tensor_is_told_as_what_it_is() -> None:
    class Sums(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * x.sum().item()

    model = Sums().eval()
    with pytest.warns(rm.RoutingWarning, match=r"RM203.*item"), torch.no_grad():
        model(X)


def test_every_code_a_report_can_show_has_a_text_and_a_remedy() -> None:
    from rm_abstract.base import reasons

    for code in ("RM204", "RM205", "RM206", "RM207"):
        assert reasons.text_of(code) != code and reasons.remedy_of(code)


def test_a_model_converted_to_another_type_is_compiled_again() -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertModel._from_config(BertConfig(**small, intermediate_size=32, vocab_size=50)).eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", rm.RoutingWarning)
        for kind in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
            model.to(kind)
            for _ in range(3):
                assert model(ids).last_hidden_state.dtype is kind
    assert report(model)["routed"] == 8, str(rm.explain(model))


def test_weights_that_are_untied_or_tied_are_compiled_again() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    own = model[1].weight
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", rm.RoutingWarning)
        for weight in (model[0].weight, own, model[0].weight):
            model[1].weight = weight
            with rm.disabled():
                expected = model(X)
            for _ in range(3):
                torch.testing.assert_close(model(X), expected)
    assert report(model)["routed"] == 7  # the first state comes back: what it had serves at once


def test_calls_that_compile_another_size_are_not_reported_as_routed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    with torch.no_grad():
        for rows in (4, 3, 1, 0, 1, 0):
            model(torch.ones(rows, 8))
    assert (report(model)["routed"], report(model)["eager"]) == (3, 3)


def test_an_encoder_decoder_called_with_labels_gives_its_cache() -> None:
    config = T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=30,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration._from_config(config).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        with rm.disabled():
            expected = model(input_ids=ids, labels=ids)
        for _ in range(3):
            output = model(input_ids=ids, labels=ids)
            torch.testing.assert_close(output.loss, expected.loss, rtol=1e-4, atol=1e-5)
            cache = output.past_key_values
            assert type(cache) is type(expected.past_key_values)
            assert cache.get_seq_length() == 4
            assert cache.is_updated == expected.past_key_values.is_updated
    assert report(model)["routed"] == 2, str(rm.explain(model))


def test_a_rounding_to_half_precision_in_a_model_of_f32_keeps_its_overflow() -> None:
    class Rounds(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner((x * 1000).half().float() * 2)

    model = Rounds().eval()
    with torch.no_grad():
        for x in (X, X, X, X * 1000):
            with rm.disabled():
                expected = model(x)
            torch.testing.assert_close(model(x), expected, equal_nan=True)
    assert report(model)["routed"] == 3


class Asking(nn.Module):
    """Gives another result by what torch says."""

    def __init__(self, ask: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(False)
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2.0 if self.ask(x) else 1.0)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(4, 4)


ASKED = [
    (lambda x: torch.is_grad_enabled(), torch.no_grad, torch.enable_grad, torch.ones(4, 4)),
    (lambda x: torch.is_inference_mode_enabled(), torch.no_grad, torch.inference_mode, None),
    (lambda x: torch.are_deterministic_algorithms_enabled(), torch.no_grad, deterministic, None),
    (lambda x: x.requires_grad, torch.no_grad, torch.no_grad, torch.ones(4, 4).requires_grad_()),
    (lambda x: x.is_contiguous(), torch.no_grad, torch.no_grad, torch.ones(4, 4).t()),
    (lambda x: x.stride(0) == 1, torch.no_grad, torch.no_grad, torch.ones(4, 4).t()),
    (lambda x: x.is_inference(), torch.no_grad, torch.no_grad, inference_tensor()),
]


@pytest.mark.parametrize("other_first", [False, True])
@pytest.mark.parametrize(("ask", "mode", "other", "given"), ASKED)
def test_what_a_forward_asks_of_torch_is_answered_anew(
    ask: Any, mode: Any, other: Any, given: torch.Tensor | None, other_first: bool
) -> None:
    module = rm.accelerate(Asking(ask).eval())
    calls = [(mode, torch.ones(4, 4)), (other, torch.ones(4, 4) if given is None else given)]
    for context, x in reversed(calls) if other_first else [*calls, calls[0]]:
        with context():
            with rm.disabled():
                expected = module(x)
            for _ in range(3):
                assert torch.equal(module(x) > 0, expected > 0)
                torch.testing.assert_close(module(x), expected)


def test_the_default_type_of_new_tensors_is_part_of_the_guard() -> None:
    class Making(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), torch.zeros(2) + 1

    module = rm.accelerate(Making(4, 4).eval().requires_grad_(False))
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            kinds = [module(torch.ones(2, 4, dtype=torch.float32))[1].dtype for _ in range(3)]
        finally:
            torch.set_default_dtype(torch.float32)
        assert kinds == [dtype] * 3


def test_a_transformer_encoder_that_packs_padded_rows_stays_eager_and_says_why() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    packing = rm.accelerate(nn.TransformerEncoder(layer, 1).eval())
    plain = rm.accelerate(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval())
    x, mask = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model in (packing, plain):
            with rm.disabled():
                expected = model(x, src_key_padding_mask=mask)
            for _ in range(3):
                output = model(x, src_key_padding_mask=mask)
                torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert "enable_nested_tensor=False" in str(rm.explain(packing))
    assert rm.explain(packing).models[0]["routed"] == 0
    assert rm.explain(plain).models[0]["routed"] == 2


def test_a_module_that_stops_having_effects_is_looked_at_again_within_a_few_calls() -> None:
    class Counting(nn.Linear):
        quiet = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.quiet:
                self.count = getattr(self, "count", 0) + 1
            return super().forward(x)

    module = rm.accelerate(Counting(4, 4).eval())
    x = torch.ones(2, 4)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            module(x)
        assert module.count == 5 and rm.explain(module).models[0]["routed"] == 0
        module.quiet = True
        for _ in range(1200):  # it changed what is watched: RM205 pauses for 1024 calls
            module(x)
    assert rm.explain(module).models[0]["routed"] > 0


def test_tensors_of_other_layouts_are_served_by_the_original_every_time() -> None:
    module = rm.accelerate(nn.Linear(4, 4).eval())
    nested = torch.nested.nested_tensor([torch.ones(1, 4), torch.ones(2, 4)])
    jagged = torch.nested.nested_tensor([torch.ones(1, 4), torch.ones(2, 4)], layout=torch.jagged)
    with torch.no_grad():
        for _ in range(3):
            for odd in (nested, torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr(), jagged):
                with rm.disabled():
                    expected = module(odd)
                assert type(module(odd)) is type(expected)
            dense = module(torch.ones(2, 4))
            torch.testing.assert_close(module(torch.ones(2, 4)), dense)
    assert rm.explain(module).models[0]["routed"] == 5


def test_a_torchscript_module_is_not_armed() -> None:
    scripted = torch.jit.script(nn.Linear(4, 4)).eval()
    assert "_compiled_call_impl" not in vars(scripted)
    with pytest.raises(rm.Error, match="TorchScript"):
        rm.accelerate(scripted)
