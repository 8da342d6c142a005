"""What changes a key of the engine, and what does not: each is a test, because a key that misses an
input serves a wrong answer, and one with too many never hits."""

from __future__ import annotations

import cProfile
import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.bert import modeling_bert

import rm_abstract
from rm_abstract import _core
from rm_abstract.calls.call import flatten_call
from rm_abstract.engines import artefacts as artefacts_module
from rm_abstract.engines.call_parts import unfold
from rm_abstract.engines.call_text import call_key
from rm_abstract.engines.context import EngineContext
from rm_abstract.engines.native import create_engine
from rm_abstract.guards import identity, sources

IR = 'rmir 1\nsym s0 [2,100]\ninput %0 "x" : f32[s0,3]\n%1 = relu(%0) : f32[s0,3]\nreturn %1\n'
SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def bert(**config: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    attention = config.pop("attn_implementation", "sdpa")
    values = transformers.BertConfig(**{**SIZES, "intermediate_size": 64, **config})
    return transformers.BertModel._from_config(values, attn_implementation=attention).eval()


def ids(batch: int = 2, length: int = 7) -> torch.Tensor:
    return torch.arange(batch * length).reshape(batch, length) % 50


@pytest.fixture
def session():
    with rm_abstract.init("cpu") as active:
        yield active


class Unheard:
    """Events nobody listens to."""

    def failed(self, error: Exception) -> None: ...

    def served_by_original(self) -> None: ...

    def uncount(self, calls: int) -> None: ...

    def detach(self) -> None: ...

    def sources(self) -> None: ...


def context(session) -> EngineContext:
    return session.engine_context(Unheard())


def front_key(session, module: torch.nn.Module, **kwargs: Any) -> Any:
    """The key a call's capture is found by."""
    engine = create_engine(module, context(session))
    call = flatten_call(engine.parameters, (), {"input_ids": ids(), **kwargs})
    pattern = unfold(tuple(call.leaves))[1]
    key = engine.artefacts._front_key(module, call_key(call, pattern))
    assert not key.bypass, key.bypass
    return key


def plan_key(session, ir: str = IR) -> str:
    return artefacts_module.Artefacts(context(session)).program(_core.ir.canonical(ir))[1]


# ---- front records: module, code, versions, flags, call --------------------------------------


def replace_method(patch: pytest.MonkeyPatch) -> None:
    def forward(self, hidden_states):
        return self.intermediate_act_fn(self.dense(hidden_states)) * 3

    patch.setattr(modeling_bert.BertIntermediate, "forward", forward)


def replace_method_of_torch(patch: pytest.MonkeyPatch) -> None:
    def forward(self, input):
        return torch.nn.functional.linear(input, self.weight, self.bias) * 2

    patch.setattr(torch.nn.Linear, "forward", forward)


def replace_module_function(patch: pytest.MonkeyPatch) -> None:
    def eager_attention_forward(*args, **kwargs):
        raise NotImplementedError

    patch.setattr(modeling_bert, "eager_attention_forward", eager_attention_forward)


def replace_functional(patch: pytest.MonkeyPatch) -> None:
    def scaled_dot_product_attention(*args, **kwargs):
        raise NotImplementedError

    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention)


def replace_attention_by_name(patch: pytest.MonkeyPatch) -> None:
    def mine(*args, **kwargs):
        raise NotImplementedError

    table = modeling_bert.ALL_ATTENTION_FUNCTIONS
    patch.setitem(type(table)._global_mapping, "sdpa", mine)


def other_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules["transformers"], "__version__", "5.0.0.other")


@pytest.mark.parametrize(
    "change",
    [
        replace_method,
        replace_method_of_torch,
        replace_module_function,
        replace_functional,
        replace_attention_by_name,
        other_version,
    ],
    ids=lambda change: change.__name__,
)
def test_other_code_is_another_capture(
    session, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
):
    before = front_key(session, bert())
    assert front_key(session, bert()).hex == before.hex
    change(monkeypatch)
    after = front_key(session, bert())
    assert {f for f in before.fields if before.fields[f] != after.fields[f]} == {"front"}


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 2},
        {"intermediate_size": 32},
        {"hidden_act": "relu"},
        {"layer_norm_eps": 1e-6},
        {"attn_implementation": "eager"},
    ],
    ids=str,
)
def test_another_structure_is_another_capture(session, config: dict[str, Any]):
    assert front_key(session, bert(**config)).hex != front_key(session, bert()).hex


def test_another_dtype_mode_or_tie_is_another_capture(session):
    keys = {front_key(session, bert()).hex}
    keys.add(front_key(session, bert().to(torch.bfloat16)).hex)
    keys.add(front_key(session, bert().train()).hex)
    tied = bert()
    tied.encoder.layer[0].output.LayerNorm.weight = tied.embeddings.LayerNorm.weight
    keys.add(front_key(session, tied).hex)
    extra = bert()
    extra.encoder.layer[0].chunk_size_feed_forward = 2
    keys.add(front_key(session, extra).hex)
    assert len(keys) == 5


def test_an_attribute_that_no_code_reads_is_no_part_of_the_capture(session):
    extra = bert()
    extra.encoder.layer[0].remark = 2.0
    assert front_key(session, extra).hex == front_key(session, bert()).hex


FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "matmul": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "medium",
    ),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    ),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
        True,
    ),
    "autocast_dtype": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda dtype: torch.set_autocast_dtype("cpu", dtype),
        torch.float16,
    ),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_each_global_flag_is_in_the_key(session, flag: str):
    assert set(identity._flags()) == set(FLAGS)  # a new flag gets its row here
    module = bert()
    before = front_key(session, module).hex
    get, put, other = FLAGS[flag]
    kept = get()
    put(other)
    try:
        assert front_key(session, module).hex != before
    finally:
        put(kept)
    assert front_key(session, module).hex == before


def test_weight_values_are_not_in_the_keys_of_captures_and_plans(session):
    module = bert()
    before = front_key(session, module).hex
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert front_key(session, module).hex == before


def test_a_call_is_another_capture_exactly_when_torch_would_specialise(session):
    module = bert()
    mask = torch.ones_like(ids())
    base = front_key(session, module).hex
    assert front_key(session, module, input_ids=ids(3, 9)).hex == base  # sizes are symbols
    strided = ids(7, 2).t()  # strides are the program's to read, not the capture's to know
    assert front_key(session, module, input_ids=strided).hex == base
    others = [
        front_key(session, module, input_ids=ids(1, 7)),  # torch specialises 0 and 1
        front_key(session, module, input_ids=ids().int()),
        front_key(session, module, attention_mask=mask),
        front_key(session, module, attention_mask=mask.bool()),
        front_key(session, module, output_hidden_states=True),
        front_key(session, module, return_dict=False),
    ]
    assert len({base, *(key.hex for key in others)}) == 1 + len(others)


def test_a_users_own_source_is_in_the_key(session, tmp_path: Path):
    keys = []
    for line in ("x * 2", "x * 3", "x * 2"):
        file = tmp_path / "own_model.py"
        file.write_text(
            "import torch\nclass Own(torch.nn.Module):\n"
            f"    def forward(self, input_ids):\n        x = input_ids\n        return {line}\n"
        )
        sys.modules.pop("own_model", None)
        sys.path.insert(0, str(tmp_path))
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        try:
            import own_model
        finally:
            sys.path.remove(str(tmp_path))
        keys.append(front_key(session, own_model.Own().eval()).hex)
    sys.modules.pop("own_model")
    assert keys[0] == keys[2] != keys[1]


# ---- plans: program, options, backends -------------------------------------------------------


@pytest.mark.parametrize("what", ["f64[s0,3]", "f32[s0,4]", "f32[3,s0]"])
def test_another_type_is_another_plan(session, what: str):
    assert plan_key(session, IR.replace("f32[s0,3]", what)) != plan_key(session)


def test_another_range_operator_or_attribute_is_another_plan(session):
    others = [IR.replace("100", "99"), IR.replace("relu", "exp")]
    assert len({plan_key(session), *(plan_key(session, ir) for ir in others)}) == 3


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_another_build_of_a_backend_is_another_plan(
    session, monkeypatch: pytest.MonkeyPatch, name: str
):
    before = plan_key(session)
    rows = _core.backend.backends()
    assert name in {row["name"] for row in rows}
    changed = [{**r, "build_id": "other"} if r["name"] == name else r for r in rows]
    monkeypatch.setattr(_core.backend, "backends", lambda: changed)
    assert plan_key(session) != before


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_another_capability_of_a_backend_is_another_plan_and_another_verdict(
    session, monkeypatch: pytest.MonkeyPatch, name: str
):
    def verdict_key() -> str:  # an engine asks for the fingerprints once
        made = artefacts_module.Artefacts(context(session))
        return made._verdict_key("p", {"w": torch.ones(3)}).hex

    before = plan_key(session), verdict_key()
    original = _core.backend.fingerprint

    def other(asked: str, *rest: int) -> bytes:
        found = bytes(original(asked, *rest))
        return found + b" avx1024" if asked == name else found

    monkeypatch.setattr(_core.backend, "fingerprint", other)
    after = plan_key(session), verdict_key()
    assert before[0] != after[0] and before[1] != after[1]


# ---- verdicts: the very weights --------------------------------------------------------------


def test_each_weight_name_type_and_bit_is_in_a_verdicts_key(session):
    made = artefacts_module.Artefacts(context(session))

    def key(weights: dict[str, torch.Tensor]) -> str:
        return made._verdict_key("program", weights).hex

    module = bert()
    weights = dict(module.state_dict())
    base = key(weights)
    assert key(dict(reversed(weights.items()))) == base  # order is not content
    assert key({name: tensor.clone() for name, tensor in weights.items()}) == base
    seen = {base}
    for name, tensor in weights.items():
        flipped = tensor.clone()
        flipped.view(torch.uint8).reshape(-1)[-1] ^= 1
        seen.add(key({**weights, name: flipped}))
    first = next(iter(weights))
    seen.add(key({**weights, first: weights[first].to(torch.float64)}))
    seen.add(key({**weights, first: weights[first].reshape(-1)}))
    seen.add(key({("other" if n == first else n): t for n, t in weights.items()}))
    seen.add(made._verdict_key("another plan", weights).hex)
    assert len(seen) == 1 + len(weights) + 4
    transposed = torch.arange(6.0).reshape(2, 3).t()
    assert key({"w": transposed}) == key({"w": transposed.contiguous()})


def test_sources_are_told_the_same_wherever_a_package_lies(tmp_path: Path):
    def rows(root: str) -> list[list[str]]:
        files = {tmp_path / root / "package/code.py", tmp_path / "middle/library/code.py"}
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"# {file.parent.name}")
        return identity.source_rows({str(file) for file in files}, _core.cache.digest)

    assert rows("first") == rows("zlast")  # before and behind the other's path


# ---- stability: the same run elsewhere -------------------------------------------------------

SCRIPT = """
import json, torch, rm_abstract
from rm_abstract import cache
rm_abstract.init("cpu")
from transformers import BertConfig, BertModel
torch.manual_seed(0)
sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
model = BertModel(BertConfig(vocab_size=50, **sizes)).eval()
ids = torch.arange(18).reshape(2, 9)
with torch.no_grad():
    for _ in range(2):
        model(ids)
print(json.dumps(cache.open_cache().counters()))
"""


def run(*prefix: str, cwd: Path | None = None, **env: str) -> dict[str, int]:
    done = subprocess.run(
        [*prefix, sys.executable, "-c", SCRIPT],
        env={**os.environ, **env},
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.sampled(4, of="second process")
def test_a_run_elsewhere_finds_what_the_first_one_made(tmp_path: Path):
    package = Path(rm_abstract.__file__).parent
    copy = tmp_path / "machine" / "site-packages"
    shutil.copytree(package, copy / "rm_abstract", ignore=shutil.ignore_patterns("__pycache__"))
    assert run(PYTHONHASHSEED="1")["compile"] == 1
    other = {"PYTHONHASHSEED": "2", "LC_ALL": "C", "HOME": str(tmp_path), "TZ": "Asia/Seoul"}
    fixed = ["setarch", "-R"]  # without address randomisation
    if subprocess.run([*fixed, "true"], capture_output=True).returncode:
        fixed = []
    counters = run(*fixed, cwd=tmp_path, PYTHONPATH=str(copy), **other)
    assert (counters["miss"], counters["compile"]) == (0, 0), counters


@pytest.mark.slow
@pytest.mark.sampled(4, of="second process")
def test_compiling_again_gives_the_same_bytes():
    assert run()["compile"] == 1
    checked = run(RM_CACHE_MODE="check")
    assert (checked["check_same"], checked["check_differ"]) == (1, 0)


class Applies(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


def test_a_first_call_searches_for_its_sources_once(session, monkeypatch: pytest.MonkeyPatch):
    searched, stock = [], sources.of_module
    monkeypatch.setattr(sources, "of_module", lambda m: searched.append(m) or stock(m))
    model = rm_abstract.accelerate(Applies(torch.relu).eval())
    described, keys = [], identity.describe
    monkeypatch.setattr(
        artefacts_module, "describe", lambda *given: described.append(given) or keys(*given)
    )
    router = vars(model)["_compiled_call_impl"]
    taken, take = [], router.snapshots.take

    def watched():
        result = take()
        taken.append((len(searched), router.snapshots.found))
        return result

    monkeypatch.setattr(router.snapshots, "take", watched)
    with torch.no_grad():
        model(torch.ones(2, 3))
    ((before, found),) = taken
    assert before == 1 and found is not None
    assert [given[2] for given in described] == [found]
    assert router.snapshots.found is None  # it holds what forward reads


def test_functions_of_one_name_in_an_attribute_make_two_identities():
    def identity_of(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
        return identity.describe(Applies(function).eval(), lambda data: data)

    same, other = [(lambda x: torch.exp(x)) for _ in range(2)], lambda x: torch.tanh(x)
    two, three = (lambda x, by=by: x * by for by in (2.0, 3.0))
    assert identity_of(same[0]) == identity_of(same[1])
    assert len({identity_of(f) for f in (same[0], other)}) == 2
    assert len({identity_of(f) for f in (two, three)}) == 2


OWN_CLASS = """
import torch

class Own(torch.nn.Module):
    shared = [1.0]

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight * self.shared[0]
"""


def test_who_runs_a_script_makes_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`python -m cProfile` runs a script in a dictionary, and is the module `__main__` itself."""
    script = tmp_path / "script.py"
    script.write_text(OWN_CLASS)
    code = compile(OWN_CLASS, str(script), "exec")
    names = {"__name__": "__main__", "__file__": str(script)}

    module = types.ModuleType("__main__")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(code, vars(module))
    alone = identity.describe(module.Own().eval(), _core.cache.digest)

    runner = types.ModuleType("__main__")
    runner.__file__ = cProfile.__file__
    monkeypatch.setitem(sys.modules, "__main__", runner)
    exec(code, names)
    profiled = names["Own"]().eval()
    assert identity.describe(profiled, _core.cache.digest) == alone
    assert any(value is names["Own"].shared for value, _ in sources.of_module(profiled).held)
