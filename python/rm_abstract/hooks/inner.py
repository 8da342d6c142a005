"""The models inside a transformers model that its methods call on their own: the encoder before
tokens are generated, the towers behind get_image_features().

Each has a router, which serves such calls only. What a call of the whole model runs of them is the
business of that model's program, or of PyTorch where there is none.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from rm_abstract.base import reasons
from rm_abstract.hooks.fitness import why_unfit
from rm_abstract.hooks.host import SLOT, RouterHost
from rm_abstract.hooks.parts import Owned

# The class of routers: (module, session, who caught it, no parts, the module's name in the root)
MakeInner = Callable[[Any, RouterHost, str, None, str], Owned]


def is_transformers_model(module: Any) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


class InnerModels:
    """Of one root, whose router owns this object; their routers belong to their modules' slots."""

    def __init__(self, root: Owned, make: MakeInner) -> None:
        self._root = weakref.ref(root)
        self._make = make
        self._routers: dict[str, weakref.ref[Owned]] = {}

    def place(self, module: Any) -> None:
        """Gives a router to each model inside ``module`` that has none, where the device is one for
        it; else takes those away that there are."""
        root = self._root()
        if root is None or not is_transformers_model(module):
            return
        if not _served_on(root.session):
            self.remove()
            return
        # The same weights again, for a call that a program of the root mostly serves.
        skipped = (module, getattr(module, "base_model", None))
        for name, part in module.named_modules():
            if any(part is other for other in skipped) or not is_transformers_model(part):
                continue
            if vars(part).get(SLOT) is None and why_unfit(part) is None:
                router = self._make(part, root.session, "inner", None, name)
                vars(part)[SLOT] = router
                root.session.adopt(router)
                self._routers[name] = weakref.ref(router)

    def remove(self) -> None:
        living = [router for ref in self._routers.values() if (router := ref()) is not None]
        self._routers.clear()
        for router in living:
            router.remove()

    def records(self) -> list[dict[str, Any]]:
        """Of those that were called on their own."""
        rows = []
        for name, ref in list(self._routers.items()):
            router = ref()
            record = {} if router is None else router.record()
            if record and (record["entries"] or _declined(record)):
                rows.append({**record, "part": name})
        return rows


def _declined(record: dict[str, Any]) -> bool:
    """Whether calls stayed in PyTorch that nobody asked it for."""
    return any(reason["code"] not in reasons.ASKED_FOR for reason in record["reasons"])


def _served_on(session: RouterHost) -> bool:
    """Where weights are used as they lie: elsewhere a second program would copy them again. On a
    GPU that is so for models that lie on it (`Placement.check_inner`)."""
    return session.resolved.backend in ("cpu", "cuda")
