"""Write docs/reason_codes.md from src/control/reasons.def; --check says whether it is current."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "src" / "control" / "reasons.def"
PAGE = ROOT / "docs" / "reason_codes.md"
GROUPS = {
    "1": "Routing",
    "2": "Capture",
    "3": "Compile",
    "4": "Device",
    "5": "Correctness",
    "6": "Cache",
    "7": "Training",
}
ROW = re.compile(r'RM_REASON\((RM\d{3}), "((?:[^"\\]|\\.)*)",\s*"((?:[^"\\]|\\.)*)"\)')
CODE = re.compile(
    r"\w+=\{[^}]*\}|[\w.]+\([^()]*\)|\w+='\w+'|RM_\w+(?:=\w+)?"
    r"|\b(?!rm_abstract\b(?!\.))\w+(?:[._]\w+)+"
    r"|rm-abstract (?:cache )?\w+"
)  # what a reader types


def marked(text: str) -> str:
    """The text with code in backticks, as a sentence."""
    found = CODE.sub(lambda match: f"`{match[0]}`", text)
    if not found.startswith("rm_abstract"):
        found = found[0].upper() + found[1:]
    return f"{found}."


def advice(remedy: str) -> str:
    text = marked(remedy)
    return text if text.startswith("Nothing to do") else f"What to do: {text[0].lower()}{text[1:]}"


def page() -> str:
    """The Markdown of the table."""
    rows = ROW.findall(TABLE.read_text())
    out = [
        "# Reason codes",
        "",
        "Why something was not accelerated, and what to do about it. *The report* is what",
        "`print(rm_abstract.explain())` shows; PyTorch runs whatever is not accelerated. Generated",
        "from `src/control/reasons.def` by `docs/gen_reason_codes.py`; do not edit.",
    ]
    for digit, group in GROUPS.items():
        out += ["", f"## {group} (RM{digit}xx)"]
        for code, text, remedy in rows:
            if code[2] == digit:
                text, remedy = (s.replace('\\"', '"') for s in (text, remedy))
                out += [
                    "",
                    f'<a id="{code}"></a>',
                    f"### {code}",
                    "",
                    f"**{marked(text)}**",
                    "",
                    advice(remedy),
                ]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE} is not current: run {__file__}")
    PAGE.write_text(page())
