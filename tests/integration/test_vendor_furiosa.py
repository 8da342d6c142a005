"""The backend `furiosa`: what it says without FuriosaAI's software, and what the real compiler does
where RM_TEST_FURIOSA_PYTHON names an environment that has it. No card is needed for either."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rm_abstract as rm
from rm_abstract.plugin import Failure
from rm_abstract.vendors import environments, recipes
from rm_abstract.vendors.furiosa import artefact, description, messages
from rm_abstract.vendors.furiosa.attention import as_sum, mask_inputs, spelled_out
from rm_abstract.worker.ir_to_torch import ir_to_torch

PACKAGE = str(Path(rm.__file__).parent.parent)
SDK = os.environ.get("RM_TEST_FURIOSA_PYTHON", "")
with_sdk = pytest.mark.skipif(
    not SDK or shutil.which(messages.CROSS_COMPILER) is None,
    reason="no RM_TEST_FURIOSA_PYTHON (rm-abstract env create furiosa), or no cross compiler",
)


def machine(root: Path, cards: int) -> Path:
    """A made-up machine's device nodes, each card's parts among them."""
    folder = root / "dev" / "rngd"
    folder.mkdir(parents=True)
    for number in range(cards):
        for part in ("mgmt", "pe0", "pe0-3", "bar0"):
            (folder / f"npu{number}{part}").touch()
    return root


# ---- without the vendor's software ---------------------------------------------------------------


def test_cards_are_counted_by_their_management_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_HARDWARE_ROOT", str(machine(tmp_path, 11)))
    monkeypatch.setenv("RM_FURIOSA_PYTHON", sys.executable)
    assert [device.name for device in description.devices()] == [f"RNGD {i}" for i in range(11)]
    monkeypatch.setenv("RM_HARDWARE_ROOT", str(tmp_path / "nothing"))
    assert description.devices() == []


def said(root: Path, source: str) -> list[str]:
    """What a script prints. A process of its own: one keeps the cards it has found."""
    env = {**os.environ, "RM_HARDWARE_ROOT": str(root), "PYTHONPATH": PACKAGE}
    code = "import os, sys, rm_abstract as rm\n" + source
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_card_without_software_says_how_to_get_it_and_is_used_with_it(tmp_path: Path) -> None:
    source = """
try:
    rm.init("npu:0", fallback="error")
except rm.DeviceUnavailableError as error:
    print(error.code, error)
rm.init("furiosa:0"); print(rm.current_device()); rm.shutdown()
os.environ["RM_FURIOSA_PYTHON"] = sys.executable
rm.init("npu:1", fallback="error"); print(rm.current_device()); rm.shutdown()
rm.init("auto", fallback="error"); print(rm.current_device())
"""
    error, *served = said(machine(tmp_path, 2), source)
    assert error.startswith("RM401") and "env create furiosa" in error
    assert served == ["cpu", "furiosa:1", "cpu"]


def test_a_card_that_appears_later_is_seen(tmp_path: Path) -> None:
    source = f"""
os.environ["RM_FURIOSA_PYTHON"] = sys.executable
rm.init("furiosa:0"); print(rm.current_device()); rm.shutdown()
os.environ["RM_HARDWARE_ROOT"] = {str(machine(tmp_path, 1))!r}
rm.init("furiosa:0"); print(rm.current_device())
"""
    assert said(tmp_path / "none", source) == ["cpu", "furiosa:0"]


def test_what_stays_on_the_host_has_a_reason() -> None:
    assert description.why_not("linear", ["f32"]) == ""
    assert "no such operator" in description.why_not("sort", ["f32", "i64"])
    assert "i64" in description.why_not("add", ["i64"])


def test_masks_of_attention_become_sums_and_mean_the_same() -> None:
    import torch

    text = """rmir 1
input %0 "q" : f32[2,2,8,4]
input %1 "mask" : bool[2,1,1,8]
input %2 "other" : bool[2,2,8,4]
%3 = sdpa(%0, %0, %0, %1) {is_causal=0, scale=0x1p-1} : f32[2,2,8,4]
%4 = where(%2, %3, %0) : f32[2,2,8,4]
return %4
"""
    module = ir_to_torch(text, {})
    assert mask_inputs(module.program) == {1}  # not the one that something else reads
    torch.manual_seed(0)
    x, keep = torch.randn(2, 2, 8, 4), torch.arange(8).expand(2, 1, 1, 8) < 5
    other = torch.rand(2, 2, 8, 4) < 0.5
    words = ir_to_torch(text, {}, {"sdpa": spelled_out})
    (with_mask,), (with_sum,) = module(x, keep, other), words(x, as_sum(keep), other)
    torch.testing.assert_close(with_sum, with_mask)
    assert not torch.equal(with_sum, module(x, torch.ones_like(keep), other)[0])


# Ends of what furiosa-torch 2026.4.0 said, shortened.
MEANINGS = {
    "compile error:\nfailed to import dfg: Not importable for all cases, and_1\naten_err:": (
        "RM304",
        "and_1",
    ),
    "compile error:\nO2130 is not an operator that is yet supported by the compiler / Aten / "
    "Primitive operators are not supported ... Cast": ("RM304", "Cast"),
    "compile error:\ngraph.count_valid_operators_if(...) (2) != 0 (0)": ("RM304", "schedule"),
    "compile error:\nassertion failed: internal": ("RM301", "assertion failed"),
}


@pytest.mark.parametrize("text", MEANINGS)
def test_the_compilers_errors_get_the_reason_that_fits(text: str) -> None:
    code, part = MEANINGS[text]
    failure = messages.of_compiling("failed to compile\ngraph():\n" + text)
    assert failure.code == code and part in str(failure)


def test_a_missing_cross_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    failure = messages.of_compiling("compile error:\nNo such file or directory (os error 2)")
    assert failure.code == "RM401" and "apt-get install gcc-aarch64-linux-gnu" in str(failure)


def test_damaged_artefacts_are_refused() -> None:
    whole = artefact.Artefact("rmir 1\nreturn %0\n", ["w1", ""], b"\0binary").pack()
    assert artefact.unpack(whole).runnable == b"\0binary"
    for damaged in (b"", whole[:3], whole[:20], b"\xff" * 40, b"\2\0\0\0{}"):
        with pytest.raises(Failure) as caught:
            artefact.unpack(damaged)
        assert caught.value.code == "RM602"


def test_an_environment_is_made_and_examined(tmp_path: Path) -> None:
    recipe = recipes.Recipe("made_up", "RM_MADE_UP_PYTHON", pinned=(), others=())
    folder = tmp_path / "env"
    python = environments.create(recipe, folder, print)
    code = "import rm_abstract.plugin as p; print(p.__file__)"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and str(folder) in done.stdout, done.stderr
    found = environments.examine(recipes.FURIOSA, str(python))
    wrong = {finding.detail for finding in found if finding.remedy}
    assert "expected furiosa-torch==2026.4.0, got none" in wrong
    assert not any("rm_abstract" in detail for detail in wrong)
    with pytest.raises(rm.ConfigError, match="not there yet"):
        environments.create(recipe, folder, print)
    (finding,) = environments.examine(recipes.FURIOSA, str(tmp_path / "none"))
    assert finding.remedy and "does not run" in finding.detail


def test_an_environment_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    recipe = recipes.Recipe("bad", "RM_BAD_PYTHON", pinned=("not a requirement",), others=())
    with pytest.raises(rm.DeviceUnavailableError, match="not a requirement"):
        environments.create(recipe, tmp_path / "env", print)
    assert not (tmp_path / "env").exists()


# ---- with it: the real compiler ------------------------------------------------------------------

START = "import json, torch, rm_abstract as rm; torch.manual_seed(0)"
MLP = """
model = torch.nn.Sequential(
    torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(),
    torch.nn.Linear(128, 32),
).eval()
inputs = (torch.randn(8, 64),)
"""
SCRIPT = """
with torch.no_grad():
    wanted = model(*inputs)
    rm.init("npu:0", compile_options={"precision": "bf16", "timeout_s": 14000})
    model = rm.accelerate(model)
    got = [model(*inputs) for _ in range(2)]
right = all(torch.equal(a[0], wanted[0]) for a in got)
reasons = rm.explain(model).to_dict()["models"][0]["reasons"]
print(json.dumps([rm.current_device(), right, [[r["code"], r["detail"]] for r in reasons]]))
"""


def served(
    cache: Path, root: Path, model: str = MLP, limit_s: float = 1900, **more: str
) -> tuple[list[list[str]], str]:
    """The reasons of a script of its own that wants the card, and its stderr."""
    env = {**os.environ, "RM_HARDWARE_ROOT": str(root), **more}
    env["PYTHONPATH"] = PACKAGE  # with another torch than the worker's
    env |= {"RM_CACHE_DIR": str(cache), "RM_VERBOSE": "1", "RM_FURIOSA_PYTHON": SDK}
    done = subprocess.run(
        [sys.executable, "-c", START + model + SCRIPT],
        capture_output=True, text=True, env=env, timeout=limit_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    device, right, reasons = json.loads(done.stdout.splitlines()[-1])
    assert device == "furiosa:0" and right  # PyTorch's own results: no card computes
    return reasons, done.stderr


@with_sdk
def test_a_program_is_compiled_for_real_once(tmp_path: Path) -> None:
    root, cache = machine(tmp_path / "root", 1), tmp_path / "cache"
    reasons, told = served(cache, root)
    assert "compiling with furiosa-torch" in told
    # No driver here: torch says that memory ran out, we say what is missing.
    ((code, detail),) = reasons
    assert code == "RM401" and messages.RUNTIME in detail
    reasons, told = served(cache, root)
    assert "Loading compiled model from cache" in told
    assert "compiling with furiosa-torch" not in told and reasons[0][0] == "RM401"


ENCODERS = {
    "two layers of BERT": """
from transformers import BertConfig, BertModel
model = BertModel(
    BertConfig(
        vocab_size=100, hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=512,
    ),
    add_pooling_layer=False,
).eval()
""",
    "MiniLM": """
from transformers import AutoModel
model = AutoModel.from_pretrained({minilm!r}, add_pooling_layer=False).eval()
""",
}
TOKENS = "ids = torch.arange(64)[None] % 90 + 5\ninputs = (ids, torch.ones_like(ids))\n"


@with_sdk
@pytest.mark.skipif(os.environ.get("RM_HEAVY") != "1", reason="RM_HEAVY=1 runs it: hours")
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_compiled_for_real_once(name: str, tmp_path: Path, minilm: Path) -> None:
    root, cache = machine(tmp_path / "root", 1), tmp_path / "cache"
    source = ENCODERS[name].format(minilm=str(minilm)) + TOKENS
    for word in ("compiling with furiosa-torch", "Loading compiled model from cache"):
        begun = time.monotonic()
        reasons, told = served(cache, root, source, 20_000)
        print(f"{name}: {time.monotonic() - begun:.0f} s\n{told}{reasons}")
        ((code, detail),) = reasons
        assert code == "RM401" and messages.RUNTIME in detail, reasons
        assert word in told
    assert "compiling with furiosa-torch" not in told


@with_sdk
def test_without_the_cross_compiler_the_error_names_it(tmp_path: Path) -> None:
    root = machine(tmp_path / "root", 1)
    reasons, _ = served(tmp_path / "cache", root, PATH="/nowhere")
    ((code, detail),) = reasons
    assert code == "RM401" and "gcc-aarch64-linux-gnu" in detail


ASKED = """
import sys, torch, furiosa.torch as vendor
from furiosa.torch import _db
from rm_abstract.vendors.furiosa import compiler, description
from rm_abstract.worker.ir_to_torch import ir_to_torch
taken = {str(op).removeprefix("aten.") for op in _db.SUPPORTED_ATEN_OPS}
print([name for row in description.OPERATORS.values() for name in row if name not in taken])
text = '''rmir 1
input %0 "input0" : f32[8,64]
weight %1 "w" : f32[64,64]
%2 = linear(%0, %1) : f32[8,64]
%3 = relu(%2) : f32[8,64]
%4 = add(%3, %0) : f32[8,64]
return %4
'''
def rounded(value):
    return value.bfloat16().float()
def linear(operands, node):
    return torch.nn.functional.linear(rounded(operands[0]), rounded(operands[1]))
def error(got, wanted):
    return float((got - wanted).norm() / wanted.norm())
torch.manual_seed(0)
weights, x = {"w": torch.randn(64, 64) / 8}, torch.randn(8, 64)
module = ir_to_torch(text, weights).eval()
(wanted,), (in_bf16,) = module(x), ir_to_torch(text, weights, {"linear": linear}).eval()(x)
(got,), (imported,) = compiler.lowered(module)(x), compiler.imported(module)(x)
print(error(imported, wanted), error(got, in_bf16), error(in_bf16, wanted), error(got, wanted))
"""


@with_sdk
def test_the_table_of_operators_and_the_lowered_numbers_are_the_compilers(tmp_path: Path) -> None:
    done = subprocess.run(
        [SDK, "-c", ASKED], capture_output=True, text=True, cwd=tmp_path, timeout=500
    )
    assert done.returncode == 0, done.stderr
    missing, errors = done.stdout.splitlines()[-2:]
    assert missing == "[]"
    imported, lowered, rounding, both = map(float, errors.split())
    assert imported <= 1e-6  # what we hand over is the program
    assert lowered <= 1e-5  # and the compiler changes the numbers in one way only: operands of
    assert 0 < rounding < 2**-7  # products are rounded to bfloat16, 2**-9 each
    assert abs(both - rounding) <= 1e-5
