"""A runtime that generates what the model does, and misbehaves (hostile_acts.py). Places: gen_init,
gen_first (while it is compared with PyTorch), gen_later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hostile_acts import act, wanted

# Instead of the tokens of a step.
STEPS: dict[str, Any] = {
    "beyond": [10**6],
    "negative": [-1],
    "huge": [2**70],
    "short": [],
    "long": [1, 2, 3],
    "nothing": None,
    "words": ["a"],
    "nan": [float("nan")],
    "chances": ([1], ["x"]),
    "infinite": ([1], [float("inf")]),
}


class Generator:
    def __init__(self, device: int, folder: str, options: Any) -> None:
        from transformers import AutoModelForCausalLM

        act("gen_init")
        self._model = AutoModelForCausalLM.from_pretrained(folder)
        self.max_tokens = {"zero": 0, "many": "many"}.get(wanted("gen_tokens"), 96)
        self._calls = 0

    def generate(self, request: Any) -> Iterator[Any]:
        self._calls += 1
        place = "gen_first" if self._calls == 1 else "gen_later"
        rows, steps = [list(prompt) for prompt in request.prompts], 0
        while True:
            steps += 1
            if steps == 3 and wanted(place) == "end":
                return
            if steps == 3 and wanted(place) in STEPS:
                yield STEPS[wanted(place)]
            elif steps == 3 and wanted(place):
                act(place)
            tokens = [self._next(row) for row in rows]
            for row, token in zip(rows, tokens, strict=True):
                row.append(token)
            yield tokens

    @torch.inference_mode()
    def _next(self, row: list[int]) -> int:
        return int(self._model(torch.tensor([row])).logits[0, -1].argmax())
