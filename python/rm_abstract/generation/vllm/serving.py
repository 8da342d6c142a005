"""The program of a vLLM worker: `python serving.py FD SCRATCH`, run by the Python that has vLLM.

Imports the standard library and, inside functions, vLLM: processes that vLLM spawns import this
file again, and rm_abstract need not be installed beside vLLM.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any


def _frame() -> Any:
    """The module generation/remote/worker_side.py, by its path."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.path.join(os.path.dirname(here), "remote", "worker_side.py")
    spec = importlib.util.spec_from_file_location("rm_worker_side", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Vllm:
    """Implements worker_side.Engine with one AsyncLLM."""

    def __init__(self, scratch: str) -> None:
        self._engine: Any = None
        self._scratch = scratch
        self._platform = ""

    async def start(self, model: str, arguments: dict[str, Any], device: str) -> dict[str, Any]:
        if device == "rbln":
            # vllm-rbln finds its compiled models by the name of the folder: those of this process
            # are of this model's weights, and go with it.
            os.environ["VLLM_CACHE_ROOT"] = os.path.join(self._scratch, "vllm")
            if not arguments.get("block_size"):  # it takes no default; one block a row
                arguments["block_size"] = arguments.get("max_model_len") or _longest(model)
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        kind = str(getattr(current_platform, "plugin_name", "") or current_platform.device_type)
        if (kind if kind in ("cpu", "rbln") else "cuda") != device:
            raise RuntimeError(
                f"this vLLM ({vllm.__version__}) runs on {kind}, the session on {device}"
            )
        self._platform = kind
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **arguments))
        config = self._engine.vllm_config.model_config
        return {
            "version": str(vllm.__version__),
            "platform": kind,
            "dtype": str(config.dtype),
            "max_model_len": int(config.max_model_len),
        }

    async def generate(
        self, number: int, prompt: list[int], sampling: dict[str, Any]
    ) -> AsyncIterator[tuple[list[int], list[list[tuple[int, float]]], bool]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        given = dict(sampling)
        if suppressed := set(given.pop("suppressed", ())):
            size = self._engine.vllm_config.model_config.get_vocab_size()
            given["allowed_token_ids"] = [i for i in range(size) if i not in suppressed]
        if "logit_bias" in given:
            given["logit_bias"] = {int(k): v for k, v in given["logit_bias"].items()}
        parameters = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA, **given)
        request = {"prompt_token_ids": prompt}
        async for output in self._engine.generate(request, parameters, str(number)):
            part = output.outputs[0]
            tokens = [int(token) for token in part.token_ids]
            chances = [
                _chances(token, row, given["logprobs"])
                for token, row in zip(tokens, part.logprobs or [], strict=False)
            ]
            yield tokens, chances, bool(output.finished)

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if name == "reload":
            if self._platform == "rbln":
                raise RuntimeError("the weights are in the compiled programs")
            await self._engine.collective_rpc("rm_reload", args=(arguments["model"],))
        if name in ("reload", "empty_cache"):
            await self._engine.reset_prefix_cache()
            return {}
        raise ValueError(f"no operation {name!r}")

    def is_dead(self) -> bool:
        return self._engine is not None and bool(self._engine.errored)


def _longest(model: str) -> int:
    """The most tokens of a row, as the model's configuration has it."""
    with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    return int(config.get("max_position_embeddings") or config["n_positions"])


def _chances(token: int, row: Any, most: int) -> list[tuple[int, float]]:
    """The token's own log probability, then those of the most likely tokens."""
    ranked = sorted(row.items(), key=lambda item: -float(item[1].logprob))[:most]
    return [
        (token, float(row[token].logprob)),
        *((int(i), float(one.logprob)) for i, one in ranked),
    ]


if __name__ == "__main__":
    _frame().main(Vllm(sys.argv[2]), sys.argv[1:])
