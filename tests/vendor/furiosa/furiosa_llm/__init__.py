"""A stand-in for FuriosaAI's `furiosa_llm` 2026.4.0: the two classes our generator calls, with
PyTorch behind them. Written from the package's documented signatures; FURIOSA_FAULT makes it
misbehave (short, crash, hang, no_device, wrong_numbers).

Sources: developer.furiosa.ai, "LLM" and "SamplingParams"; the signatures of the package on PyPI.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


class SamplingParams:
    """Defaults as documented: max_tokens is 16, temperature 1.0, and neither is a model's own."""

    def __init__(
        self,
        *,
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        stop_token_ids: list[int] | None = None,
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        logprobs: int | None = None,
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
        self.temperature, self.max_tokens = temperature, max_tokens
        self.stop_token_ids, self.ignore_eos = list(stop_token_ids or []), ignore_eos


@dataclass
class CompletionOutput:
    token_ids: list[int]
    finish_reason: str


@dataclass
class RequestOutput:
    outputs: list[CompletionOutput]


class LLM:
    def __init__(
        self,
        model_id_or_path: str,
        *,
        fxb: str | None = None,
        devices: str | None = None,
        max_model_len: int | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        AutoTokenizer.from_pretrained(model_id_or_path)  # before the device is looked at
        if fxb is None or not Path(fxb).read_bytes().startswith(b"FXB"):
            raise FileNotFoundError(
                f"No .fxb files found in '{model_id_or_path}'. Please specify an FXB path via "
                "--fxb or build the model first."
            )
        if fault("no_device"):
            raise RuntimeError(f"No such device: {devices}")
        self.max_model_len = max_model_len or 4096
        self._model = AutoModelForCausalLM.from_pretrained(model_id_or_path)

    def generate(
        self,
        prompts: list[str],
        sampling_params: SamplingParams | None = None,
        prompt_token_ids: Any = None,
    ) -> list[RequestOutput]:
        params = sampling_params or SamplingParams()
        rows = [list(row) for row in prompt_token_ids.input_ids]
        most = params.max_tokens or self.max_model_len
        if max(map(len, rows)) + most > self.max_model_len:
            raise ValueError("the prompt and max_tokens are more than max_model_len")
        if fault("crash"):
            os.abort()
        if fault("hang"):
            time.sleep(3600)
        assert params.temperature == 0.0 and len(prompts) == len(rows)
        return [RequestOutput([self._row(row, params, most)]) for row in rows]

    @torch.inference_mode()
    def _row(self, prompt: list[int], params: SamplingParams, most: int) -> CompletionOutput:
        tokens: list[int] = []
        while len(tokens) < (most - 1 if fault("short") else most):
            logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
            tokens.append(int(logits.argmin() if fault("wrong_numbers") else logits.argmax()))
            if tokens[-1] in params.stop_token_ids:
                return CompletionOutput(tokens, "stop")
        return CompletionOutput(tokens, "length")


def fault(name: str) -> bool:
    return os.environ.get("FURIOSA_FAULT") == name
