"""Other ways in than init(): the environment, torch.compile, IPython, a pytest plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from torch import nn

import rm_abstract as rm

SCRIPT = """
import sys
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
with torch.no_grad():
    for _ in range(3):
        model(torch.ones(2, 8))
seen = "rm_abstract" in sys.modules
print(seen, sys.modules["rm_abstract"].explain().routed if seen else 0)
"""


def run(tmp_path, script: str, *arguments: str, **environment: str) -> str:
    file = tmp_path / "script.py"
    file.write_text(script)
    done = subprocess.run(
        [sys.executable, *arguments, str(file)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_environment_alone_switches_it_on(tmp_path):
    assert run(tmp_path, SCRIPT, RM_ABSTRACT="1").startswith("True 2")


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_without_the_variable_nothing_is_imported(tmp_path, value):
    assert run(tmp_path, SCRIPT, RM_ABSTRACT=value).startswith("False 0")


def test_a_wrong_option_is_told_and_the_script_runs(tmp_path):
    output = run(tmp_path, "print('ran')", RM_ABSTRACT="1", RM_DEVICE="toaster")
    assert "ran" in output and output.count("RM_ABSTRACT is set, but init() failed") == 1
    assert "toaster" in output


def test_torch_compile_finds_the_backend_by_name_and_serves_the_graph():
    names = [point.name for point in metadata.entry_points(group="torch_dynamo_backends")]
    assert "rm_abstract" in names
    with rm.init("cpu"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval()
        compiled = torch.compile(model, backend="rm_abstract")
        x = torch.randn(3, 8)
        with torch.no_grad():
            for _ in range(4):
                found = compiled(x)
            with rm.disabled():
                expected = model(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert rm.explain().routed >= 2
        (record,) = [m for m in rm.explain().models if m["routed"]]
        assert record["model"] == "FixedWeights"
        torch._dynamo.reset()


def test_torch_compile_notices_weights_that_change():
    with rm.init("cpu"):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(8, 4)).eval()
        compiled = torch.compile(model, backend="rm_abstract")
        x = torch.randn(3, 8)
        with torch.no_grad():
            for _ in range(4):
                compiled(x)
            model[0].weight.mul_(2)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
            model[0].weight = nn.Parameter(torch.zeros(4, 8))
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        torch._dynamo.reset()


def test_torch_compile_gives_gradients():
    with rm.init("cpu"):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(8, 4), nn.Tanh()).eval()
        compiled = torch.compile(model, backend="rm_abstract")
        x = torch.randn(3, 8)
        for _ in range(4):
            compiled(x)
        compiled(x).sum().backward()
        found, model[0].weight.grad = model[0].weight.grad, None
        with rm.disabled():
            model(x).sum().backward()
        torch.testing.assert_close(found, model[0].weight.grad, rtol=1e-4, atol=1e-5)
        torch._dynamo.reset()


def test_torch_compile_refuses_options_with_the_way_to_give_them():
    from rm_abstract.doors.dynamo import rm_abstract as backend

    with pytest.raises(TypeError, match=r"rm_abstract\.init"):
        backend(torch.fx.symbolic_trace(nn.ReLU()), [torch.ones(1)], mode="fast")


class Shell:
    """What the extension uses of IPython's shell."""

    def __init__(self) -> None:
        self.magics_manager = self
        self.magics: dict[str, dict[str, object]] = {"line": {}}

    def register_magic_function(self, function, magic_kind, magic_name):
        self.magics[magic_kind][magic_name] = function


def test_the_ipython_extension_initialises_and_leaves(capsys):
    shell = Shell()
    rm.load_ipython_extension(shell)
    assert rm.is_initialized()
    shell.magics["line"]["rm_explain"]("")
    assert "calls ran compiled" in capsys.readouterr().out
    rm.unload_ipython_extension(shell)
    assert not rm.is_initialized() and not shell.magics["line"]


TESTS = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 8)).eval()

def test_calls():
    with torch.no_grad():
        for _ in range(8):
            model(torch.ones(2, 8))

def test_wrong():
    assert False
"""


def plugin(tmp_path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "known.yaml").write_text("- id: '*::test_wrong'\n  reason: known\n")
    command = [sys.executable, "-m", "pytest", "-p", "rm_abstract.pytest_plugin", "-q", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)


@pytest.mark.sampled(1, of="pytest plugin")
def test_the_pytest_plugin_runs_tests_with_it_and_knows_expected_failures(tmp_path):
    done = plugin(tmp_path, "--rm-xfail", "known.yaml", "--rm-min-routed", "0.5")
    assert done.returncode == 0, done.stdout
    assert "1 xfailed" in done.stdout and "7 of 8 module calls were served" in done.stdout


@pytest.mark.sampled(1, of="pytest plugin")
def test_the_pytest_plugin_fails_below_the_share(tmp_path):
    done = plugin(tmp_path, "--rm-xfail", "known.yaml", "--rm-min-routed", "0.99")
    assert done.returncode == 1 and "asks for a share of 0.99" in done.stdout


def test_the_pytest_plugin_names_a_file_it_cannot_read(tmp_path):
    done = plugin(tmp_path, "--rm-xfail", "absent.yaml")
    assert done.returncode == 4 and "absent.yaml" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rm-device", "toaster"), "toaster"),
        (("--rm-min-routed", "7"), "share between 0 and 1"),
        (("--rm-min-routed", "most"), "share between 0 and 1"),
    ],
)
def test_the_pytest_plugin_names_an_argument_it_cannot_use(tmp_path, arguments, said):
    done = plugin(tmp_path, *arguments)
    assert done.returncode == 4 and said in done.stderr
    assert "Traceback" not in done.stdout + done.stderr and "INTERNALERROR" not in done.stdout


@pytest.mark.sampled(1, of="pytest plugin")
def test_the_pytest_plugin_names_a_pattern_of_no_test(tmp_path):
    (tmp_path / "old.yaml").write_text("- id: '*::test_wrong'\n- id: '*::test_gone'\n")
    done = plugin(tmp_path, "--rm-xfail", "old.yaml")
    assert done.returncode == 0 and "names '*::test_gone'" in done.stdout
    assert "test_wrong'" not in done.stdout


def test_the_doctor_knows_the_ways_in():
    command = [sys.executable, "-m", "rm_abstract.cli.main", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout, done.stderr
    checks = {row["name"]: row for row in json.loads(done.stdout)["checks"]}
    assert checks["RM_ABSTRACT"]["status"] == "ok"
    assert checks["torch.compile"]["status"] == "ok"


def test_the_doctor_knows_every_door():
    from rm_abstract.cli import doctor

    findings = {finding.name: finding for finding in doctor._doors()}
    assert {"RM_ABSTRACT", "torch.compile", "pytest", "IPython", "scripts"} <= set(findings)
    assert findings["pytest"].detail.endswith("-p rm_abstract.pytest_plugin")
    assert "backend" in findings["torch.compile"].detail
