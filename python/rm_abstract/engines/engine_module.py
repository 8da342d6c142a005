"""The module that one engine compiles, and what the engine, its compiler and its gate share of it.

The module is held weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import ParityError
from rm_abstract.base.scope import disabled_var
from rm_abstract.calls.call import ForwardParameters
from rm_abstract.engines.artefacts import Artefacts
from rm_abstract.engines.context import EngineContext
from rm_abstract.engines.derived import SharedWeights
from rm_abstract.engines.module_weights import ModuleWeights, WeightVersions, ties_of
from rm_abstract.engines.placement import placement_of
from rm_abstract.engines.weight_blocks import WeightBlocks
from rm_abstract.guards import sources


class EngineModule:
    """See the file's head. Thread safe but for `identify` and `changed`, which need a lock."""

    def __init__(self, module: torch.nn.Module, context: EngineContext) -> None:
        self._module = weakref.ref(module)
        self.context = context
        self.parameters = ForwardParameters.of(module)
        self.artefacts = Artefacts(context)
        self.weights = ModuleWeights(self.get)
        self.shared = SharedWeights()
        self.blocks = WeightBlocks()
        self.placement = placement_of(context.device)
        self._ties: frozenset[tuple[str, ...]] | None = None  # when the first program was made
        self._user_code: bool | None = None  # runs_user_code(), once it was found out

    def get(self) -> torch.nn.Module:
        """Raises Decline when it no longer exists."""
        module = self._module()
        if module is None:
            raise Decline("RM108", "the module no longer exists")
        return module

    @contextmanager
    def on_original(self) -> Iterator[None]:
        """Nothing inside is routed: captures and gates see the user's own modules."""
        token = disabled_var.set("compiling")
        try:
            yield
        finally:
            disabled_var.reset(token)

    def identify(self) -> None:
        """Fixes what programs are found by in the cache, before the first of them is looked for."""
        if self._ties is None:
            self._ties = ties_of(self.get())
            # Takes milliseconds: once for the router's snapshot, this and the identity.
            found = self.context.events.sources() or sources.of_module(self.get())
            self._user_code = found.user_code
            if not found.user_code:  # else no verdict is asked for
                self.artefacts.digests.begin(self.get().parameters())
            self.artefacts.identify(self.get(), found)

    def changed(self, what: str) -> bool:
        """Forgets what was derived from the module; ``what`` is as in `Engine.invalidate`. True
        when programs made so far are right for it once they have its weights."""
        self.artefacts.forget_module()
        self.forget_weights()
        self._user_code = None
        ties, self._ties = self._ties, None
        if what != "weights" or ties not in (None, ties_of(self.get())):
            return False
        self._ties = ties
        return True

    @property
    def known(self) -> tuple[Any, ...]:
        """What was found out about the module as it is: for `known` when it is that again."""
        return self.artefacts.of_module, self._ties, self._user_code

    @known.setter
    def known(self, facts: tuple[Any, ...]) -> None:
        self.artefacts.of_module, self._ties, self._user_code = facts

    def forget_weights(self) -> None:
        """The next program to ask for what is made of weights gets it made of those of now."""
        self.placement.forget()
        self.shared.forget()
        self.blocks.forget()

    def runs_user_code(self) -> bool:
        """Whether forward reaches a class or function that no installed package's version names."""
        if self._user_code is None:
            self._user_code = sources.of_module(self.get()).user_code
        return self._user_code

    def versions(self) -> WeightVersions:
        """Differs from an earlier one when a weight of the module was replaced or written."""
        module = self.get()
        return WeightVersions([*module.parameters(), *module.buffers()])

    def parity_error(self, detail: str, code: str = "RM501") -> ParityError:
        return ParityError(
            f"[parity] expected {type(self.get()).__name__} compiled to match eager, got "
            f"{detail}; try RM_DUMP_IR to inspect the program, or report it",
            code=code,
        )
