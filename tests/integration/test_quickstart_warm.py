"""The quickstart's scripts, unchanged, as they run there: the second process misses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rm_abstract import cache as library

pytestmark = pytest.mark.slow
SCRIPTS = ["embed_sentences.py"] + ["generate_text.py"] * (os.environ.get("RM_HEAVY") == "1")


def run(repository: Path, script: str, result: Path) -> tuple[dict, dict[str, int]]:
    """The script's result, and what this run added to the cache's counters."""
    before = library.stats()["counters"]
    command = [sys.executable, "-m", "rm_abstract", str(repository / "examples" / script)]
    command += ["--repeat", "1", "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = library.stats()["counters"]
    return json.loads(result.read_text()), {n: after[n] - before.get(n, 0) for n in after}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.sampled(4, of="second process")
def test_the_warm_run_of_the_quickstart_misses_nothing(
    repository: Path, tmp_path: Path, script: str
):
    cold, made = run(repository, script, tmp_path / "cold.json")
    assert made["compile"] > 0 and made["miss"] > 0 and made["store"] > 0
    warm, used = run(repository, script, tmp_path / "warm.json")
    for name in ("miss", "compile", "store", "corrupt", "incompatible", "lock_timeout"):
        assert used.get(name, 0) == 0, name
    assert used["hit_disk"] > 0
    assert not [name for name, count in used.items() if name.startswith("bypass") and count]
    content = "tokens" if "tokens" in cold else "embeddings"
    assert len(warm[content]) == len(cold[content])
