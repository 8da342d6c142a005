"""docs/reason_codes.md says what src/control/reasons.def says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "gen_reason_codes.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_every_row_of_the_table_is_on_the_page() -> None:
    codes = re.findall(
        r"^RM_REASON\((RM\d{3}),", (ROOT / "src/control/reasons.def").read_text(), re.M
    )
    page = (ROOT / "docs/reason_codes.md").read_text()
    assert len(codes) >= 27
    for code in codes:
        assert f'<a id="{code}"></a>' in page
