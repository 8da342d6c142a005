"""One device with a compiler of its own, as the programs of an engine use it: its workers, the
artefacts it made (kept in the compile cache), and the model's weights in memory workers map.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from rm_abstract import _core
from rm_abstract.engines import onnx_program
from rm_abstract.engines.artefacts import Artefacts, weights_digest
from rm_abstract.engines.progress import Progress
from rm_abstract.engines.shared_tensors import DTYPE_NAMES, tensors_in
from rm_abstract.errors import DeviceUnavailableError, from_core

if TYPE_CHECKING:
    from rm_abstract.session import Session


class DeviceCompiler:
    """One device as the engine's programs use it: its workers, its artefacts, shared weights."""

    def __init__(self, session: Session, artefacts: Artefacts, label: str) -> None:
        resolved = session.resolved
        self.backend, self.index, self.device = resolved.backend, resolved.index, resolved.name
        rows = {row["name"]: row for row in _core.backend.backends()}
        row = rows[self.backend]
        info = row["devices"][self.index]
        self.properties: dict[str, str] = dict(info["properties"])
        self.target = str(info["arch"])
        self._build = str(row["build_id"])
        try:
            self._fingerprint = bytes(_core.backend.fingerprint(self.backend, self.index))
        except _core.CoreError as error:  # of a worker's interpreter that is not there
            raise from_core(error, DeviceUnavailableError) from error
        self.pool = session.workers(self.backend, self._fingerprint)
        self._settings = session.settings
        self._artefacts = artefacts
        self._label = label
        self._shared: tuple[Any, Any] | None = None
        self._lock = threading.Lock()

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
            builder.set("weights", weights_digest(weights))
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

    def _compile(self, text: str, weights: dict[str, torch.Tensor]) -> bytes:
        verbose = self._settings.integer("verbose")
        with Progress(f"{self._label} for {self.device}", verbose) as progress:
            worker = self.pool.worker("compile")
            options = sorted(self._options().items())
            block = self.shared(weights)
            program = onnx_program.to_onnx(text, weights) if self._takes_onnx else text.encode()
            return bytes(
                worker.compile(self.index, program, options, block, progress, self.timeout_s)
            )

    def _options(self) -> dict[str, str]:
        rows = [row["name"] for row in _core.options.table() if row["affects_artefact"]]
        return {name: self._settings.text(name) for name in rows}

    def reject(self, entry: Any, why: str) -> None:
        self._artefacts.cache.reject(entry, why)

    def shared(self, weights: dict[str, torch.Tensor]) -> Any:
        """The weights in memory the workers map; one copy for all programs that use the same."""
        if not weights:
            return None
        identity = tuple((n, t.data_ptr(), t._version, t.shape) for n, t in weights.items())
        with self._lock:
            if self._shared is not None and self._shared[0] == identity:
                return self._shared[1]
            rows = [(n, DTYPE_NAMES[t.dtype], list(t.shape)) for n, t in weights.items()]
            block = _core.worker.Weights(rows)
            slots = tensors_in(block.memory, block.places, [dtype for _, dtype, _ in rows])
            with torch.no_grad():
                for slot, tensor in zip(slots, weights.values(), strict=True):
                    slot.copy_(tensor)
            self._shared = (identity, block)
            return block
