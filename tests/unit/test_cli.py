"""`rm-abstract`: its commands, with and without a working torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

import rm_abstract
from rm_abstract.cli.main import cli


def invoke(*arguments):
    return CliRunner().invoke(cli, arguments)


def test_help_lists_the_commands_and_version_prints_the_version():
    done = invoke("--help")
    for name in ("doctor", "devices", "backends", "compile", "cache", "version"):
        assert name in done.output
    assert invoke("version").output.strip() == rm_abstract.__version__
    assert rm_abstract.__version__ in invoke("--version").output


def test_devices_lists_usable_ones_first_and_says_why_others_are_not():
    rows = json.loads(invoke("devices", "--json").output)
    assert "cpu" in rows["usable"]
    assert all(note["code"].startswith("RM4") and note["message"] for note in rows["not_usable"])
    assert invoke("devices").output.splitlines()[0].endswith("(auto)")


def test_backends_lists_plugins_with_version_and_path():
    rows = {row["name"]: row for row in json.loads(invoke("backends", "--json").output)}
    assert rows["cpu"]["available"] and os.path.isabs(rows["cpu"]["path"])
    assert "cpu" in invoke("backends").output


def test_an_unknown_command_is_an_error():
    assert invoke("nonsense").exit_code == 2


MISSING = "raise ImportError('libfoo.so: not found')\n"
CRASH = """
import os, signal, sys
if "rm_abstract._core" in sys.modules:
    os.kill(os.getpid(), signal.SIGSEGV)
__version__ = "2.10.0"
"""


def doctor(tmp_path, *, broken=None, how=MISSING, **environment):
    """Runs the doctor in a child; ``broken`` is a module that does ``how`` when it is imported."""
    path = os.environ.get("PYTHONPATH", "")
    if broken:
        (tmp_path / broken).mkdir()
        (tmp_path / broken / "__init__.py").write_text(how)
        path = f"{tmp_path}{os.pathsep}{path}"
    done = subprocess.run(
        [sys.executable, "-m", "rm_abstract.cli.main", "doctor", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    return done.returncode, {row["name"]: row for row in found["checks"]}


def test_the_doctor_finds_a_sound_installation_sound(tmp_path):
    status, checks = doctor(tmp_path)
    assert status == 0, checks
    assert checks["core"]["status"] == checks["torch"]["status"] == "ok"
    assert checks["backend cpu"]["status"] == checks["devices"]["status"] == "ok"


def test_the_doctor_survives_a_broken_torch_and_names_the_fix(tmp_path):
    status, checks = doctor(tmp_path, broken="torch")
    assert status == 1
    assert checks["torch"]["status"] == "fail" and "libfoo.so" in checks["torch"]["detail"]
    assert checks["torch"]["remedy"].startswith("pip install")
    assert checks["devices"]["status"] == "ok"


def test_the_doctor_survives_a_torch_that_dies_beside_the_core(tmp_path):
    status, checks = doctor(tmp_path, broken="torch", how=CRASH)
    assert status == 1 and checks["torch"]["status"] == "ok"
    assert checks["devices"]["status"] == "fail" and "SIGSEGV" in checks["devices"]["detail"]
    assert "torch/__init__.py" in checks["devices"]["detail"]
    assert "before rm_abstract" in checks["devices"]["remedy"]
    assert checks["cache"]["status"] == "ok"


def test_the_doctor_names_a_remedy_when_devices_cannot_be_listed(tmp_path):
    stops = CRASH.replace("os.kill(os.getpid(), signal.SIGSEGV)", 'raise SystemExit("no licence")')
    assert stops != CRASH
    status, checks = doctor(tmp_path, broken="torch", how=stops)
    assert status == 1 and checks["torch"]["status"] == "ok"
    assert checks["devices"]["detail"] == "they cannot be listed: no licence"
    assert "import rm_abstract._core, torch" in checks["devices"]["remedy"]


def test_the_doctor_reports_a_bad_setting_and_an_unwritable_cache(tmp_path):
    status, checks = doctor(tmp_path, RM_DEVICE="tpu")
    assert status == 1 and "RM_DEVICE" in checks["settings"]["detail"]
    if os.geteuid() != 0:
        _, checks = doctor(tmp_path, RM_CACHE_DIR="/proc/nowhere")
        assert checks["cache"]["status"] == "warn"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    import torch
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes, intermediate_size=64, vocab_size=60)).save_pretrained(folder)
    return folder


@pytest.mark.sampled(4, of="second process")
def test_compile_fills_the_cache_so_that_the_next_run_hits(model_dir):
    command = [sys.executable, "-m", "rm_abstract.cli.main", "compile", str(model_dir), "--json"]
    command += ["--batch-size", "1,2", "--sequence-length", "8"]
    reports = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(done.stdout[done.stdout.index("{") :]))
    first, second = ({e["cache"] for e in r["models"][0]["entries"]} for r in reports)
    assert first <= {"miss", "hit"} and "miss" in first
    assert second == {"hit"}


def test_compile_refuses_bad_sizes_and_unknown_classes(model_dir):
    assert invoke("compile", str(model_dir), "--batch-size", "0").exit_code == 2
    assert invoke("compile", "/nowhere").exit_code == 2


def test_limits_of_serve_are_those_that_were_given(monkeypatch, tmp_path):
    pytest.importorskip("fastapi", reason="the group `serve` is not installed")
    from rm_abstract.generation.scheduler import Limits
    from rm_abstract.server import models, run

    given = []

    class Loaded(Exception):
        pass

    def load(folder, name, limits, *others):
        given.append(limits)
        raise Loaded

    monkeypatch.setattr(models, "load", load)
    monkeypatch.setattr(run, "run", None)
    options = ["--rows", "3", "--queue", "5", "--prompt-chunk", "48", "--prefix-mib", "7"]
    with rm_abstract.init("cpu"):
        done = invoke("serve", *options, str(tmp_path))
    assert isinstance(done.exception, Loaded), done.output
    wanted = Limits(rows=3, waiting=5, prompt_chunk=48, prefix_bytes=7 << 20)
    assert given == [wanted] and wanted.prompts_at_once == 4
