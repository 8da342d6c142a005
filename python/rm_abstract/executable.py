"""``rm.compile``'s result: a module's compiled calls, strict: it raises instead of falling back."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from rm_abstract.base.errors import CompileError, Error
from rm_abstract.base.reasons import remedy_of

if TYPE_CHECKING:
    from rm_abstract.report import Report
    from rm_abstract.session import Session


class Executable:
    """Calls like the module. Holds it strongly; the module itself is not changed.

    Outputs carry no gradients, so inputs that ask for some are an error. As a context manager it is
    closed at the end of the block.
    """

    def __init__(self, module: Any, session: Session) -> None:
        from torch import nn

        from rm_abstract.hooks.router import Router
        from rm_abstract.hooks.weight_writes import weight_writes

        if not isinstance(module, nn.Module):
            raise CompileError(
                f"[compile] expected an nn.Module, got {type(module).__name__}; "
                "try rm_abstract.compile(model)",
                code="RM201",
            )
        self.module = module
        self._session = session
        self._router = Router(module, session, "compile")
        session.adopt(self._router)
        weight_writes.start(session, session.cannot_watch)
        self._stop_watching = weakref.finalize(self, weight_writes.stop, session)

    @property
    def device(self) -> str:
        return self._session.device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        if self._session.closed:
            raise Error(
                "[compile] expected an Executable that is open, got a closed one; "
                "try rm_abstract.compile(module) again"
            )
        if torch.is_grad_enabled() and _want_gradients((*args, *kwargs.values())):
            raise CompileError(
                "[compile] expected inputs that require no gradients, got one that does, and what "
                "a program gives has none; try torch.no_grad(), or rm_abstract.compile_loss",
                code="RM117",
            )
        if torch.autograd.forward_ad._current_level >= 0:
            raise CompileError(
                "[compile] expected a call outside of forward-mode gradients, got one inside of "
                "forward_ad.dual_level(), and what a program gives has none; call it before",
                code="RM103",
            )
        try:
            with torch.no_grad():
                return self._router(*args, **kwargs)
        except Error as error:
            if type(error) is not Error or not error.code:
                raise
            # What a session would leave to PyTorch; there is no fallback to choose here.
            text = str(error).removesuffix("; try fallback='warn'")
            remedy = error.remedy if text == str(error) else remedy_of(error.code)
            text = text if text == str(error) or not remedy else f"{text}; try {remedy}"
            raise CompileError(text, code=error.code, remedy=remedy) from None

    def __enter__(self) -> Executable:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees programs and weights, and ends the processes that served this module.

        A later call raises Error; `explain()` still says what happened.
        """
        if not self._session.closed:
            self._session.close()
            self._stop_watching()

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compiles for calls like this one. Raises CompileError when they cannot be compiled."""
        self(*args, **kwargs)
        refusals = self._router.refusals()
        declined = {code: why for code, (_, why) in self._router.route.stats()["declined"].items()}
        for code, detail in {**declined, **refusals}.items():
            raise CompileError(
                f"[compile] expected {self._router.label} to compile, got {code}: {detail}; "
                f"try {remedy_of(code)}",
                code=code,
            )

    def explain(self) -> Report:
        from rm_abstract import report

        return report.build(self._session, None)


def _want_gradients(values: Any) -> bool:
    """Whether a tensor among them, or in a container, requires gradients."""
    from torch import Tensor
    from torch.utils import _pytree

    for value in values:
        if isinstance(value, Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, (list, tuple, dict)) and any(
            isinstance(leaf, Tensor) and leaf.requires_grad for leaf in _pytree.tree_leaves(value)
        ):
            return True
    return False
