"""Backends written in Python: models on them, in workers, whatever the vendor's code does.

tests/python_plugins has two: `mine` runs the program's torch module, `ort` takes ONNX.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import venv
from pathlib import Path
from typing import Any

import pytest

import rm_abstract

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fault"))
from npu_support import Result, run

TESTS = Path(__file__).resolve().parents[1]
PLUGINS = TESTS / "python_plugins"
PACKAGE = str(Path(rm_abstract.__file__).parent.parent)

SCRIPT = """
import json, sys
sys.path.insert(0, {support!r})
from npu_support import rm, run
rm.init({device!r}, **json.loads({settings!r}))
result = run(calls={calls})
print(json.dumps({{
    "device": rm.current_device(), "right": result.right, "routed": result.routed,
    "codes": sorted(result.codes), "warned": result.warned,
    "errors": [[type(e).__name__, e.code, str(e)] for e in result.errors],
    "outputs": len(result.outputs),
    "compiled": sum(
        row["cache"] == "miss" for m in result.report["models"] for row in m["entries"]
    ),
    "imported": sorted({{"mine_worker", "ort_worker", "onnxruntime"}} & set(sys.modules)),
}}))
"""


def serve(
    device: str, calls: int = 3, settings: dict[str, Any] | None = None, **environment: str
) -> dict[str, Any]:
    """A script of its own on a device: what it saw."""
    source = SCRIPT.format(
        support=str(TESTS / "fault"),
        device=device,
        settings=json.dumps(settings or {}),
        calls=calls,
    )
    env = {**os.environ, "PYTHONPATH": PACKAGE, "RM_BACKEND_PATH": str(PLUGINS), **environment}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=env, timeout=200
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


STRICT = {"fallback": "error:capture,compile,device,correctness,cache"}


def test_a_model_runs_on_a_backend_in_python_and_its_sdk_stays_in_the_worker() -> None:
    first = serve("mine:0", settings=STRICT)
    assert first["device"] == "mine:0"
    assert first["right"] and first["routed"] == 2 and first["compiled"] == 1
    assert first["imported"] == []
    second = serve("mine", settings=STRICT)
    assert second["right"] and second["routed"] == 2 and second["compiled"] == 0


FAULTS = {
    "compile_error": ("RM301", "E1042"),
    "compile_crash": ("RM303", "simulated crash"),
    "compile_garbage": ("RM301", "bytes"),
    "unsupported": ("RM304", "attention of this kind"),
    "run_crash": ("RM303", "simulated crash"),
    "device_lost": ("RM407", "the device"),
    "wrong_numbers": ("RM501", "differs by"),
}


def here(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Result:
    """Two calls on the device `mine` in this process."""
    monkeypatch.setenv("RM_BACKEND_PATH", str(PLUGINS))
    with rm_abstract.init("mine:0", **settings):
        return run(calls=2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_what_goes_wrong_in_it_is_told_and_the_model_runs_eager(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE_FAULT", fault)
    found = here(monkeypatch)
    code, text = FAULTS[fault]
    assert found.right and len(found.outputs) == 2 and found.routed == 0
    assert code in found.codes
    assert sum(code in line and text in line for line in found.warned) == 1, found.warned


def test_a_program_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE_FAULT", "run_hang")
    found = here(monkeypatch, compile_options={"execute_timeout_s": 1})
    assert found.right and "RM308" in found.codes


@pytest.mark.parametrize("stage", ["compile", "load"])
def test_a_call_of_the_sdk_that_waits_for_ever_is_given_up_without_a_deadline(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE_FAULT", f"{stage}_hang")
    options = {"timeout_s": 0, "execute_timeout_s": 0, "stall_timeout_s": 5}
    found = here(monkeypatch, compile_options=options)
    assert found.right and "RM309" in found.codes
    (told,) = (line for line in found.warned if "RM309" in line)
    assert f"in {stage}" in told and "mine_worker.py" in told  # where it hangs


DEVICES_OF_A_FOLDER = """
import os
from rm_abstract.plugin import Device, PythonPlugin

def devices():
    return [Device(name, arch="comes-1") for name in sorted(os.listdir(os.environ["NODES"]))]

plugin = PythonPlugin(
    name="comes", version="1", worker="nothing:Worker", devices=devices, why_not=lambda *_: "",
)
"""


def test_devices_that_come_and_go_are_seen(tmp_path: Path) -> None:
    """A list that is kept for ever sends a long-lived process to devices that are gone."""
    (tmp_path / "rm_backend_comes.py").write_text(DEVICES_OF_A_FOLDER)
    source = """if True:
        import os, pathlib
        import rm_abstract as rm

        nodes = pathlib.Path(os.environ["NODES"])
        nodes.mkdir()
        def listed():
            return [name for name in rm.devices() if name.startswith("comes")]
        def names():
            return [rm.get_device_info(name)["name"] for name in listed()]
        seen = [listed()]
        (nodes / "b").touch()
        seen.append(names())
        (nodes / "a").touch()
        seen.append(names())
        rm.init("comes:1")
        seen.append([rm.current_device()])
        rm.shutdown()
        (nodes / "a").unlink()
        try:
            rm.init("comes:1")
        except rm.DeviceUnavailableError as error:
            seen.append([error.code])
        seen.append(names())
        (nodes / "b").unlink()
        seen.append(listed())
        print(seen)
    """
    env = {**os.environ, "PYTHONPATH": PACKAGE, "RM_BACKEND_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True,
        env={**env, "NODES": str(tmp_path / "nodes")}, timeout=200,
    )  # fmt: skip
    assert done.stdout.strip() == str([[], ["b"], ["a", "b"], ["comes:1"], ["RM402"], ["b"], []]), (
        done.stderr
    )


@pytest.mark.sampled(2, of="interpreters of plugins")
def test_its_own_options_reach_it_and_are_in_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_WORKER_LOG_DIR", str(tmp_path))
    seen = []
    for level in (3, 4, 3):
        found = here(monkeypatch, compile_options={"mine": {"level": level}})
        assert found.right and found.routed == 1
        (model,) = found.report["models"]
        seen.append(model["entries"][-1]["cache"])
    assert seen == ["miss", "miss", "hit"]
    told = "".join(log.read_text() for log in tmp_path.glob("*-compile.log"))
    assert "mine: level 3" in told and "mine: level 4" in told
    monkeypatch.setenv("RM_PLUGIN_OPTIONS", '{"mine": {"level": 4}}')
    (model,) = here(monkeypatch).report["models"]
    assert model["entries"][-1]["cache"] == "hit"


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        ({"mine": {"lefel": 3}}, ["mine (level)", "lefel"]),
        ({"mino": {"level": 3}}, ["name of a plugin", "mino"]),
        ({"plugin_options": "[1]"}, ["JSON object", "[1]"]),
        ({"plugin_options": "{"}, ["JSON object"]),
    ],
)
def test_options_of_a_plugin_that_it_does_not_have_are_refused(
    options: dict[str, Any], mentions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_BACKEND_PATH", str(PLUGINS))
    with pytest.raises(rm_abstract.ConfigError) as caught:
        rm_abstract.init("mine:0", compile_options=options)
    assert all(word in str(caught.value) for word in mentions), caught.value


NODES = """
import sys; sys.path.insert(0, {plugins!r})
from dataclasses import replace
from rm_backend_mine import plugin as mine

def why_not_node(node):
    rank = max(len(one.shape) for one in (*node.operands, *node.results) if one is not None)
    if node.operator == "linear" and node.operands[1].shape[0] > 20:
        return f"no linear of {{node.operands[1].shape[0]}} columns"
    if node.operator == "reduce" and node.attributes["axes"] != [0]:
        return f"no reduction of the axes {{node.attributes['axes']}}"
    return f"no rank {{rank}}" if rank > 4 else None

plugin = replace(mine, name="nodes", why_not_node=why_not_node)
"""


def test_it_refuses_operators_by_their_shapes_and_attributes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rm_backend_nodes.py").write_text(NODES.format(plugins=str(PLUGINS)))
    (tmp_path / "mine_worker.py").write_text((PLUGINS / "mine_worker.py").read_text())
    monkeypatch.setenv("RM_BACKEND_PATH", str(tmp_path))
    with rm_abstract.init("nodes:0", fallback="error:capture,compile,device,correctness"):
        found = run(calls=2)
    (entry,) = (row for m in found.report["models"] for row in m["entries"])
    assert found.right and found.routed == 1
    kept = set(entry["kept"])  # Encoder has linears of 16 to 32 columns and back
    assert "linear: no linear of 32 columns" in kept, kept
    assert any("no reduction of the axes [1]" in why for why in kept), kept


def test_an_answer_of_another_kind_is_the_plugins_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = NODES.format(plugins=str(PLUGINS)).replace("else None", "else 7")
    source = source.replace('"nodes"', '"odd"')  # a process keeps the plugins it has found
    (tmp_path / "rm_backend_odd.py").write_text(source)
    (tmp_path / "mine_worker.py").write_text((PLUGINS / "mine_worker.py").read_text())
    monkeypatch.setenv("RM_BACKEND_PATH", str(tmp_path))
    with rm_abstract.init("odd:0"):
        found = run(calls=2)
    assert found.right and found.routed == 0
    assert any("to give text, got int" in line for line in found.warned), found.warned


@pytest.mark.sampled(2, of="interpreters of plugins")
def test_its_interpreter_is_chosen_by_the_environment(tmp_path: Path) -> None:
    venv.create(tmp_path / "sdk", with_pip=False)
    python = tmp_path / "sdk" / "bin" / "python"
    (site,) = (tmp_path / "sdk" / "lib").glob("python*/site-packages")
    seen = tmp_path / "seen"
    # Not sitecustomize.py: some systems' Python has one of its own, found first.
    note = f"import sys; open({str(seen)!r}, 'a').write(sys.executable + '\\n')"
    (site / "rm_abstract_here.pth").write_text("\n".join([PACKAGE, *sys.path[1:], note]))
    # What lies on the user's path is for the user's Python: a torch there may be another one.
    (tmp_path / "sitecustomize.py").write_text(
        "import os; 'RM_WORKER' in os.environ and os._exit(3)"
    )
    path = os.pathsep.join([PACKAGE, str(tmp_path)])
    found = serve("mine:0", settings=STRICT, RM_MINE_PYTHON=str(python), PYTHONPATH=path)
    assert found["right"] and found["routed"] == 2
    assert set(seen.read_text().split()) == {str(python)}


@pytest.mark.sampled(2, of="interpreters of plugins")
def test_an_interpreter_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    found = serve("mine:0", calls=1, RM_MINE_PYTHON=str(tmp_path / "python"))
    assert found["right"] and "RM401" in found["codes"]
    assert any("RM_MINE_PYTHON" in line for line in found["warned"]), found["warned"]


def initialised(device: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    source = f"import rm_abstract as rm; rm.init({device!r}); print(rm.current_device())"
    env = {**os.environ, "PYTHONPATH": PACKAGE, "RM_BACKEND_PATH": str(folder), **environment}
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=env, timeout=100
    )


def test_a_name_no_plugin_has_lists_what_there_is() -> None:
    done = initialised("nobody:0", PLUGINS)
    assert "ConfigError" in done.stderr and "from argument" in done.stderr
    assert "mine" in done.stderr and "cpu" in done.stderr and "ort" in done.stderr


def test_a_plugin_that_cannot_be_read_is_named_and_the_cpu_serves(tmp_path: Path) -> None:
    (tmp_path / "rm_backend_torn.py").write_text("raise OSError('no such driver')\n")
    done = initialised("torn:0", tmp_path)
    assert done.stdout == "cpu\n"
    assert "RM401" in done.stderr and "no such driver" in done.stderr
    done = initialised("torn:0", tmp_path, RM_FALLBACK="error")
    assert "DeviceUnavailableError" in done.stderr and "no such driver" in done.stderr


def test_an_index_it_has_no_device_for_is_an_error() -> None:
    done = initialised("mine:1", PLUGINS)
    assert "DeviceUnavailableError" in done.stderr and "below 1" in done.stderr


@pytest.mark.sampled(2, of="interpreters of plugins")
def test_an_entry_point_may_give_the_plugin(tmp_path: Path) -> None:
    package = tmp_path / "vendor"
    package.mkdir()
    (package / "__init__.py").write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.append({str(PLUGINS)!r})
            def plugins():
                from rm_backend_mine import plugin
                return plugin
            """
        )
    )
    info = tmp_path / "vendor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rm_abstract.backends]\nmine = vendor:plugins\n")
    paths = os.pathsep.join([PACKAGE, str(tmp_path)])
    found = serve("mine:0", settings=STRICT, RM_BACKEND_PATH="", PYTHONPATH=paths)
    assert found["right"] and found["routed"] == 2 and found["imported"] == []


# ---- ONNX ---------------------------------------------------------------------------------------


@pytest.mark.sampled(2, of="interpreters of plugins")
def test_a_backend_that_takes_onnx_gives_equal_results() -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    first = serve("ort:0", settings=STRICT)
    assert first["right"] and first["routed"] == 2 and first["compiled"] == 1
    assert first["imported"] == []
    second = serve("ort:0", settings=STRICT)
    assert second["right"] and second["compiled"] == 0


@pytest.mark.sampled(2, of="interpreters of plugins")
def test_without_the_exporter_a_backend_that_takes_onnx_says_what_to_install(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import importlib.util
            find = importlib.util.find_spec
            importlib.util.find_spec = lambda name, *a: (
                None if name == "onnxscript" else find(name, *a)
            )
            """
        )
    )
    paths = os.pathsep.join([PACKAGE, str(tmp_path)])
    found = serve("ort:0", calls=1, PYTHONPATH=paths)
    assert found["right"] and "RM401" in found["codes"]
    assert any("pip install 'rm_abstract[onnx]'" in line for line in found["warned"])


@pytest.mark.sampled(2, of="interpreters of plugins")
def test_a_worker_whose_interpreter_lacks_the_sdk_says_so_and_is_no_crash(tmp_path: Path) -> None:
    source = (PLUGINS / "rm_backend_mine.py").read_text()
    (tmp_path / "rm_backend_mine.py").write_text(source)
    worker = (PLUGINS / "mine_worker.py").read_text()
    absent = worker.replace("\nimport ", "\nimport an_sdk_nobody_has\nimport ", 1)
    assert absent != worker
    (tmp_path / "mine_worker.py").write_text(absent)
    found = serve("mine:0", RM_BACKEND_PATH=str(tmp_path))
    assert found["right"] and "RM401" in found["codes"] and "RM303" not in found["codes"]
    assert any("an_sdk_nobody_has" in text for text in found["warned"])
