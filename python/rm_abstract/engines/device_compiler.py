"""One device with a compiler of its own, as the programs of an engine use it: its workers, the
artefacts it made (kept in the compile cache), and the model's weights in memory workers map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.errors import DeviceUnavailableError, from_core
from rm_abstract.engines.artefacts import Artefacts
from rm_abstract.engines.context import EngineContext
from rm_abstract.engines.progress import Progress
from rm_abstract.engines.weight_blocks import WeightBlocks
from rm_abstract.kv.residence import Types
from rm_abstract.worker import onnx_program
from rm_abstract.worker.dtypes import DTYPE_NAMES
from rm_abstract.worker.shared_tensors import tensors_in


@dataclass
class Traffic:
    """Bytes that went through memory shared with the worker."""

    inputs: int = 0
    outputs: int = 0
    states: int = 0  # keys and values that came or went whole


class DeviceCompiler:
    """One device as the engine's programs use it: its workers, its artefacts, shared weights.

    Implements kv.residence.StateStore.
    """

    def __init__(
        self, context: EngineContext, artefacts: Artefacts, blocks: WeightBlocks, label: str
    ) -> None:
        resolved = context.device
        self.backend, self.index, self.device = resolved.backend, resolved.index, resolved.name
        rows = {row["name"]: row for row in _core.backend.backends()}
        row = rows[self.backend]
        if self.index >= len(row["devices"]):
            raise DeviceUnavailableError(
                f"[{self.device}] expected the device this session was made for, got "
                f"{len(row['devices'])} devices of {self.backend}; try rm_abstract.init() again",
                code="RM407",
            )
        info = row["devices"][self.index]
        self.properties: dict[str, str] = dict(info["properties"])
        self.target = str(info["arch"])
        self._build = str(row["build_id"])
        try:
            self._fingerprint = bytes(_core.backend.fingerprint(self.backend, self.index))
        except _core.CoreError as error:  # of a worker's interpreter that is not there
            raise from_core(error, DeviceUnavailableError) from error
        self.pool = context.workers(self.backend, self._fingerprint)
        self._settings = context.settings
        self.kernel_checks = context.kernel_checks
        self._artefacts = artefacts
        self._label = label
        self._blocks = blocks
        self.traffic = Traffic()

    @property
    def keeps_states(self) -> bool:
        return self.properties.get("states") == "1"

    @property
    def embeds_weights(self) -> bool:
        return self.properties.get("embeds_weights") == "1"

    @property
    def _takes_onnx(self) -> bool:
        return self.properties.get("program_format") == "onnx"

    @property
    def timeout_s(self) -> float:
        return float(self._settings.text("timeout_s"))

    @property
    def load_timeout_s(self) -> float:
        return float(self._settings.text("load_timeout_s"))

    @property
    def stall_s(self) -> float:
        return float(self._settings.text("stall_timeout_s"))

    @property
    def execute_timeout_s(self) -> float:
        return float(self._settings.text("execute_timeout_s"))

    def artefact(self, text: str, weights: dict[str, torch.Tensor]) -> tuple[Any, str, str]:
        """(entry, key in hex, where it came from) of a static program."""
        cache = self._artefacts.cache
        builder = cache.new_key("vendor")
        builder.set("program", text)
        builder.set("options", self._options())
        software = {"build": self._build.encode(), "fingerprint": self._fingerprint}
        if self._takes_onnx:
            software["exporter"] = onnx_program.exporter().encode()
        builder.set("backend", software)
        builder.set("target", self.target)
        if self.embeds_weights:
            builder.set("weights", self._artefacts.digests.of(weights))
        key = builder.finish()

        def compile_part() -> dict[str, Any]:
            data = self._compile(text, weights)
            return {"sections": {"artefact": data}, "producer": self.backend, "compat": self.target}

        def check(entry: Any) -> str:
            verdict = _core.backend.check_compat(
                self.backend, self.index, entry.section("artefact")
            )
            return "incompatible" if verdict == "no" else "accept"

        entry, source = cache.get_or_compile(key, compile_part, check)
        if source != "compiled" and self._settings.integer("verbose") > 0:
            Progress(f"{self._label} for {self.device}", 1).say("Loading compiled model from cache")
        return entry, key.hex, source

    def _compile(self, text: str, weights: dict[str, torch.Tensor]) -> Any:
        """The artefact's bytes: of the worker's own memory where there are many."""
        verbose = self._settings.integer("verbose")
        with Progress(f"{self._label} for {self.device}", verbose) as progress:
            worker = self.pool.worker("compile")
            options = sorted(self._options().items())
            block = self.shared(weights)
            program = onnx_program.to_onnx(text, weights) if self._takes_onnx else text.encode()
            return worker.compile(
                self.index, program, options, block, progress, self.timeout_s, self.stall_s
            )

    def _options(self) -> dict[str, str]:
        rows = [row["name"] for row in _core.options.table() if row["affects_artefact"]]
        own = self._settings.of_plugin(self.backend)
        return {
            **{name: self._settings.text(name) for name in rows},
            **{f"{self.backend}.{name}": text for name, text in own.items()},
        }

    def reject(self, entry: Any, why: str) -> None:
        self._artefacts.cache.reject(entry, why)

    def shared(self, weights: dict[str, torch.Tensor]) -> Any:
        """The weights in memory the workers map; one copy for all programs that use the same."""
        return self._blocks.of(weights)

    # ---- tensors that stay on the device (named "0", "1", ... in their order) -------------------

    def make_states(self, types: Types) -> Any:
        """Zeros in the worker that executes. Raises CoreError."""
        worker = self.pool.worker("execute")
        return worker.make_states(self.index, _rows(types), self.execute_timeout_s)

    def copy_states(self, to: Any, source: Any, **region: Any) -> None:
        """Copies a part on the device (src/worker/protocol.hpp: StatesRegion)."""
        to.copy_from(source, timeout_s=self.execute_timeout_s, **region)

    def read_states(self, states: Any, types: Types, axis: int) -> list[torch.Tensor]:
        """What lies at the start of each, in tensors of these types."""
        block, slots = self._block(types)
        states.read(block, axis=axis, timeout_s=self.execute_timeout_s)
        self.traffic.states += sum(slot.nbytes for slot in slots)
        return [slot.clone() for slot in slots]

    def write_states(self, states: Any, tensors: Sequence[torch.Tensor], axis: int) -> None:
        """Copies tensors to the start of each."""
        block, slots = self._block([(tuple(t.shape), t.dtype) for t in tensors])
        for slot, tensor in zip(slots, tensors, strict=True):
            slot.copy_(tensor)
        states.write(block, axis=axis, timeout_s=self.execute_timeout_s)
        self.traffic.states += sum(slot.nbytes for slot in slots)

    @staticmethod
    def _block(types: Types) -> tuple[Any, list[torch.Tensor]]:
        block = _core.worker.Weights(_rows(types))
        names = [DTYPE_NAMES[dtype] for _, dtype in types]
        return block, tensors_in(block.memory, block.places, names)


def _rows(types: Types) -> list[tuple[str, str, list[int]]]:
    return [(str(i), DTYPE_NAMES[dtype], list(dims)) for i, (dims, dtype) in enumerate(types)]
