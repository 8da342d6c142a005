"""docs/options.md is what the options table says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_page_of_options_is_current(repository: Path):
    generator = repository / "docs" / "gen_options.py"
    done = subprocess.run(
        [sys.executable, str(generator), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
