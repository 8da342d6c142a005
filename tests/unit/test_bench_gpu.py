"""`bench --device gpu`: what it prints and draws of measured results, and what it says without one.

The measurements themselves run in tests/cuda.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
click_testing = pytest.importorskip("click.testing")

from rm_abstract.bench import cli, gpu  # noqa: E402


def value(median: float) -> dict[str, float]:
    return {"median": median, "low": 0.9 * median, "high": 1.1 * median}


def result(unit: str, bound: float) -> dict[str, Any]:
    return {
        "case": "resnet-50 bf16 1",
        "unit": unit,
        "candidates": {"rm_abstract": value(2.0), "eager": value(8.0)},
        "over": {"eager": value(4.0)},
        "bound": ("weights at the copy probe's bandwidth", bound),
        "probes": {"copy tb/s": 4.25},
    }


def test_shares_are_of_the_bound_whichever_way_is_better() -> None:
    ours, eager, probe = gpu.markdown(result("ms", 1.0)).splitlines()
    assert "2.000 (1.800-2.200) ms" in ours and ours.endswith("|  | 0.50 |")
    assert "4.00 (3.60-4.40)" in eager and eager.endswith("| 0.12 |")
    assert "weights at the copy probe's bandwidth (copy tb/s 4.25)" in probe
    assert gpu.markdown(result("tokens/s", 10.0)).splitlines()[0].endswith("| 0.20 |")


def test_results_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gpu.draw([result("ms", 1.0), result("tokens/s", 10.0)], "a device", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["encoder", "decode", "vision", "dispatch"])
def test_without_a_gpu_the_command_says_so(command: str) -> None:
    runner = click_testing.CliRunner()
    done = runner.invoke(cli.bench, [command, "--device", "gpu"])
    assert done.exit_code == 1
    assert "expected an NVIDIA GPU that torch can use, got none" in done.output


def test_an_unknown_case_is_named() -> None:
    done = click_testing.CliRunner().invoke(cli.bench, ["decode", "--device", "gpu", "--only", "x"])
    assert done.exit_code == 2 and "llama 1b" in done.output


def test_the_whole_name_of_a_case_is_that_case_alone() -> None:
    assert cli._chosen(list(gpu.DECODERS), "llama 1b") == ["llama 1b"]
    assert cli._chosen(list(gpu.DECODERS), "llama 1b ") == [
        "llama 1b 4096 keys",
        "llama 1b 8 rows",
        "llama 1b int8",
        "llama 1b int4",
    ]
