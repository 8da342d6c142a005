"""What training steps keep in the compile cache: captured forwards, optimised steps, verdicts on
kernels. Another process then neither captures nor compiles the same step again.

A capture that is found is trusted no more than a fresh one: every process compares its first step
with eager.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.config import Settings
from rm_abstract.capture.training import Forward
from rm_abstract.guards.identity import Unstable, describe

# Steps read weights where they lie: a packed copy would be old after the first of them.
_OPTIONS = {"precision": "auto"}


class Stored:
    """The compile cache as one training step sees it."""

    def __init__(self, settings: Settings) -> None:
        options = {name: text for name, (text, _) in settings.values.items()}
        self._cache = _core.cache.CompileCache(options)
        self.checks = _core.SelfCheck(settings.text("self_check"), self._cache)
        self.sources: dict[str, int] = {"captured": 0, "found": 0}

    def forward(
        self,
        module: torch.nn.Module,
        batch: Hashable,
        trained: Collection[str],
        capture: Callable[[], Forward],
    ) -> Forward:
        """The forward of this module for batches of this structure, from the cache or captured.

        Raises what ``capture`` raises; refusals are not kept.
        """
        builder = self._cache.new_key("front")
        try:
            builder.set("front", describe(module, _core.cache.digest))
        except Unstable as error:
            builder.bypass(str(error))
        builder.set("signature", json.dumps(["training step 3", str(batch), sorted(trained)]))
        key = builder.finish()
        entry = self._cache.lookup(key)
        found = None if entry is None else _read(entry)
        if found is not None:
            self.sources["found"] += 1
            return found
        made = capture()
        self.sources["captured"] += 1
        if not made.constants and not made.closed:  # tensors of this process are not stored
            data = json.dumps(vars(made)).encode()
            self._cache.publish(key, {"sections": {"record": data}, "producer": "training"})
        return made

    def optimised(self, step: str) -> str:
        """The step's text after the passes."""
        builder = self._cache.new_key("program")
        builder.set("program", step)
        builder.set("options", _OPTIONS)
        builder.set("backend", "training step")
        entry, _ = self._cache.get_or_compile(
            builder.finish(), lambda: {"rmir": _core.ir.run_passes(step, _OPTIONS).encode()}
        )
        return bytes(entry.section("rmir")).decode()


def _read(entry: Any) -> Forward | None:
    try:
        row = json.loads(bytes(entry.section("record")))
        weights, written = ([str(name) for name in row[key]] for key in ("weights", "written"))
        return Forward(str(row["ir"]), weights, {}, written, int(row["draws"]))
    except (KeyError, ValueError, TypeError):
        return None
