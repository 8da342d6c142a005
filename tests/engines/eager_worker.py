"""A worker program of the engines' frame that generates with transformers' model and PyTorch.

`python eager_worker.py FD SCRATCH FRAME`: FRAME is the path of rm_abstract's worker_side.py. It
speaks what the vLLM worker speaks, so tests of the frame need no vLLM; its tokens are computed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any


class Eager:
    """Greedy, one token after the other, without a cache."""

    def __init__(self) -> None:
        self._model: Any = None
        self._longest = 0

    async def start(self, model: str, arguments: dict[str, Any], device: str) -> dict[str, Any]:
        if "fail" in arguments:
            raise RuntimeError(arguments["fail"])
        self._longest = int(arguments.get("max_model_len", 256))
        self._load(model)
        if arguments.get("wrong"):
            for parameter in self._model.parameters():
                parameter.data.mul_(1.5)
        return {
            "version": "0",
            "platform": device,
            "dtype": "float32",
            "max_model_len": self._longest,
        }

    def _load(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model)

    async def generate(
        self, number: int, prompt: list[int], sampling: dict[str, Any]
    ) -> AsyncIterator[tuple[list[int], Any, bool]]:
        import torch

        ids = list(prompt)
        for count in range(1, sampling["max_tokens"] + 1):
            await asyncio.sleep(0.002)
            with torch.no_grad():
                logits = self._model(input_ids=torch.tensor([ids])).logits[0, -1].float()
            chances = torch.log_softmax(logits, dim=-1)
            banned = list(sampling.get("suppressed", ()))
            if count <= sampling.get("min_tokens", 0):
                banned += sampling["stop_token_ids"]
            logits[banned] = -float("inf")
            token = int(logits.argmax())
            ids.append(token)
            done = token in sampling.get("stop_token_ids", ()) or count == sampling["max_tokens"]
            top = chances.topk(sampling.get("logprobs", 0))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            yield [token], [[(token, float(chances[token])), *pairs]], done

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if name == "reload":
            self._load(arguments["model"])
        if name == "hang":
            time.sleep(1e9)
        return {"pid": os.getpid()}

    def is_dead(self) -> bool:
        return False


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("rm_worker_side", sys.argv[1])
    assert spec is not None and spec.loader is not None
    frame = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = frame
    spec.loader.exec_module(frame)
    frame.main(Eager(), sys.argv[2:])
