"""Kernel rows check themselves before a machine uses them; verdicts outlive the process."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rm_abstract as rm


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    rm.shutdown()
    gc.collect()


def served(model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    """The model's report after some calls that must be right."""
    # Packed at once: a program makes no kernels behind the calls.
    rm.init("cpu", compile_options={"pack_weights": "first"}, **options)
    model = rm.accelerate(model.eval())
    with torch.no_grad():
        for _ in range(3):
            with rm.disabled():
                expected = model(x)
            torch.testing.assert_close(model(x), expected)
    report = rm.explain()
    rm.shutdown()
    return report


def verdict_files(cache: Path) -> list[Path]:
    return list((cache / "v1" / "kernels").iterdir())


def test_rows_are_checked_once_a_machine_and_the_cost_is_told(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    x = torch.randn(5, 96)
    cold = served(nn.Sequential(nn.Linear(96, 300), nn.GELU()), x)
    assert cold.kernel_checks["checked"] > 0
    assert cold.kernel_checks["milliseconds"] > 0
    assert cold.kernel_checks["refused"] == []
    assert f"kernels: {cold.kernel_checks['checked']} checked in" in str(cold)
    warm = served(nn.Sequential(nn.Linear(96, 300), nn.GELU()), x)
    assert warm.kernel_checks["checked"] == 0
    assert warm.kernel_checks["milliseconds"] == 0
    assert warm.kernel_checks["remembered"] == cold.kernel_checks["checked"]
    monkeypatch.setenv("RM_SELF_CHECK", "always")
    always = served(nn.Sequential(nn.Linear(96, 300), nn.GELU()), x)
    assert always.kernel_checks["checked"] == cold.kernel_checks["checked"]
    assert len(verdict_files(own_cache)) == 1


def test_switched_off_nothing_is_checked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RM_SELF_CHECK", "off")
    report = served(nn.Linear(96, 30), torch.randn(5, 96))
    assert report.kernel_checks["checked"] == 0
    assert report.routed > 0


def condemn(cache: Path) -> None:
    """Every row that passed is wrong from now on."""
    for path in verdict_files(cache):
        path.write_text(path.read_text().replace(" ok\n", " bad planted fault\n"))


def test_a_refused_row_gives_way_to_the_next_one_loudly(own_cache: Path):
    x = torch.randn(5, 96)
    first = served(nn.Linear(96, 300), x)
    condemn(own_cache)
    second = served(nn.Linear(96, 300), x)
    assert second.routed > 0
    assert second.models[0]["entries"][0]["kernels"] != first.models[0]["entries"][0]["kernels"]
    assert second.kernel_checks["refused"] == ["planted fault"]
    assert "RM510 planted fault" in str(second)


def test_clearing_the_cache_forgets_verdicts(own_cache: Path):
    served(nn.Linear(96, 300), torch.randn(5, 96))
    rm.cache.clear()
    assert verdict_files(own_cache) == []


def test_without_a_right_row_pytorch_serves(own_cache: Path):
    ids = torch.tensor([[1, 5, 2]])
    assert served(nn.Embedding(50, 16), ids).routed > 0
    condemn(own_cache)
    report = served(nn.Embedding(50, 16), ids, fallback="allow")
    assert report.routed == 0
    assert "RM510" in report.why_not()


INT4 = """
    import torch, rm_abstract as rm
    from torch import nn
    torch.manual_seed(0)
    layer = nn.Linear(512, 300).eval()
    rm.init("cpu", compile_options={"precision": "int4"})
    model = rm.accelerate(layer)
    worst = 0.0
    with torch.no_grad():
        for rows in (64, 2, 3, 4, 5, 6, 7, 8, 64):
            x = torch.randn(rows, 512)
            for _ in range(2):
                got = model(x)
            with rm.disabled():
                expected = layer(x)
            worst = max(worst, float((got - expected).norm() / expected.norm()))
    import json
    report = rm.explain()
    print(json.dumps({"worst": worst, "routed": report.routed, **report.kernel_checks}))
"""


def instruction_sets() -> list[str]:
    """Those of this machine, the smallest first, as the option cpu_isa names them."""
    flags = set(Path("/proc/cpuinfo").read_text().split("\nflags", 1)[-1].split("\n", 1)[0].split())
    sets = ["baseline"]
    if {"avx2", "fma", "bmi2", "f16c"} <= flags:
        sets += ["avx2", *(["avx2+avxvnni"] if "avx_vnni" in flags else [])]
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
        sets += ["avx512", *(["avx512+vnni"] if "avx512_vnni" in flags else [])]
    sets.append("auto")
    if os.environ.get("RM_HEAVY") == "1":
        return sets
    # All of them take half a minute; the fault was in the rows of VNNI.
    return [name for name in sets if "vnni" in name or name == "auto"][-2:]


@pytest.mark.parametrize("isa", instruction_sets())
def test_a_quantised_layer_is_right_for_few_rows_after_many(isa: str, own_cache: Path):
    """8x300x96 in 4 bits was wrong behind the last whole tile on CPUs with VNNI: a factor of 4 for
    calls of 2 to 8 rows, which no gate had compared."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INT4)],
        env={**os.environ, "RM_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["worst"] < 0.15  # what 4 bits cost; the fault was above 2
    assert found["routed"] > 0 and found["checked"] > 0 and found["refused"] == []
