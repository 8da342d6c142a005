"""The program of a worker of optimum-rbln: `python serving.py FD SCRATCH`, run by the Python that
RM_RBLN_PYTHON names.

Imports the standard library and, inside functions, the vendor's packages: rm_abstract need not be
installed beside them. Rows of one generation are one batch, on programs of fixed batch sizes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from importlib import metadata
from pathlib import Path
from typing import Any

_MANIFEST = "rm_files.json"
_PACKAGES = ("optimum-rbln", "rebel-compiler", "transformers", "torch")


def _frame() -> Any:
    """The module generation/remote/worker_side.py, by its path."""
    path = Path(__file__).resolve().parents[1] / "remote" / "worker_side.py"
    spec = importlib.util.spec_from_file_location("rm_worker_side", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Optimum:
    """Implements worker_side.Engine. Everything of the vendor's runs in one thread."""

    def __init__(self, scratch: str, frame: Any) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._batches = frame.Batches(self._run, self._thread)
        self._dead = False
        self._folder = ""
        self._given: dict[str, Any] = {}
        self._sizes: list[int] = []
        self._device = 0
        self._weights: dict[str, str] = {}
        self._scratch = scratch
        self._kept = Path()
        self._class: Any = None
        self._model: Any = None

    async def start(self, model: str, arguments: dict[str, Any], device: str) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._start, model, arguments, device)

    async def generate(
        self, number: int, prompt: list[int], sampling: dict[str, Any]
    ) -> AsyncIterator[tuple[list[int], list[list[tuple[int, float]]], bool]]:
        async for item in self._batches.generate(prompt, sampling):
            yield item

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if name != "load":  # the weights are in the programs
            raise ValueError(f"no operation {name!r}")
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        return {}

    def is_dead(self) -> bool:
        return self._dead

    # ---- in the thread ---------------------------------------------------------------------------

    def _start(self, model: str, given: dict[str, Any], device: str) -> dict[str, Any]:
        import optimum.rbln
        import rebel

        architecture = json.loads(Path(model, "config.json").read_text())["architectures"][0]
        self._class = getattr(optimum.rbln, f"RBLN{architecture}", None)
        if self._class is None:
            raise RuntimeError(f"optimum-rbln has no RBLN{architecture}")
        self._folder, self._given = model, given
        self._device = int(device.partition(":")[2] or 0)
        self._weights = _digests(Path(model))
        self._sizes = sorted(given["batch_sizes"])
        self._prepare()
        return {
            "version": metadata.version("optimum-rbln"),
            "platform": rebel.get_npu_name(self._device),
            "batch_sizes": self._sizes,
            "max_model_len": given["max_seq_len"],
        }

    def _prepare(self) -> None:
        """The programs for the batch sizes of now, from the cache or made."""
        import rebel

        devices = self._devices()
        folder = _private(Path(self._given["cache"])) if self._given["cache"] else None
        self._kept = (folder or Path(self._scratch, "programs")) / self._key()
        if _whole(self._kept):
            print(f"rbln: found {self._kept.name}", file=sys.stderr, flush=True)
        else:
            self._compile(self._kept)
        if any(rebel.get_npu_name(index) is None for index in devices):
            raise RuntimeError(
                f"NPU {devices[-1]} is not there, {rebel.device_count()} are; the programs are "
                "compiled and kept"
            )

    def _devices(self) -> list[int]:
        return list(range(self._device, self._device + int(self._given["num_devices"])))

    def _placed(self, create_runtimes: bool) -> dict[str, Any]:
        devices = self._devices()
        where = devices if len(devices) > 1 else devices[0]
        return {"device": where, "create_runtimes": create_runtimes}

    def _load(self) -> None:
        self._model = self._class.from_pretrained(
            str(self._kept), export=False, rbln_config=self._placed(True)
        )
        # What a request does not say must not come from the checkpoint.
        self._model.generation_config = type(self._model.generation_config)()

    def _compile(self, kept: Path) -> None:
        """Compiles into a folder that gets its name when it is whole."""
        print(f"rbln: compiling for batches of {self._sizes}", file=sys.stderr, flush=True)
        made = self._class.from_pretrained(
            self._folder,
            export=True,
            rbln_config={
                "batch_size": self._sizes[-1],
                "decoder_batch_sizes": sorted(self._sizes, reverse=True),
                "max_seq_len": self._given["max_seq_len"],
                "npu": self._given["npu"],
                "num_devices": self._given["num_devices"],
                **self._placed(False),
            },
        )
        kept.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="new-", dir=kept.parent))
        try:
            made.save_pretrained(str(folder))
            (folder / _MANIFEST).write_text(json.dumps(_digests(folder)))
            shutil.rmtree(kept, ignore_errors=True)  # a damaged one
            with contextlib.suppress(OSError):  # another process was quicker
                os.rename(folder, kept)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _key(self) -> str:
        """Everything the programs depend on."""
        facts = {
            "weights": self._weights,
            "sizes": self._sizes,
            "options": {k: v for k, v in self._given.items() if k not in ("cache", "batch_sizes")},
            "packages": {name: metadata.version(name) for name in _PACKAGES},
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]

    def _run(self, batch: Any, give: Callable[[int, Any], None]) -> None:
        """``batch``: worker_side.Batch."""
        try:
            self._generate(batch, batch.samplings[0], give)
        except BaseException as error:
            # Errors of the NPU and its runtime: the next generation gets another process.
            self._dead = type(error).__module__.startswith("rebel")
            raise

    def _generate(
        self, batch: Any, sampling: dict[str, Any], give: Callable[[int, Any], None]
    ) -> None:
        import torch
        from transformers import GenerationConfig, StoppingCriteria

        rows = batch.rows
        size = min(n for n in self._sizes if n >= rows)
        prompts = [batch.prompts[row if row < rows else 0] for row in range(size)]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
        stops, most = set(sampling["stop_token_ids"]), int(sampling["max_tokens"])
        asked = "logprobs" in sampling
        over = [False] * rows

        class Hand(StoppingCriteria):
            """Hands every new token over, and ends rows."""

            def __call__(self, input_ids: Any, scores: Any, **others: Any) -> Any:
                last = input_ids[:rows, -1].tolist()
                for row, token in enumerate(last):
                    if over[row]:
                        continue
                    count = input_ids.shape[1] - width
                    over[row] = token in stops or count >= most or row in batch.left
                    chances = []
                    if asked:
                        known = torch.log_softmax(scores[-1][row].float(), -1)
                        chances = [[(token, float(known[token]))]]
                    give(row, ([token], chances, over[row]))
                ended = torch.tensor([*over, *[True] * (size - rows)])
                return ended.fill_(True) if all(over) else ended

        self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                do_sample=False,
                max_new_tokens=most,
                pad_token_id=0,
                return_dict_in_generate=asked,
                output_scores=asked,
            ),
            stopping_criteria=[Hand()],
        )


def _digests(folder: Path) -> dict[str, str]:
    """Of every file of a folder but the list of them."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != _MANIFEST:
            with path.open("rb") as file:
                digest = hashlib.sha256()
                while part := file.read(1 << 22):
                    digest.update(part)
                found[path.name] = digest.hexdigest()
    return found


def _whole(kept: Path) -> bool:
    """Whether a folder of programs is as it was written."""
    try:
        return bool(json.loads((kept / _MANIFEST).read_text()) == _digests(kept))
    except (OSError, ValueError):
        return False


def _private(folder: Path) -> Path | None:
    """The folder, made where it is not there; None where others can write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError:
        return None
    return folder if state.st_uid == os.geteuid() and not state.st_mode & 0o022 else None


if __name__ == "__main__":
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # torch-rbln would change torch
    frame = _frame()
    frame.main(Optimum(sys.argv[2], frame), sys.argv[1:])
