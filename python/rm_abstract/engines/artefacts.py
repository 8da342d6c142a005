"""What the native engine keeps in the compile cache: front records, programs, parity verdicts.

The cache knows bytes; this file knows what goes into the keys and checks what comes out. A front
record names a program, it is never trusted beyond that: the program was checked by the gate, and a
record whose weights do not exist in the module is not used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.engines.context import EngineContext
from rm_abstract.engines.variant import Record
from rm_abstract.engines.weight_digests import WeightDigests
from rm_abstract.guards.found import Sources
from rm_abstract.guards.identity import Unstable, describe
from rm_abstract.verification.parity import GATE_VERSION, Verdict
from rm_abstract.verification.quantised import (
    AUTO_ACTIVATIONS,
    AUTO_GROUPS,
    BITS,
    GPU_AUTO_GROUP,
)

BRIDGE = "torch"
GPU = "cuda"
QUANTISED_ON = ("cpu", GPU)  # the backends that have kernels for quantised weights
_KDL_CPU = 1  # DLPack's device type


class Artefacts:
    """The cache as one engine sees it. Thread safe: the cache is, and fields are set once."""

    def __init__(self, context: EngineContext) -> None:
        self._settings = context.settings
        self._backend = context.device.backend
        self._device_index = context.device.index
        self.cache = context.open_cache()
        self.digests = WeightDigests()
        self._identity: str | None = None
        self._bypass = ""
        self._kernels: dict[str, tuple[str, bytes]] | None = None  # `kernel_backends`, once asked
        self._passed: set[str] = set()  # programs of which such a verdict was stored

    def forget_module(self) -> None:
        """The module's structure or weights changed: what was derived from them is void."""
        self._identity = None
        self._bypass = ""

    @property
    def of_module(self) -> tuple[str | None, str]:
        """What is known of the module: its identity, or why it has none."""
        return self._identity, self._bypass

    @of_module.setter
    def of_module(self, known: tuple[str | None, str]) -> None:
        self._identity, self._bypass = known

    def identify(self, module: torch.nn.Module, found: Sources | None = None) -> None:
        """Fixes the identity of the module as it is now, unless it is known."""
        if self._identity is None and not self._bypass:
            try:
                self._identity = describe(module, _core.cache.digest, found)
            except Unstable as error:
                self._bypass = str(error)

    def adopt(self, identity: str) -> None:
        """Keeps what is captured under the identity that another process has of the module."""
        self._identity = identity

    @property
    def identity(self) -> str:
        """What `identify` fixed; empty while nothing is, and for a module that has none."""
        return self._identity or ""

    def identity_of(self, module: torch.nn.Module) -> str:
        """What other processes find this module's captures by; empty when they cannot."""
        self.identify(module)
        return self._identity or ""

    def backends(self) -> list[str]:
        """The session's backend and on the host the torch bridge: their kernel rows are tried in
        this order."""
        return list(self._kernel_backends())

    def _kernel_backends(self) -> dict[str, tuple[str, bytes]]:
        """Their builds and fingerprints (ISA, libraries, vendor compiler). Asked for once: plugins
        are loaded before an engine is made, and never unloaded."""
        if self._kernels is None:
            rows = {r["name"]: r for r in _core.backend.backends() if r["available"]}
            wanted, own = [self._backend], rows.get(self._backend)
            if all(d["dl_device"][0] == _KDL_CPU for d in (own["devices"] if own else ())):
                wanted.append(BRIDGE)
            found = {}
            for name in wanted:
                if name in rows:
                    device = self._device_index if name == self._backend else 0
                    fingerprint = bytes(_core.backend.fingerprint(name, device))
                    found[name] = (str(rows[name]["build_id"]), fingerprint)
            self._kernels = found
        return self._kernels

    # ---- front records -----------------------------------------------------------------------

    def find_record(
        self,
        module: torch.nn.Module,
        call_key: str,
        tensors: Sequence[torch.Tensor],
        past: Sequence[bool],
    ) -> Record | None:
        """The stored capture that serves a call of these tensors; None when there is none."""
        found: list[Record] = []

        def check(entry: Any) -> str:
            try:
                record = Record.from_json(bytes(entry.section("record")))
                fits = record.signature.test(past)([tuple(t.shape) for t in tensors])
                fits = fits and record.asked_the_same(tensors)
            except (KeyError, ValueError, TypeError, _core.CoreError):
                return "corrupt"
            if not fits:
                return "guard_miss"
            found.append(record)
            return "accept"

        entry = self.cache.lookup(self._front_key(module, call_key), check)
        return found[-1] if entry is not None and found else None

    def store_record(self, module: torch.nn.Module, call_key: str, record: Record) -> None:
        """Publishes a capture; one that holds tensors of this process is not stored."""
        data = record.to_json()
        if data is None:
            return
        state = [record.torch_state] if record.torch_state else []
        guards = json.dumps([record.input_dims, record.signature.relations, *state])
        artefact = {"sections": {"record": data}, "guards": guards, "producer": "capture"}
        key = self._front_key(module, call_key)
        self.cache.publish(key, artefact, record.capture_ms)

    # ---- refusals ----------------------------------------------------------------------------

    def find_refusal(
        self, module: torch.nn.Module, call_key: str, shapes: Sequence[Sequence[int]]
    ) -> tuple[str, str] | None:
        """(code, message) when an earlier capture of this call with these sizes failed."""
        entry = self.cache.lookup(self._front_key(module, call_key, shapes))
        if entry is None:
            return None
        try:
            found = json.loads(bytes(entry.section("refusal")))
            return str(found["code"]), str(found["message"])
        except (KeyError, ValueError, TypeError):
            return None

    def store_refusal(
        self,
        module: torch.nn.Module,
        call_key: str,
        shapes: Sequence[Sequence[int]],
        code: str,
        message: str,
    ) -> None:
        """Lets later processes leave this call to the original without trying a capture."""
        data = json.dumps({"code": code, "message": message}).encode()
        artefact = {"sections": {"refusal": data}, "producer": "capture"}
        self.cache.publish(self._front_key(module, call_key, shapes), artefact)

    def _front_key(
        self,
        module: torch.nn.Module,
        call_key: str,
        refused: Sequence[Sequence[int]] | None = None,
    ) -> Any:
        """The key of a capture, or with the sizes of a call that of its refusal."""
        builder = self.cache.new_key("front")
        self.identify(module)
        if self._bypass:
            builder.bypass(self._bypass)
        builder.set("front", self._identity or "")
        builder.set("signature", call_key)
        if refused is not None:
            builder.set("guards", json.dumps({"refused": [list(map(int, s)) for s in refused]}))
        return builder.finish()

    @property
    def bypass(self) -> str:
        """Why this module's captures are not cached; empty when they are."""
        return self._bypass

    @property
    def weight_bits(self) -> int:
        """Bits of the weights of products; 0: as they are."""
        wanted = BITS.get(self._settings.text("precision"), 0)
        return wanted if self._backend in QUANTISED_ON else 0

    @property
    def precision_said(self) -> str:
        """What the report says of the precision asked for; empty when none was."""
        wanted = self._settings.text("precision")
        if wanted not in BITS:
            return ""
        if not self.weight_bits:
            return f"the model's own: {wanted} is for {' and '.join(QUANTISED_ON)} so far"
        group, on_gpu = self._settings.text("group_size"), self._backend == GPU
        auto = GPU_AUTO_GROUP if on_gpu else AUTO_GROUPS[wanted]
        said = f"{wanted}, groups of {auto if group == 'auto' else group}"
        if on_gpu:
            return f"{said}, activations as they are"
        activations = self._settings.text("activations")
        return f"{said}, activations {AUTO_ACTIVATIONS if activations == 'auto' else activations}"

    # ---- programs ----------------------------------------------------------------------------

    def program(self, ir: str) -> tuple[str, str, str]:
        """(text after passes, key in hex, where it came from) for a canonical program."""
        builder = self.cache.new_key("program")
        builder.set("program", ir)
        builder.set("options", self._options())
        builder.set("backend", self._backend_identity())
        key = builder.finish()

        def compile_text() -> dict[str, bytes]:
            options = {name: text for name, (text, _) in self._settings.values.items()}
            if not self.weight_bits:
                options["precision"] = "auto"
            text = _core.ir.run_passes(ir, options, self._backend == GPU)
            return {"rmir": text.encode()}

        entry, source = self.cache.get_or_compile(key, compile_text)
        return bytes(entry.section("rmir")).decode(), key.hex, source

    def _options(self) -> dict[str, str]:
        rows = _core.options.table()
        return {
            row["name"]: self._settings.text(row["name"]) for row in rows if row["affects_artefact"]
        }

    def _backend_identity(self) -> dict[str, bytes]:
        """Of what the kernels come from."""
        identity = {}
        for name, (build, fingerprint) in self._kernel_backends().items():
            identity[f"{name} build"] = build.encode()
            identity[f"{name} fingerprint"] = fingerprint
        return identity

    def _fingerprints(self) -> dict[str, str]:
        return {name: print_.hex() for name, (_, print_) in self._kernel_backends().items()}

    # ---- verdicts ----------------------------------------------------------------------------

    def verdict(self, artefact: str, weights: dict[str, torch.Tensor]) -> dict[str, Any] | None:
        """The stored result of the parity gate for this program and these very weights."""
        return self._verdict_of(self._verdict_key(artefact, weights))

    def store_verdict(
        self, artefact: str, weights: dict[str, torch.Tensor], verdict: Verdict
    ) -> None:
        """For later processes: only of the first weights that pass. A training loop would read all
        weights, and leave a file, at every evaluation, for weights hardly a process starts with."""
        if verdict.passed and artefact in self._passed:
            return
        key = self._verdict_key(artefact, weights)
        self._publish_verdict(key, verdict.passed, verdict.max_error, verdict.detail)
        if verdict.passed:
            self._passed.add(artefact)

    def store_kernels(self, artefact: str, kernels: int, verdict: Verdict) -> None:
        """What a program gives with this set of kernels was compared with the original."""
        key = self._kernels_key(artefact, kernels)
        self._publish_verdict(key, verdict.passed, verdict.max_error, verdict.detail)

    def kernels_passed(self, artefact: str, kernels: int) -> bool:
        """Whether a process on this machine compared them. Weights make no difference here."""
        found = self._verdict_of(self._kernels_key(artefact, kernels), counted=False)
        return found is not None and found.get("passed") is True

    def quarantine(self, artefact: str, weights: dict[str, torch.Tensor], detail: str) -> None:
        """In the place of a verdict that the gate passed: no process uses the program again."""
        key = self._verdict_key(artefact, weights)
        stored = self.cache.lookup(key, counted=False)
        if stored is not None:
            self.cache.reject(stored, detail)
        self._publish_verdict(key, False, None, detail)

    def _kernels_key(self, artefact: str, kernels: int) -> Any:
        builder = self.cache.new_key("verdict")
        builder.set("program", f"{artefact} gate {GATE_VERSION} kernels {kernels:016x}")
        builder.set("backend", self._fingerprints())
        return builder.finish()

    def _verdict_of(self, key: Any, counted: bool = True) -> dict[str, Any] | None:
        entry = self.cache.lookup(key, counted=counted)
        if entry is None:
            return None
        found = json.loads(bytes(entry.section("verdict")))
        return found if isinstance(found, dict) else None

    def _publish_verdict(
        self, key: Any, passed: bool, max_error: float | None, detail: str
    ) -> None:
        data = {"passed": passed, "max_error": max_error, "detail": detail}
        self.cache.publish(key, {"verdict": json.dumps(data).encode()})

    def _verdict_key(self, artefact: str, weights: dict[str, torch.Tensor]) -> Any:
        builder = self.cache.new_key("verdict")
        builder.set("program", f"{artefact} gate {GATE_VERSION}")
        # Another instruction set or library gives other numbers: a verdict is of this machine.
        builder.set("backend", self._fingerprints())
        builder.set("weights", self.digests.of(weights))
        return builder.finish()
