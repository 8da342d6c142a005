"""A second process never takes the first one's program for a module that is another one: the
verdict of another process is not believed for code of the user's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import contextvars, dataclasses, json, os, sys, types, warnings
import torch
from torch import nn
import rm_abstract as rm

warnings.simplefilter("ignore")
given = float(sys.argv[1])

package = types.ModuleType("package"); package.sub = types.ModuleType("package.sub")
package.sub.VALUE = given
os.environ["SCALE"] = sys.argv[1]
CONTEXT = contextvars.ContextVar("scale"); CONTEXT.set(given)

@dataclasses.dataclass(slots=True)
class Slots:
    scale: float
SLOTS = Slots(given)

class Options:
    def __init__(self): self.scale = given

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)

class Package(Base):
    def forward(self, x): return torch.relu(self.l(x)) * package.sub.VALUE
class Environment(Base):
    def forward(self, x): return torch.relu(self.l(x)) * float(os.environ["SCALE"])
class Context(Base):
    def forward(self, x): return torch.relu(self.l(x)) * CONTEXT.get()
class ClassObject(Base):
    options = Options()
    def forward(self, x): return torch.relu(self.l(x)) * self.options.scale
class ManyLists(Base):
    def __init__(self):
        super().__init__()
        self.rows = [[float(i)] for i in range(5000)]
        self.rows[-1][0] = given
    def forward(self, x): return torch.relu(self.l(x)) * self.rows[-1][0]
class SlotsGlobal(Base):
    def forward(self, x): return torch.relu(self.l(x)) * SLOTS.scale
class Plain(Base):
    def forward(self, x): return torch.relu(self.l(x))

rm.init("cpu")
x = torch.arange(32.0).reshape(4, 8) / 32
found = {}
for kind in (Package, Environment, Context, ClassObject, ManyLists, SlotsGlobal, Plain):
    torch.manual_seed(0)
    model = kind().eval()
    with torch.no_grad():
        outputs = [model(x) for _ in range(3)]
        with rm.disabled():
            right = model(x)
    ok = all(torch.allclose(o, right, rtol=1e-4, atol=1e-4) for o in outputs)
    entries = rm.explain(model).to_dict()["models"][0]["entries"]
    found[kind.__name__] = [ok, [[e["cache"], e["parity"]] for e in entries]]
print(json.dumps(found))
"""


def run(script: Path, scale: str) -> dict[str, list[object]]:
    done = subprocess.run(
        [sys.executable, str(script), scale],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    found: dict[str, list[object]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("folder", ["beside", "under the prefix"])
@pytest.mark.sampled(1)
def test_what_another_process_verified_is_compared_again(tmp_path: Path, folder: str) -> None:
    place = tmp_path / folder
    place.mkdir()
    script = place / "script.py"
    script.write_text(SCRIPT)
    if folder == "under the prefix":  # python -m venv . with the user's code beside it
        script.write_text(f"import sys; sys.prefix = {str(place)!r}\n" + SCRIPT)
    first, second = run(script, "1"), run(script, "5")
    assert [name for name, (ok, _) in {**first}.items() if not ok] == []
    assert [name for name, (ok, _) in {**second}.items() if not ok] == []
    said = [parity for _, entries in second.values() for _, parity in entries]
    assert "stored verdict" not in said
    assert second["Plain"][1] == [["hit", "passed"]], "the capture itself is used again"
