"""engine_options: names are those of the vLLM that is installed, read without importing it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import rm_abstract as rm
from rm_abstract.generation import registry
from rm_abstract.generation.vllm import options

SOURCE = """
class EngineArgs:
    model: str = "x"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    seed: int = 0
    skip_tokenizer_init: bool = False
    _private: int = 0

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that finds a package with the layout of vLLM's arguments."""
    package = tmp_path / "site" / "vllm"
    (package / "engine").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('nobody imports this here')\n")
    (package / "engine" / "arg_utils.py").write_text(SOURCE)
    python = tmp_path / "python"
    site = tmp_path / "site"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("RM_VLLM_PYTHON", str(python))


def test_names_are_those_of_the_installed_version_and_our_own(vllm: None) -> None:
    assert options.names() == [
        *("enable_log_requests", "idle_timeout_s", "max_model_len", "seed", "start_timeout_s"),
        "tensor_parallel_size",
    ]
    options.check({"max_model_len": 64, "start_timeout_s": 5})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_modle_len": 5}, "try 'max_model_len'"),
        ({"skip_tokenizer_init": True}, "rm_abstract sets"),
        ({"start_timeout_s": "long"}, "expected seconds"),
        ({"idle_timeout_s": -1}, "expected seconds"),
    ],
)
def test_what_is_not_understood_is_refused_at_init(vllm: None, given: object, words: str) -> None:
    with pytest.raises(rm.ConfigError, match=words):
        rm.init("cpu", inference_engine="vllm", engine_options=given)  # type: ignore[arg-type]
    assert not rm.is_initialized()


def test_options_without_an_engine_that_has_any_are_refused() -> None:
    with pytest.raises(rm.ConfigError, match="inference_engine='vllm'"):
        rm.init("cpu", engine_options={"max_model_len": 5})
    assert not rm.is_initialized()


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/true"])
def test_a_missing_vllm_is_an_error_at_init(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_VLLM_PYTHON", python)
    with pytest.raises(rm.Error, match="RM_VLLM_PYTHON") as error:
        rm.init("cpu", inference_engine="vllm")
    assert error.value.code == "RM330" and not rm.is_initialized()


def test_the_worker_sees_the_gpus_of_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    given = {"tensor_parallel_size": 2}
    assert options.environment(given, "cuda:1")["CUDA_VISIBLE_DEVICES"] == "5,6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert options.environment({}, "cuda:1")["CUDA_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in options.environment({}, "cpu")
    monkeypatch.setenv("RM_ABSTRACT", "1")
    found = options.environment({}, "cpu")
    assert "RM_ABSTRACT" not in found and found["RM_DISABLE"] == "1"
    assert os.path.isfile(os.path.join(found["PYTHONPATH"].split(":")[0], "rm_vllm_reload.py"))


def test_rebellions_npus_are_vllm_rblns(vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_RBLN_PYTHON", os.environ["RM_VLLM_PYTHON"])
    assert options.backend("rbln:0") == "vllm"  # what is named for vLLM goes first
    monkeypatch.delenv("RM_VLLM_PYTHON")
    assert [options.backend(one) for one in ("rbln:1", "npu:0", "cpu", "cuda:0")] == [
        *("rbln", "rbln", "vllm", "vllm")
    ]
    options.check({"max_model_len": 64}, "rbln:0")
    with pytest.raises(rm.Error, match="RM_VLLM_PYTHON"):
        options.check({}, "cpu")
    monkeypatch.setenv("RBLN_DEVICES", "2,3,5")
    given = {"additional_config": {"num_devices_per_local_rank": 2}}
    found = options.environment(given, "rbln:1")
    assert found["RBLN_VISIBLE_DEVICES"] == "3,5" and "RBLN_DEVICES" not in found
    assert "CUDA_VISIBLE_DEVICES" not in found
    started = options.arguments(given, "float32", "rbln")
    assert started["additional_config"] == {
        "use_custom_sampler": False, "num_devices_per_local_rank": 2,
    }  # fmt: skip
    assert "worker_extension_cls" not in started


def test_without_the_npu_vllm_rbln_is_not_asked(
    vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_RBLN_PYTHON", os.environ["RM_VLLM_PYTHON"])
    monkeypatch.delenv("RM_VLLM_PYTHON")
    monkeypatch.setenv("RM_HARDWARE_ROOT", str(tmp_path))
    with pytest.warns(rm.RoutingWarning, match="RM402"):
        active = rm.init("npu:0", inference_engine="vllm")
    try:
        assert active.device == "cpu"
        engine = registry.remote_engine(active.settings, active.device, object, print)
        assert engine is None
    finally:
        rm.shutdown()
