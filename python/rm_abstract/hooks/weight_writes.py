"""What hears of writes to weights that leave no trace in the tensor; installed once a process.

Sessions and results of ``rm.compile`` share it: the first user installs it, the last one's end
removes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rm_abstract.base.stay_out import staying_out
from rm_abstract.guards import writes
from rm_abstract.hooks.imports import ImportWatch
from rm_abstract.hooks.patches import PatchSet


class WeightWrites:
    """`data` of nn.Parameter, and torch's own hook behind the steps of all optimisers."""

    def __init__(self) -> None:
        self.patches = PatchSet()
        self._lock = threading.RLock()
        self._users: dict[object, Callable[[], None]] = {}
        self._blind = False
        self.optimizer_hook: Any = None  # a handle
        self._watch = ImportWatch(
            {
                "torch.nn.parameter": self._needed("_patch_parameter"),
                "torch.optim.optimizer": self._needed("_watch_optimizers"),
            }
        )

    def start(self, user: object, cannot_watch: Callable[[], None]) -> None:
        """`cannot_watch` is called, also later, when this torch does not let writes be heard of."""
        with self._lock:
            self._users[user] = cannot_watch
            if len(self._users) == 1:
                self._watch.install()
            elif self._blind:
                cannot_watch()

    def stop(self, user: object) -> list[str]:
        """Returns a line for each attribute that somebody patched over and that stays."""
        with self._lock:
            if self._users.pop(user, None) is None or self._users:
                return []
            self._watch.remove()
            if self.optimizer_hook is not None:
                self.optimizer_hook.remove()
                self.optimizer_hook = None
            self._blind = False
            return self.patches.restore()

    def _needed(self, patch: str) -> Callable[[ModuleType], None]:
        """A patch without which writes to weights would be missed. Never raises."""

        def call(module: ModuleType) -> None:
            done = False
            with staying_out(patch):
                getattr(self, patch)(module)
                done = True
            if not done:
                self._miss()

        return call

    def _miss(self) -> None:
        with self._lock:
            self._blind = True
            for cannot_watch in list(self._users.values()):
                cannot_watch()

    def _patch_parameter(self, parameter_module: ModuleType) -> None:
        self.patches.replace(
            parameter_module.Parameter,
            "data",
            writes.registry().data_attribute,
            "what is written through it is seen nowhere: reading it of a weight that a program has "
            "counts as a change",
        )

    def _watch_optimizers(self, module: ModuleType) -> None:
        """torch's own registration for all optimisers: fused steps change weights, unseen."""
        note = writes.registry().note

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            from torch.compiler import is_dynamo_compiling  # torch is still being imported above

            if is_dynamo_compiling():  # a compiled step counts versions
                return
            done = False
            with staying_out("an optimiser's step"):
                note(optimizer.param_groups)
                done = True
            if not done:
                self._miss()

        self.optimizer_hook = module.register_optimizer_step_post_hook(stepped)


weight_writes = WeightWrites()
