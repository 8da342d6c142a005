"""A backend that misbehaves on purpose, written from docs/plugin_guide.md: the user's side.

HOSTILE names one way, "place.kind": see `act` of hostile_acts.py for the kinds, and the places here
(import, devices, why_not, fingerprint) and in hostile_worker.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rm_abstract.plugin import Device, PythonPlugin

sys.path.insert(0, str(Path(__file__).parent))
import hostile_acts

hostile_acts.act("import")


def devices() -> list[Device]:
    found = hostile_acts.act("devices", [Device("Hostile One", arch="h1", memory_bytes=1 << 30)])
    return found  # type: ignore[no-any-return]


def why_not(operator: str, dtypes: Sequence[str]) -> str:
    has = operator in {"mul", "add", "relu", "sub"} and set(dtypes) == {"f32"}
    answer = hostile_acts.act("why_not", "" if has else "there is no such operator")
    return answer  # type: ignore[no-any-return]


def fingerprint() -> str:
    return hostile_acts.act("fingerprint", "driver=1")  # type: ignore[no-any-return]


plugin = PythonPlugin(
    name="hostile",
    version="1",
    worker="hostile_worker:Worker",
    devices=devices,
    why_not=why_not,
    fingerprint=fingerprint,
    generator="hostile_generator:Generator" if hostile_acts.generates() else "",
)
