"""The made-up maker of docs/plugin_guide.md, with states and a runtime that generates: the page's
own program in Python, and one in C++ by the installed headers. Both keep the contract, and
unmodified scripts generate on them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rm_abstract

ROOT = Path(__file__).resolve().parents[2]
CHECKS = (
    "programs compute what torch computes",
    "states stay where they are",
    "its generation gives the tokens of the model",
)


def extracted(folder: Path) -> Path:
    """The page's two files."""
    page = (ROOT / "docs" / "plugin_guide.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        if found := re.match(r"# (\w+\.py)", block):
            (folder / found.group(1)).write_text(block)
    assert sorted(p.name for p in folder.iterdir()) == ["rm_backend_zeta.py", "zeta_worker.py"]
    return folder / "rm_backend_zeta.py"


def compiled(folder: Path, *flags: str) -> Path:
    """Built as the page says: the installed headers, no build system."""
    out = folder / "rm_backend_zeta2.so"
    source = Path(__file__).parent / "plugins" / "generating_plugin.cpp"
    all_flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    command = [os.environ.get("CXX", "c++"), *all_flags, "-Werror", *flags]
    include = f"-I{rm_abstract.include_dir()}"
    subprocess.run([*command, include, str(source), "-o", str(out)], check=True)
    return out


@pytest.fixture(scope="module")
def python_plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extracted(tmp_path_factory.mktemp("zeta"))


@pytest.fixture(scope="module")
def compiled_plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("zeta2"))


def environment(**more: str) -> dict[str, str]:
    package = str(Path(rm_abstract.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": package, **more}


def conformance(plugin: Path) -> dict[str, tuple[str, str]]:
    command = [sys.executable, "-m", "rm_abstract.testing.conformance", str(plugin), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.stdout, done.stderr
    return {row["check"]: (row["verdict"], row["detail"]) for row in json.loads(done.stdout)}


@pytest.mark.sampled(2, of="guide program")
@pytest.mark.parametrize("kind", ["python_plugin", "compiled_plugin"])
def test_it_passes_the_conformance_suite(kind: str, request: pytest.FixtureRequest) -> None:
    found = conformance(request.getfixturevalue(kind))
    assert not {check: row for check, row in found.items() if row[0] == "failed"}
    assert {check: found[check][0] for check in CHECKS} == dict.fromkeys(CHECKS, "passed")


@pytest.mark.sampled(2, of="guide program")
def test_a_runtime_with_other_tokens_is_found_out(tmp_path: Path) -> None:
    plugin = compiled(tmp_path, "-DGENERATING_WRONG")
    command = [sys.executable, "-m", "rm_abstract.testing.execution", str(plugin), "--generation"]
    env = environment(RM_BACKEND_PATH=str(plugin))
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    (row,) = json.loads(done.stdout.splitlines()[-1])
    assert row["verdict"] == "failed" and "less likely" in row["detail"]


SCRIPT = """
import json, sys, torch
from transformers import GPT2Config, GPT2LMHeadModel
import rm_abstract as rm

device, settings = sys.argv[1], json.loads(sys.argv[2])
common = {"vocab_size": 48, "bos_token_id": None, "eos_token_id": None}
torch.manual_seed(0)
ids = torch.randint(1, 47, (3, 7))
mask = torch.ones_like(ids)
mask[0, :2] = 0
greedy = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
found = {}
with rm.init(device, **settings):
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=96, **common)
    model = GPT2LMHeadModel(config).eval()
    with rm.disabled():
        want = model.generate(ids, attention_mask=mask, **greedy)
    got = model.generate(ids, attention_mask=mask, **greedy)
    found["equal"] = torch.equal(got, want)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        row = model.generate(ids[:1], do_sample=True, temperature=1.5, top_k=20, max_new_tokens=20)
        draws.append(row.tolist())
    found["seeds"] = [draws[0] == draws[1], draws[0] == draws[2]]
    ends = {**greedy, "eos_token_id": int(want[1, 9])}
    with rm.disabled():
        short = model.generate(ids[1:2], attention_mask=mask[1:2], **ends)
    found["ends"] = torch.equal(model.generate(ids[1:2], attention_mask=mask[1:2], **ends), short)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.weight.mul_(-3)
    with rm.disabled():
        want = model.generate(ids, attention_mask=mask, **greedy)
    found["changed"] = torch.equal(model.generate(ids, attention_mask=mask, **greedy), want)
    beams = model.generate(ids[:1], num_beams=2, **greedy)
    with rm.disabled():
        found["beams"] = torch.equal(beams, model.generate(ids[:1], num_beams=2, **greedy))
    (entry,) = rm.explain(model).to_dict()["models"]
    found["generation"] = entry["generation_engine"]
print(json.dumps(found))
"""


def generated(plugin: Path, device: str, **settings: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, device, json.dumps(settings)],
        capture_output=True,
        text=True,
        env=environment(RM_BACKEND_PATH=str(plugin)),
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.sampled(2, of="guide program")
@pytest.mark.parametrize(
    ("kind", "device"), [("python_plugin", "zeta:0"), ("compiled_plugin", "zeta2:0")]
)
def test_an_unmodified_script_generates_on_it(
    kind: str, device: str, request: pytest.FixtureRequest
) -> None:
    found = generated(request.getfixturevalue(kind), device)
    served = found.pop("generation")
    assert found == {
        "equal": True, "seeds": [True, False], "ends": True, "changed": True, "beams": True,
    }  # fmt: skip
    assert served["engine"] == device.partition(":")[0] and "within" in served["checked"]
    assert served["requests"] == 6 and served["starts"] == 2  # once more for other weights
    assert served["declined"] == {"beam search": 1} and not served["crashes"]
