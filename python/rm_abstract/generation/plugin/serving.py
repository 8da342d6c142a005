"""The program of a process in which a plugin generates: `python serving.py NAME FD SCRATCH`, run by
the Python that RM_<NAME>_PYTHON names, which has rm_abstract and the plugin."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from rm_abstract import device
from rm_abstract.generation.remote import worker_side
from rm_abstract.plugin import SAMPLES, GenerateRequest
from rm_abstract.worker import python_plugins


class _Compiled:
    """A plugin in C++ (rm/generate.h) as a plugin.Generator."""

    def __init__(self, name: str, index: int, folder: str, options: dict[str, str]) -> None:
        from rm_abstract import _core

        self._generator = _core.generate.Generator(name, index, folder, sorted(options.items()))
        self.max_tokens = int(self._generator.max_tokens)

    def generate(self, request: GenerateRequest) -> Iterator[Any]:
        sampling = [(name, repr(value)) for name, value in request.sampling.items()]
        under_way = self._generator.start(
            [list(prompt) for prompt in request.prompts],
            request.max_new_tokens,
            list(request.stop_tokens),
            sampling,
            list(request.seeds),
        )
        while True:
            yield under_way.step()


def open_generator(name: str, index: int, folder: str, options: dict[str, str]) -> Any:
    """The plugin's generator for a model. What its code raises passes."""
    search_path = os.environ.get("RM_BACKEND_PATH", "")
    found = python_plugins.plugin_named(name, search_path, device.ENTRY_POINTS)
    if found is None:
        device.load_plugins(search_path)
        return _Compiled(name, index, folder, options)
    if found.folder:
        sys.path.insert(0, found.folder)
    module, _, kind = found.plugin.generator.partition(":")
    return getattr(import_module(module), kind)(index, folder, options)


class Plugged:
    """Implements worker_side.Engine. The plugin's code runs in one thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._batches = worker_side.Batches(self._run, self._thread)
        self._generator: Any = None

    async def start(self, model: str, arguments: dict[str, Any], device: str) -> dict[str, Any]:
        index = int(device.partition(":")[2] or 0)
        loop = asyncio.get_running_loop()
        self._generator = await loop.run_in_executor(
            self._thread, open_generator, self._name, index, model, arguments["options"]
        )
        return {
            "version": self._name,
            "platform": device,
            "max_model_len": int(self._generator.max_tokens),
        }

    async def generate(
        self, number: int, prompt: list[int], sampling: dict[str, Any]
    ) -> AsyncIterator[tuple[list[int], worker_side.Chances, bool]]:
        async for item in self._batches.generate(prompt, sampling):
            yield item

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        raise ValueError(f"no operation {name!r}")  # other weights: another process

    def is_dead(self) -> bool:
        return False

    def _run(self, batch: worker_side.Batch, give: Callable[[int, Any], None]) -> None:
        """One generation, until every row ended or was left."""
        request = _request(batch)
        over = [False] * batch.rows
        steps = self._generator.generate(request)
        try:
            for count in range(1, request.max_new_tokens + 1):
                tokens, chances = _step(next(steps, None), batch.rows)
                for row, token in enumerate(tokens):
                    if over[row]:
                        continue
                    last = token in request.stop_tokens or count == request.max_new_tokens
                    over[row] = last or row in batch.left
                    known = [[(token, chances[row])]] if chances else []
                    give(row, ([token], known, over[row]))
                if all(over):
                    return
        finally:
            close = getattr(steps, "close", None)
            if close is not None:
                close()


def _request(batch: worker_side.Batch) -> GenerateRequest:
    rows = range(batch.rows)
    said = batch.samplings[0]
    drawn = said["temperature"] != 0
    kept = SAMPLES if drawn else tuple(name for name in SAMPLES if name != "temperature")
    return GenerateRequest(
        prompts=[batch.prompts[row] for row in rows],
        max_new_tokens=int(said["max_tokens"]),
        stop_tokens=list(said["stop_token_ids"]),
        sampling={name: said[name] for name in kept if name in said},
        seeds=[int(batch.samplings[row]["seed"]) for row in rows] if drawn else [],
    )


def _step(given: Any, rows: int) -> tuple[list[int], list[float]]:
    """What a plugin yielded, checked. Raises ValueError."""
    if given is None:
        raise ValueError("[generate] expected a token a row, got the end of the generation")
    is_pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Sequence)
    tokens, chances = given if is_pair else (given, ())
    if not isinstance(tokens, Sequence) or len(tokens) != rows:
        raise ValueError(f"[generate] expected {rows} tokens, got {tokens!r}")
    known = [float(chance) for chance in chances]
    complete = len(known) == rows and not any(math.isnan(chance) for chance in known)
    return [int(token) for token in tokens], known if complete else []


if __name__ == "__main__":
    worker_side.main(Plugged(sys.argv[1]), sys.argv[2:])
