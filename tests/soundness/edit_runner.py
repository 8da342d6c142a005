"""Carries out cases in a process of its own: `edit_runner.py MODE CASES`, with the modes eager,
served, eager-edited-first and served-edited-first.

CASES is a JSON file of cases. Prints a JSON line for each with what every step gave: values or the
exception's type, what was printed, the state that the calls left. The eager modes do not import
rm_abstract; the others make every edit before the first call where they say so.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import random
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

served = sys.argv[1].startswith("served")
first = sys.argv[1].endswith("edited-first")


def in_thread(work: Callable[[], Any]) -> Any:
    """The result or the exception of work, done by another thread."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((work(), None))
        except Exception as error:
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = found[0]
    if error is not None:
        raise error
    return result


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": contextlib.nullcontext,
}


class Root(torch.nn.Module):
    """What nobody captures whole: it decides by a value. Its model is served as a part of it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        if float(x.sum()) < -1e30:
            return x
        return self.model(x)


def plan(case: dict[str, Any]) -> list[str]:
    """The steps: call, wide (another shape), there (a call in a thread), edit, edit_there."""
    if first:  # a part serves from the third call on
        return ["edit", *["call"] * (5 if case["warm"] else 2)]
    return ["call"] * case["warm"] + {
        "first": ["edit", "call", "call", "call"],
        "after_one": ["call", "edit", "call", "call"],
        "after_some": ["call"] * 4 + ["edit", "call", "call"],
        "in_thread": ["call", "call", "edit_there", "call", "call"],
        "call_in_thread": ["call", "call", "edit", "there", "there", "call"],
        "back_and_forth": ["call", "call", "edit", "call", "call", "edit", "call"],
        "both_shapes": ["call", "wide", "call", "edit", "wide", "call", "wide"],
    }[case["timing"]]


def numbers(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return value.detach().double().reshape(-1).tolist()


def carry_out(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    name = f"case_{case['number']}"
    (folder / f"{name}.py").write_text(case["source"])
    importlib.invalidate_caches()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    module = importlib.import_module(name)
    model = module.Model()
    root = (Root(model) if case["warm"] else model).eval()  # what is made ready is the root
    mode = MODES[case["mode"]]
    wide = torch.arange(56.0).reshape(7, 8) / 56
    edit = compile(case["edit_source"] or "pass", f"<edit of {name}>", "exec")

    def make_the_edit() -> None:
        module.m = model
        exec(edit, vars(module))

    def call(x: torch.Tensor) -> Any:
        with mode():
            return numbers(root(x))

    def there() -> Any:
        return in_thread(lambda: call(module.X))

    do = {
        "call": lambda: call(module.X),
        "wide": lambda: call(wide),
        "there": there,
        "edit": make_the_edit,
        "edit_there": lambda: in_thread(make_the_edit),
    }
    steps = []
    try:
        for step in plan(case):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                try:
                    outcome = ["gave", do[step]()]
                except Exception as error:
                    # Each process has a temporary file of its own.
                    message = str(error).replace(getattr(module, "PATH", "PATH"), "PATH")
                    outcome = ["raised", type(error).__name__, message[:200]]
            left = repr(eval(case["state"], vars(module) | {"m": model}))
            steps.append([step, outcome, printed.getvalue(), left])
    finally:
        for undo in module.AFTER:
            undo()
    found = {"number": case["number"], "steps": steps}
    if served:
        reports = rm.explain(root).to_dict()["models"]
        if case["warm"]:
            reports = [part for report in reports for part in report["parts"]]
            # Below a model that is refused its own parts are served: of a control the whole is.
            reports = [r for r in reports if r["part"] == "model" or not case["control"]]
        found["routed"] = sum(r["routed"] for r in reports)
        found["calls"] = found["routed"] + sum(r["eager"] for r in reports)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if served:
        import rm_abstract as rm
        from rm_abstract.hooks import parts

        # The models are small: every part is worth it.
        parts._WORTH_S = parts._WORTH_SHARE = 0.0
        rm.init("cpu")
    cases_file = Path(sys.argv[2])
    scripts = cases_file.parent / sys.argv[1]
    scripts.mkdir(exist_ok=True)
    sys.path.insert(0, str(scripts))
    for drawn in json.loads(cases_file.read_text()):
        print(json.dumps(carry_out(drawn, scripts)), flush=True)
