"""The backend `rbln` on a stand-in for Rebellions' `rebel` (tests/vendor/rebel):
what it finds without the vendor's software, models on it, and everything that can go wrong.
RM_TEST_RBLN_PYTHON (rm-abstract env create rbln) runs the workers in that environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rm_abstract as rm
from rm_abstract.plugin import Failure
from rm_abstract.vendors.rbln import artefact, description, messages, scratch

TESTS = Path(__file__).resolve().parents[1]
VENDOR = TESTS / "vendor"
PYTHON = os.environ.get("RM_TEST_RBLN_PYTHON") or sys.executable
sys.path.insert(0, str(TESTS / "fault"))
from npu_support import Encoder, alive, call_of, python_environment, run, worker_pids  # noqa: E402

HEAVY = os.environ.get("RM_HEAVY") == "1"  # every fault, every model
heavy = pytest.mark.skipif(not HEAVY, reason="RM_HEAVY=1 runs it")
STRICT = "error:capture,compile,device,correctness,cache"


def machine(root: Path, npus: int, cards: int = 0) -> Path:
    """A made-up machine's device nodes: Rebellions' and FuriosaAI's."""
    folder = root / "dev" / "rngd"
    folder.mkdir(parents=True)
    for number in range(npus):
        (root / "dev" / f"rbln{number}").touch()
    for number in range(cards):
        (folder / f"npu{number}mgmt").touch()
    return root


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two NPUs, and a vendor's software that sees them."""
    root = machine(tmp_path / "root", 2)
    monkeypatch.setenv("RM_HARDWARE_ROOT", str(root))
    monkeypatch.setenv("RM_RBLN_PYTHON", PYTHON)
    for name in ("PYTHONPATH", "RM_RBLN_PYTHONPATH"):  # this Python's workers, and another's
        monkeypatch.setenv(name, str(VENDOR))
    monkeypatch.setenv("REBEL_NPUS", "RBLN-CA22,RBLN-CA22")
    monkeypatch.setenv("RBLN_TARGET_SOC", "RBLN-CA22")
    monkeypatch.syspath_prepend(str(VENDOR))  # the distribution's version, as the worker sees it
    yield root
    rm.shutdown()


# ---- without the vendor's software ---------------------------------------------------------------


def function(root: Path, address: str, **files: str) -> None:
    folder = root / "sys" / "bus" / "pci" / "devices" / address
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def test_npus_are_named_by_their_pci_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, 2)
    monkeypatch.setenv("RM_HARDWARE_ROOT", str(root))
    monkeypatch.setenv("RM_RBLN_PYTHON", sys.executable)
    assert [d.arch for d in description.devices()] == ["RBLN", "RBLN"]
    function(root, "0000:01:00.0", vendor="0x1eff", device="0x1250", sriov_numvfs="2")
    function(root, "0000:02:00.0", vendor="0x10de", device="0x1250")
    function(root, "0000:03:00.0", vendor="0x1eff", device="0x1121")
    function(root, "0000:04:00.0", vendor="0x1eff", device="0x1250", sriov_numvfs="0")
    assert [d.arch for d in description.devices()] == ["RBLN-CA12", "RBLN-CA25"]
    monkeypatch.setenv("RBLN_TARGET_SOC", "RBLN-CR03")
    assert {d.arch for d in description.devices()} == {"RBLN-CR03"}
    (root / "dev" / "rsd0").touch()
    (root / "dev" / "rblnx").touch()
    assert len(description.nodes()) == 2


def test_the_drivers_version_is_in_the_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_HARDWARE_ROOT", str(tmp_path))
    assert description.driver() == ""
    for number in range(2):
        folder = tmp_path / "sys" / "class" / "rebellions" / f"rbln{number}"
        folder.mkdir(parents=True)
        (folder / "kernel_version").write_text("1.2.9\n")
    assert description.driver() == "driver=1.2.9"


def test_folders_of_workers_that_crashed_go_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f"rm-rbln-{gone.pid}-abc", f"rm-rbln-{os.getpid()}-abc", "rm-rbln-abc", "other"):
        (tmp_path / name).mkdir()
    scratch.sweep()
    assert (
        not (tmp_path / f"rm-rbln-{gone.pid}-abc").exists() and len(list(tmp_path.iterdir())) == 3
    )
    with scratch.folder() as folder:
        scratch.sweep()
        assert folder.is_dir()
    assert not folder.exists()


def test_damaged_artefacts_are_refused() -> None:
    whole = artefact.pack(b"\0file", 2)
    assert artefact.unpack(whole) == (b"\0file", 2)
    for damaged in (b"", whole[:3], whole[:9], b"\xff" * 40, b"\2\0\0\0{}"):
        with pytest.raises(Failure) as caught:
            artefact.unpack(damaged)
        assert caught.value.code == "RM602"


def test_what_stays_on_the_host_has_a_reason() -> None:
    assert description.why_not("linear", ["f32"]) == ""
    assert "crash" in description.why_not("sort", ["f32", "i64"])
    assert "no such operator" in description.why_not("aten.fft_fft.default", ["f32"])
    assert "f64" in description.why_not("add", ["f64"])


# Ends of what the vendor's software said in public.
MEANINGS = {
    "SYS_EBUSY: Lack of device memory. (code: -16)": "RM305",
    "Device 3 is not a valid NPU device. Please check your NPU status": "RM407",
    "RBLN_DEVICES environment variable changed at runtime. Initial value: 0": "RM407",
    "LOADING_FILE_NOT_FOUND: The specified file does not exist.": "RM602",
    "Inference failed: 503": "RM307",
}


@pytest.mark.parametrize("text", MEANINGS)
def test_the_runtimes_errors_get_the_reason_that_fits(text: str) -> None:
    failure = messages.of_running("execute", RuntimeError(text))
    assert failure.code == MEANINGS[text] and text in str(failure)


def test_the_compilers_errors_get_the_reason_that_fits() -> None:
    said = "The following operators are not implemented: ['aten::unfold']"
    failure = messages.of_compiling(NotImplementedError(said))
    assert failure.code == "RM304" and "aten::unfold" in str(failure)
    failure = messages.of_compiling(RuntimeError("Graph Generation: [DEVICE_GRAPH_CONVERSION]"))
    assert failure.code == "RM301"


def test_an_npu_without_software_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_HARDWARE_ROOT", str(machine(tmp_path, 1)))
    with pytest.raises(rm.DeviceUnavailableError, match="RM_RBLN_PYTHON") as caught:
        rm.init("npu:0", fallback="error")
    assert caught.value.code == "RM401"


def test_the_doctor_examines_the_environment(tmp_path: Path) -> None:
    from rm_abstract.vendors import environments, recipes

    recipe = recipes.Recipe("rbln", "RM_RBLN_PYTHON", (), (), by_hand=("rebel-compiler==0.12",))
    python = environments.create(recipe, tmp_path / "env", print)
    (missing,) = environments.examine(recipe, str(python))
    assert "got none" in missing.detail and "account" in missing.remedy
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "vendor.pth").write_text(f"{VENDOR}\n")
    (fine,) = environments.examine(recipe, str(python))
    assert not fine.remedy and "rebel-compiler 0.12.0" in fine.detail
    every = environments.examine(recipes.RBLN, str(python))
    assert "expected optimum-rbln==0.12.0, got none" in {one.detail for one in every}


@heavy
def test_every_operator_it_takes_is_compared_by_the_conformance_suite(
    standin: Path, tmp_path: Path
) -> None:
    plugin = tmp_path / "rm_backend_rbln.py"
    plugin.write_text("from rm_abstract.vendors.rbln.description import rbln\nplugin = rbln()\n")
    env = python_environment()
    env["PYTHONPATH"] = os.pathsep.join((str(VENDOR), env["PYTHONPATH"]))
    done = subprocess.run(
        [sys.executable, "-m", "rm_abstract.testing.conformance", str(plugin)],
        capture_output=True, text=True, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = re.findall(
        r"(\d+) of (\d+); not resize: it refuses .*; sort: it refuses", done.stdout
    )
    compared, every = map(int, said)
    assert compared == every - 2 >= 40, done.stdout


def test_a_model_is_checked_for_both_vendors_without_any_device(tiny_llama: Path) -> None:
    from click.testing import CliRunner

    from rm_abstract.cli.main import cli

    reports = {}
    for device in ("rbln", "furiosa"):
        done = CliRunner().invoke(cli, ["check", str(tiny_llama), "--device", device, "--json"])
        assert done.exit_code == 0, done.output
        reports[device] = json.loads(done.stdout)
    assert reports["rbln"]["device_nodes"] == reports["rbln"]["nodes"]
    kept = reports["furiosa"]["kept_on_cpu"]
    assert any(why.startswith("embedding: ") for why in kept)


@pytest.mark.sampled(2, of="rbln")
def test_check_compiles_the_parts_without_an_npu(
    tmp_path: Path, standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rm_abstract.cli.check import examine

    monkeypatch.setenv("RM_HARDWARE_ROOT", str(tmp_path / "nothing"))
    monkeypatch.setenv("REBEL_NPUS", "")
    (part,) = examine(Encoder().eval(), "rbln", call_of(), compiles=True)["parts"]
    assert part["runs_on"] == "rbln" and part["compiled_bytes"] > 1000
    assert os.environ["RM_HARDWARE_ROOT"] == str(tmp_path / "nothing")
    monkeypatch.setenv("REBEL_FAULT", "unsupported")
    (part,) = examine(Encoder().eval(), "rbln", call_of(), compiles=True)["parts"]
    assert part["error"].startswith("RM304") and "aten::unfold" in part["error"]


# ---- models --------------------------------------------------------------------------------------


def text_call(rows: int = 3, length: int = 11) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * length).reshape(rows, length) % 90 + 5
    mask = torch.ones_like(ids)
    mask[-1, -4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip


def bert() -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(vocab_size=100, **SMALL)), text_call()


def roberta() -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(vocab_size=100, max_position_embeddings=64, **SMALL)
    return RobertaForSequenceClassification(config), text_call()


def vit() -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=32, patch_size=8, **SMALL)
    return ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def served(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """What PyTorch gave, what the NPU gave, and the report."""
    rm.accelerate(model.eval())
    with torch.no_grad():
        with rm.disabled():
            expected = model(**inputs)[0]
        for _ in range(2):
            got = model(**inputs)[0]
    return expected, got, rm.explain(model)


@pytest.mark.parametrize(
    "make", [bert, roberta, vit] if HEAVY else [bert], ids=lambda make: make.__name__
)
@pytest.mark.sampled(2, of="rbln")
def test_encoders_run_on_the_npu(make: Callable[[], Any], standin: Path) -> None:
    torch.manual_seed(0)
    rm.init("npu:0", fallback=STRICT)
    assert rm.current_device() == "rbln:0"
    expected, got, report = served(*make())
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert report.routed == 1 and "rbln:0 part" in str(report)


@heavy
def test_real_minilm_gives_the_embeddings_it_should(standin: Path, minilm: Path) -> None:
    from sentence_transformers import SentenceTransformer

    texts = ["an NPU", "a longer sentence about something else entirely", "cats"]
    with rm.disabled():
        expected = SentenceTransformer(str(minilm), device="cpu").encode(texts)
    rm.init("rbln:0", fallback=STRICT)
    model = SentenceTransformer(str(minilm), device="cpu")
    for _ in range(2):
        got = model.encode(texts)
    report = rm.explain().to_dict()
    assert report["routed"] >= 1
    torch.testing.assert_close(
        torch.from_numpy(got), torch.from_numpy(expected), atol=1e-5, rtol=1e-4
    )


SCRIPT = """
import json, sys; sys.path.insert(0, {tests!r})
import rm_abstract as rm
from npu_support import run
with rm.init("npu:0", verbose=1):
    found = run(calls=2)
print(json.dumps([found.right, found.routed, sorted(found.codes)]))
"""


def script(source: str, **environment: str) -> tuple[list[str], str]:
    """What a process of its own prints, and its stderr."""
    source = source.format(tests=str(TESTS / "fault"))
    env = python_environment()
    env |= {"PYTHONPATH": os.pathsep.join((str(VENDOR), env["PYTHONPATH"])), **environment}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.sampled(2, of="rbln")
def test_without_an_npu_it_is_compiled_once_and_a_second_process_compiles_nothing(
    standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REBEL_NPUS", "")  # nodes, but the vendor's software sees no NPU
    with rm.init("npu:0"):
        result = run(calls=2)
    assert result.right and result.routed == 0 and "RM407" in result.codes
    # Brought to the machine with the NPU, where compiling would fail.
    (answer,), told = script(SCRIPT, REBEL_NPUS="RBLN-CA22", REBEL_FAULT="compile_error")
    assert answer == '[true, 1, ["RM108"]]'
    assert "Loading compiled model from cache" in told and "compiling with" not in told


MOVES = """
import sys; sys.path.insert(0, {tests!r})
import torch, rm_abstract as rm
from npu_support import Encoder, call_of
rm.init("npu:0")
found = rm.devices()
print(found.index("rbln:0") < found.index("furiosa:0"), rm.current_device())
model, inputs = rm.accelerate(Encoder().eval()), call_of()
with torch.no_grad():
    with rm.disabled():
        expected = model(**inputs)
    for device in ("npu:0", "npu:1", "cpu", "npu:0"):
        rm.switch_device(device)
        before = rm.explain(model).routed
        right = all(torch.allclose(model(**inputs), expected, atol=1e-5) for _ in range(3))
        print(rm.current_device(), right, rm.explain(model).routed > before)
"""


@pytest.mark.sampled(2, of="rbln")
def test_both_vendors_are_counted_and_a_live_model_moves_between_them(
    tmp_path: Path, standin: Path
) -> None:
    root = machine(tmp_path / "both", 1, cards=1)
    lines, _ = script(MOVES, RM_HARDWARE_ROOT=str(root), RM_FURIOSA_PYTHON=sys.executable)
    assert lines == [
        "True rbln:0",
        "rbln:0 True True",
        "furiosa:0 True False",  # FuriosaAI's software is not there: PyTorch answers
        "cpu True True",
        "rbln:0 True True",
    ]


@heavy
def test_a_program_runs_on_two_npus(standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rm.init("rbln:0", fallback=STRICT, compile_options={"rbln": {"num_devices": 2}}):
        result = run(calls=2)
    assert result.right and result.routed == 1
    with rm.init("rbln:0"):  # another artefact
        assert run(calls=2).routed == 1
    monkeypatch.setenv("REBEL_NPUS", "RBLN-CA22")
    with rm.init("rbln:0", fallback=STRICT, compile_options={"rbln": {"num_devices": 2}}):
        (error,) = run(calls=1).errors
    assert error.code == "RM407" and "NPU 1" in str(error)


# ---- what goes wrong -----------------------------------------------------------------------------

FAULTS: dict[str, tuple[type[rm.Error], str, str]] = {
    "compile_crash": (rm.CompileError, "RM303", "ends with a signal"),
    "compile_error": (rm.CompileError, "RM301", "DEVICE_GRAPH_CONVERSION"),
    "compile_hang": (rm.CompileError, "RM302", "within 3 s"),
    "compile_slow": (rm.CompileError, "RM302", "within 3 s"),
    "compile_garbage": (rm.CompileError, "RM602", "LOADING_"),
    "compile_wrong": (rm.ParityError, "RM501", "differs by"),
    "unsupported": (rm.CompileError, "RM304", "aten::unfold"),
    "out_of_memory": (rm.CompileError, "RM305", "Lack of device memory"),
    "version_skew": (rm.CompileError, "RM403", "0.1.0"),
    "load_crash": (rm.CompileError, "RM303", "ends with a signal"),
    "load_hang": (rm.CompileError, "RM308", "within 3 s"),
    "run_crash": (rm.ExecutionError, "RM303", "ends with a signal"),
    "run_hang": (rm.ExecutionError, "RM308", "within 3 s"),
    "run_error": (rm.ExecutionError, "RM307", "Inference failed: 501"),
    "device_lost": (rm.ExecutionError, "RM407", "No such device"),
    "wrong_numbers": (rm.ParityError, "RM501", "differs by"),
}
IN_CI = ("compile_crash", "unsupported", "wrong_numbers")


def deadlines(fault: str) -> dict[str, float]:
    """Short where the fault is to hang there, and long enough for the rest on a busy machine."""
    compiling = fault in ("compile_hang", "compile_slow")
    return {
        "timeout_s": 3 if compiling else 250,
        "load_timeout_s": 3 if fault == "load_hang" else 250,
        "execute_timeout_s": 3 if fault == "run_hang" else 100,
    }


@pytest.mark.parametrize("fault", sorted(FAULTS) if HEAVY else IN_CI)
def test_a_fault_is_the_right_error_in_time(
    fault: str, standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, code, text = FAULTS[fault]
    monkeypatch.setenv("REBEL_FAULT", fault)
    monkeypatch.setenv("REBEL_COMPILE_S", "60")
    with rm.init("rbln:0", fallback=STRICT, compile_options=deadlines(fault)):
        result = run(calls=1)  # a hang lasts an hour: pytest's own limit is far below
        pids = worker_pids()
    assert [type(error) for error in result.errors] == [kind], result.errors
    assert result.errors[0].code == code and text in str(result.errors[0])
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("fault", sorted(FAULTS) if HEAVY else ["compile_error"])
def test_a_fault_leaves_the_model_with_pytorch(
    fault: str, standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REBEL_FAULT", fault)
    monkeypatch.setenv("REBEL_COMPILE_S", "60")
    with rm.init("rbln:0", compile_options=deadlines(fault)):
        result = run(calls=3)
    assert result.right and len(result.outputs) == 3 and result.routed == 0
    assert FAULTS[fault][1] in result.codes


@heavy
def test_a_crash_while_it_serves_is_survived(
    tmp_path: Path, standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = tmp_path / "happened"
    switch.touch()
    monkeypatch.setenv("REBEL_FAULT", "run_crash")
    monkeypatch.setenv("REBEL_FAULT_ONCE", str(switch))
    with rm.init("rbln:0", fallback=STRICT):
        assert run(calls=2).routed == 1
        switch.unlink()
        result = run(calls=2)
    assert switch.exists()
    assert result.right and result.routed == 1 and not result.errors


@heavy
def test_results_of_bf16_are_served_only_when_they_are_allowed(
    standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REBEL_NUMERICS", "bf16")
    with rm.init("rbln:0", fallback=STRICT):
        (error,) = run(calls=1).errors
        assert error.code == "RM501"
    with rm.init("rbln:0", compile_options={"precision": "bf16"}, fallback=STRICT):
        result = run(calls=2)
    assert result.routed == 1 and not result.errors
    assert result.expected is not None
    torch.testing.assert_close(result.outputs[-1], result.expected, atol=0.05, rtol=0.05)
    assert not torch.equal(result.outputs[-1], result.expected)


def test_another_version_in_the_workers_environment_is_refused(
    tmp_path: Path, standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "rebel_compiler-0.13.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: rebel-compiler\nVersion: 0.13.0\n"
    )
    for name in ("PYTHONPATH", "RM_RBLN_PYTHONPATH"):
        monkeypatch.setenv(name, os.pathsep.join((str(tmp_path), str(VENDOR))))
    with rm.init("rbln:0", fallback=STRICT):
        (error,) = run(calls=1).errors
    assert error.code == "RM403" and "rebel-compiler=0.13.0" in str(error)
