"""transformers' Trainer on compiled losses: `rm_abstract.compile_trainer`.

Only `compute_loss` of this one object is replaced, and only for losses that are trained on. All
else is the Trainer's: accumulation, clipping, schedules, checkpoints, callbacks, evaluation.
"""

from __future__ import annotations

from typing import Any

import torch

from rm_abstract.base.config import Settings
from rm_abstract.base.decline import Decline
from rm_abstract.training.loss import CompiledLoss


class TrainerLoss:
    """What stands in the place of a Trainer's ``compute_loss``.

    The Trainer's own method is called with a function in the place of the model, which gives the
    compiled loss: what it does to the loss of a model (items in the batch, processes) is done.
    """

    def __init__(self, trainer: Any, settings: Settings) -> None:
        self._trainer = trainer
        self._original = trainer.compute_loss
        self._loss = CompiledLoss(trainer.model, None, settings)
        trainer.compute_loss = self

    def __call__(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if return_outputs or not model.training or not torch.is_grad_enabled():
            return self._original(model, inputs, return_outputs, num_items_in_batch)
        try:
            self._check(model)
        except Decline as decline:
            self._loss._note(decline)
            return self._original(model, inputs, return_outputs, num_items_in_batch)
        if isinstance(num_items_in_batch, int):  # a number would be a part of the program
            num_items_in_batch = torch.tensor(num_items_in_batch)
        return self._original(self._compiled, inputs, return_outputs, num_items_in_batch)

    def _compiled(self, **inputs: Any) -> dict[str, torch.Tensor]:
        return {"loss": self._loss(inputs)}

    def _check(self, model: Any) -> None:
        """Raises Decline where the loss is made of more than the model."""
        trainer = self._trainer
        if trainer.model is not self._loss.model:  # model_init makes one for each run
            self._loss = CompiledLoss(trainer.model, None, self._loss._settings)
        if model is not trainer.model:
            raise Decline("RM710", f"the model is wrapped in a {type(model).__name__}")
        made_by = type(trainer).compute_loss
        if made_by.__module__ != "transformers.trainer":
            raise Decline("RM710", f"compute_loss of {made_by.__qualname__}")
        if trainer.compute_loss_func is not None or trainer.label_smoother is not None:
            raise Decline("RM710", "compute_loss_func or label smoothing")

    def report(self) -> dict[str, Any]:
        """As ``report`` of a compiled loss: how many losses were compiled and eager, and why."""
        return self._loss.report()

    def remove(self) -> None:
        """Gives the Trainer its own ``compute_loss`` back."""
        if vars(self._trainer).get("compute_loss") is self:
            del self._trainer.compute_loss
