"""A plugin that does whatever it likes (hostile/, written from docs/plugin_guide.md): the user's
process gets a typed error or PyTorch's results, in bounded time. RM_HEAVY=1 runs all it can do."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from npu_support import run, worker_pids
from torch import nn

import rm_abstract as rm

HOSTILE = Path(__file__).parent / "hostile"
HEAVY = os.environ.get("RM_HEAVY") == "1"
LIMITS = {"timeout_s": 8, "load_timeout_s": 8, "execute_timeout_s": 3, "stall_timeout_s": 3}
CALLS = 8

# What happens: the reason it is given; "" where the call is served all the same.
RAISED = {
    "error": "E77",
    "bytes_error": "E77 ?? in a file",
    "long_error": "more characters",
    "unprintable": "cannot be told",
    "system_exit": "SystemExit",
    "interrupt": "KeyboardInterrupt",
    "base": "E78",
    "generator_exit": "GeneratorExit",
    "stop_iteration": "StopIteration",
    "recursion": "RecursionError",
}
ENDED = ("exit", "kill", "abort", "child", "flood")
HANGS = ("stop", "hang", "locked")
ON_THE_SOCKET = ("garbage", "failed", "half", "closed", "all_closed")
RETURNED = ("none", "number", "text", "list", "no_path", "root", "fifo", "loop")
HARMLESS = ("truncate", "seal", "descriptors")

CASES: dict[str, str] = {
    **{f"compile.{kind}": "RM301" for kind in (*RAISED, *RETURNED)},
    **{f"load.{kind}": "RM307" for kind in (*RAISED, "none", "number")},
    **{f"{at}.{kind}": "RM307" for at in ("execute", "later") for kind in RAISED},
    **{f"{at}.{kind}": "RM303" for at in ("compile", "load", "execute") for kind in ENDED},
    **{f"{at}.{kind}": "RM303" for at in ("compile", "load") for kind in ON_THE_SOCKET},
    **{f"{at}.hang": "RM309" for at in ("compile", "load", "init")},
    **{f"{at}.stop": "RM309" for at in ("compile", "load")},
    "compile.locked": "RM302",
    "load.locked": "RM308",
    **{f"{at}.{kind}": "RM308" for at in ("execute", "later") for kind in (*HANGS, "garbage")},
    **{f"{at}.{kind}": "RM308" for at in ("execute", "later") for kind in ("closed", "all_closed")},
    **{f"later.{kind}": "" for kind in (*ENDED, "twice", "half")},
    **{f"{at}.{kind}": "" for at in ("compile", "load", "later") for kind in HARMLESS},
    **{f"{at}.{kind}": "RM307" for at in ("execute", "later") for kind in ("shape", "dtype")},
    "compile.twice": "RM602",  # its own bytes were taken for an artefact
    "load.twice": "RM303",
    "compile.empty": "RM307",
    "compile.progress": "RM302",
    "load.progress": "RM308",
    "execute.nan": "RM501",
    "execute.nothing": "RM501",
    "execute.inputs": "RM307",
    "worker_import.error": "RM301",
    "worker_import.system_exit": "RM303",
    "worker_import.hang": "RM309",
    "worker_import.garbage": "RM303",
    "init.error": "RM301",
    "init.kill": "RM303",
    "progress.nan": "RM301",
    "progress.wrong": "RM301",
    "progress.many": "",
}
SHORT = (
    "worker_import.hang",
    "compile.bytes_error",
    "load.half",
    "execute.nan",
    "later.exit",
    "later.flood",
)


class Scale(nn.Module):
    """What the device can do, in one part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x * self.a + self.b)
        return torch.relu(x * self.c - self.a) + x


@pytest.mark.parametrize("case", sorted(CASES) if HEAVY else SHORT)
def test_whatever_it_does_the_model_answers(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_BACKEND_PATH", str(HOSTILE))
    monkeypatch.setenv("HOSTILE", case)
    monkeypatch.setenv("HOSTILE_FOLDER", str(tmp_path))
    begun = time.monotonic()
    with rm.init("hostile:0", compile_options=LIMITS):
        result = run(calls=CALLS, model=Scale(), inputs={"x": torch.randn(2, 8)})
    assert time.monotonic() - begun < 120
    assert result.right and len(result.outputs) == CALLS and not result.errors
    code, kind = CASES[case], case.partition(".")[2]
    if not code:
        assert result.routed == CALLS - 1 and not result.warned, result.warned
        return
    told = [line for line in result.warned if code in line]
    assert len(told) == 1 and RAISED.get(kind, "") in told[0], result.warned
    assert len(told[0]) < 20_000


def test_loading_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_BACKEND_PATH", str(HOSTILE))
    monkeypatch.setenv("HOSTILE", "load.progress")
    limits = {**LIMITS, "timeout_s": 600, "load_timeout_s": 1}
    with rm.init("hostile:0", compile_options=limits):
        result = run(calls=2, model=Scale(), inputs={"x": torch.randn(2, 8)})
    (told,) = [line for line in result.warned if "RM308" in line]
    assert "within 1 s" in told and "raise load_timeout_s" in told and result.right


UNIMPORTABLE = {
    "error": ("raise RuntimeError('E77')", "E77"),
    "leaves": ("import sys\nsys.exit('E77: no licence')", "E77: no licence"),
    "base": ("raise BaseException('E77')", "E77"),
    "unprintable": (
        "class E(Exception):\n    def __repr__(self): raise ValueError\nraise E",
        "cannot be told",
    ),
    "long": ("raise RuntimeError('E77' * 10**6)", "more characters"),
}


@pytest.mark.parametrize("kind", UNIMPORTABLE)
def test_one_that_cannot_be_imported_is_told_and_the_cpu_serves(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, text = UNIMPORTABLE[kind]
    (tmp_path / f"rm_backend_bad{kind}.py").write_text(source)
    monkeypatch.setenv("RM_BACKEND_PATH", str(tmp_path))
    with pytest.warns(rm.RoutingWarning, match="RM401") as told, rm.init(f"bad{kind}:0"):
        assert rm.current_device() == "cpu"
    (said,) = (str(one.message) for one in told)
    assert text in said and "cpu is used instead" in said and len(said) < 5000
    with pytest.raises(rm.DeviceUnavailableError, match="bad") as caught:
        rm.init(f"bad{kind}:0", fallback="error")
    assert caught.value.code == "RM401"


def test_another_interpreter_that_does_not_answer_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rm_abstract.worker import python_plugins

    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho importing >&2\nexec sleep 60\n")
    python.chmod(0o700)
    monkeypatch.setattr(python_plugins, "_ASKED_S", 1.0)
    with pytest.raises(rm.DeviceUnavailableError, match="within 1 s") as caught:
        python_plugins._ask("mine", str(python))
    assert caught.value.code == "RM401" and "importing" in str(caught.value)


def test_what_it_logs_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_BACKEND_PATH", str(HOSTILE))
    monkeypatch.setenv("HOSTILE", "later.chatty")  # 16 MiB at every call
    with rm.init("hostile:0", fallback="error:compile,device"), torch.no_grad():
        model, x = rm.accelerate(Scale().eval()), torch.randn(2, 8)
        for _ in range(12):
            model(x)
            time.sleep(0.3)  # its log is looked at four times a second
        kept = max(os.stat(f"/proc/{pid}/fd/2").st_size for pid in worker_pids())
    assert 0 < kept < 32 << 20, kept


@pytest.mark.parametrize("place", ["compile", "load", "execute"] if HEAVY else ["execute"])
def test_where_errors_are_asked_for_it_is_a_typed_one(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_BACKEND_PATH", str(HOSTILE))
    monkeypatch.setenv("HOSTILE", f"{place}.bytes_error")
    monkeypatch.setenv("HOSTILE_FOLDER", str(tmp_path))
    with rm.init("hostile:0", fallback="error:compile,device", compile_options=LIMITS):
        result = run(calls=1, model=Scale(), inputs={"x": torch.randn(2, 8)})
    (error,) = result.errors
    assert isinstance(error, rm.Error) and "E77 ??" in str(error)
