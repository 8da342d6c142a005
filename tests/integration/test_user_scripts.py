"""Scripts as strangers write them, with and without us: same results, exceptions, true reports.

Every case runs on a small random model and compares with the same call under `rm.disabled()`.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertModel

import rm_abstract as rm
from rm_abstract.engines.program_engine import ProgramEngine

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 32,
}
IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 2]])


@pytest.fixture(autouse=True)
def session() -> Iterator[Any]:
    torch.manual_seed(0)
    yield rm.init()
    rm.shutdown()


def routed(model: nn.Module) -> int:
    """Calls of this model that our program served."""
    for router in rm.session.current().routers():
        if router.module_ref() is model:
            return int(router.route.stats()["routed"])
    raise AssertionError(f"{type(model).__name__} is not routed")


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gave: its result, or the exception it raised."""
    try:
        with torch.no_grad():
            return call()
    except Exception as error:
        return error


def check_same(call: Callable[[], Any], times: int = 3) -> None:
    """The call gives what it gives without us, the first time and later."""
    with rm.disabled():
        expected = outcome(call)
    for _ in range(times):
        actual = outcome(call)
        assert type(actual) is type(expected), repr(actual)
        if isinstance(expected, Exception):
            assert str(actual) == str(expected)
        else:
            torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-5)


def test_wrong_labels_raise_the_users_error_and_later_calls_stay_routed() -> None:
    model = BertForSequenceClassification._from_config(BertConfig(**TINY)).eval()
    check_same(lambda: model(IDS, labels=torch.tensor([0, 1])).loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error", rm.RoutingWarning)
        check_same(lambda: model(IDS, labels=torch.tensor([0, 7])).loss)
    before = routed(model)
    check_same(lambda: model(IDS, labels=torch.tensor([1, 1])).loss)
    assert routed(model) == before + 3


@pytest.mark.parametrize(
    "ids", [torch.tensor([[3, 50]]), torch.tensor([[3, -1]]), torch.ones(1, 33, dtype=torch.long)]
)
def test_bad_token_ids_raise_what_eager_raises(ids: torch.Tensor) -> None:
    model = BertModel._from_config(BertConfig(**TINY)).eval()
    check_same(lambda: model(torch.ones(1, 8, dtype=torch.long)).last_hidden_state)
    check_same(lambda: model(ids).last_hidden_state)
    before = routed(model)
    check_same(lambda: model(torch.full((1, 9), 3)).last_hidden_state)
    assert routed(model) > before


def test_a_mistake_of_ours_while_compiling_is_a_warning_with_a_code_not_the_users_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(ProgramEngine, "make_variant", broken)
    model = BertModel._from_config(BertConfig(**TINY)).eval()
    with pytest.warns(rm.RoutingWarning, match=r"RM306.*KeyError.*a mistake of ours"):
        check_same(lambda: model(IDS).last_hidden_state)
    assert routed(model) == 0
    assert "RM306" in str(rm.explain(model))


def test_a_mistake_of_ours_at_a_later_size_leaves_the_served_sizes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = BertModel._from_config(BertConfig(**TINY)).eval()
    check_same(lambda: model(IDS).last_hidden_state)

    def broken(*_: Any) -> Any:
        raise AssertionError("a mistake of ours")

    monkeypatch.setattr(ProgramEngine, "make_variant", broken)
    with pytest.warns(rm.RoutingWarning, match="RM306"):
        check_same(lambda: model(IDS[:1, :1]).last_hidden_state)
    before = routed(model)
    check_same(lambda: model(IDS).last_hidden_state)
    assert routed(model) == before + 3


def test_a_forward_that_draws_random_numbers_stays_eager_and_keeps_the_stream() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.rand(x.shape[0], 3)

    rm.init("cpu")
    try:
        module = Noisy(3, 3).eval()
        rm.accelerate(module)
        x = torch.ones(2, 3)
        with torch.no_grad():
            torch.manual_seed(7)
            with rm.disabled():
                expected = [module(x) for _ in range(3)]
            torch.manual_seed(7)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got = [module(x) for _ in range(3)]
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        assert rm.explain(module).to_dict()["routed"] == 0
    finally:
        rm.shutdown()


def test_a_capture_that_fails_prints_nothing_but_our_own_warning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Branching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.max() + 1 > 16 else -super().forward(x)

    module = rm.accelerate(Branching(4, 4).eval())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_same(lambda: module(torch.ones(3, 4)))
    assert [w.category for w in caught] == [rm.RoutingWarning]
    assert "RM203" in str(caught[0].message)
    assert capfd.readouterr() == ("", "")
    assert "print" not in vars(torch.export._trace)


SPAWNING = """
import multiprocessing, sys
import torch
import rm_abstract as rm

rm.init("cpu")

def work(job):
    model, x = job
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            output = model(x)
    return output, rm.explain(model).routed

if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval()
    x = torch.randn(2, 8)
    own, routed = work((model, x))
    assert routed == 2, routed
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        ((output, routed),) = pool.map(work, [(model, x)])
    assert torch.equal(own, output) and routed >= 2, routed
    loader = torch.utils.data.DataLoader(
        list(range(4)), num_workers=1, multiprocessing_context="spawn"
    )
    assert [int(n) for n in loader] == [0, 1, 2, 3]
    print("fine")
"""


def test_spawned_processes_route_models_of_their_own(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNING)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_a_cache_folder_that_cannot_be_used_is_in_the_report(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    rm.shutdown()
    rm.init("cpu", cache_dir=tmp_path / "file" / "cache")
    model = BertModel._from_config(BertConfig(**TINY)).eval()
    check_same(lambda: model(IDS).last_hidden_state)
    (note,) = rm.explain().device_notes
    assert note["code"] == "RM601" and "keeps nothing on disk" in str(rm.explain(model))
