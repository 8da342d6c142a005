"""A program of fixed sizes on a whole-program device: its parts compiled, loaded and run in order.

Parts the device does not support run on the host. A worker that died is started again and the call
is repeated once. Nothing of the user's is changed here, so a failure leaves the call as it was.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rm_abstract import _core
from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import CompileError, ExecutionError
from rm_abstract.engines.buckets import Bucket, Buckets, Padding, padding_of, place, take
from rm_abstract.engines.device_parts import (
    MIN_PART_NODES,
    DevicePart,
    HostPart,
    refuse_checks,
    support_of,
)
from rm_abstract.engines.variant import BAD_CALL, Record
from rm_abstract.worker import ir_text

if TYPE_CHECKING:
    from rm_abstract.engines.device_compiler import DeviceCompiler

_CRASHED = "RM303"
_FAILED = "RM307"


class Remade(Decline):
    """The artefact that was compared had to be made again: its successor was not compared yet."""

    def __init__(self, device: str) -> None:
        super().__init__(
            "RM602", f"the artefact for {device} was made again and is compared before it serves"
        )


class DeviceProgram:
    """Implements engines.variant.Program for one bucket of a capture."""

    def __init__(
        self,
        compiler: DeviceCompiler,
        record: Record,
        buckets: Buckets,
        sizes: dict[str, int],
        weights: dict[str, torch.Tensor],
        bucket: Bucket,
    ) -> None:
        self._compiler = compiler
        self._buckets = buckets
        self._record = record
        self._weights = weights
        self._fits = record.signature.test()
        self._output_dims = [t.dims for t in ir_text.parse(record.ir).output_types]
        self._where = {
            dim: (i, j)
            for i, dims in reversed(list(enumerate(record.input_dims)))
            for j, dim in reversed(list(enumerate(dims)))
            if dim in sizes
        }
        self._lock = threading.Lock()
        self.side = "right"
        self.compared = ""  # the artefact a verdict is about; empty until there is one
        self.crashes: list[str] = []  # of workers, survived: what each ended with
        self._set_bucket(bucket, sizes)

    def _set_bucket(self, bucket: Bucket, sizes: dict[str, int]) -> None:
        self.bucket = bucket
        self.sides = self._buckets.sides(bucket, sizes)
        self.side = self.sides[0]
        self.is_short = any(dict(bucket.sizes)[s] != n for s, n in sizes.items())
        if not self.is_short:  # nothing was padded: nothing is known about padding
            self.bucket = self._buckets.exact(sizes)
        self._shapes = self.bucket.shapes(self._record.input_dims)
        self._served: dict[tuple[int, ...], bool] = {}
        self._paddings: dict[tuple[object, ...], Padding] = {}
        text = _core.ir.substitute(self._record.ir, dict(bucket.sizes))
        refuse_checks(self._compiler.device, text)
        self.support = support_of(self._compiler.backend, self._compiler.index, text)
        if not self.support.device_nodes:
            reasons = ", ".join(sorted(self.support.kept)[:4])
            raise CompileError(
                f"[{self._compiler.device}] expected operators this device runs, got none in parts "
                f"of {MIN_PART_NODES} or more: {reasons}; try another device for this model",
                code="RM304",
            )
        self._check_support()
        self._parts: list[HostPart | DevicePart] = []
        for part in self.support.parts:
            if part["on_device"]:
                device_part = DevicePart(self._compiler, part, self._state_names())
                device_part.prepare(self._weights)
                self._parts.append(device_part)
            else:
                self._parts.append(HostPart(part, self._weights, self._compiler.kernel_checks()))
        self._surviving_a_crash(self._ensure_loaded)

    def _check_support(self) -> None:
        """For kinds of programs that need more than a part on the device."""

    def _state_names(self) -> dict[int, str]:
        """What the inputs that stay on the device are called there."""
        return {number: str(i) for i, number in enumerate(sorted(self.support.states))}

    def _ensure_loaded(self) -> None:
        for part in self.device_parts:
            part.ensure_loaded(self._weights)

    def _surviving_a_crash(self, body: Callable[[], Any]) -> Any:
        """The body's result; once more, in the next worker, when one died meanwhile. Programs that
        ran beside each other repeat by turns: who kills the worker again does it alone."""
        try:
            return body()
        except _core.CoreError as error:
            if error.reason != _CRASHED:
                raise
            crash = str(error)
        with self._compiler.pool.repeats:
            result = body()
        self.crashes.append(crash)
        return result

    def _enter(self) -> None:
        """Loads what is not loaded. Raises Remade when that gave other bytes than were compared."""
        self._ensure_loaded()
        if self.compared and self.compared != self.artefact:
            raise Remade(self._compiler.device)

    def become_exact(self, sizes: dict[str, int]) -> None:
        """Gives padding up: this program serves one shape from now on."""
        self._set_bucket(self._buckets.exact(sizes), sizes)

    @property
    def device_parts(self) -> list[DevicePart]:
        return [part for part in self._parts if isinstance(part, DevicePart)]

    @property
    def artefact(self) -> str:
        """What a verdict is about: the artefacts, down to their bytes, and the way calls are padded
        for them. A compiler may give other bytes for the same key: those are compared anew."""
        padding = f"|{self.side}" if self.is_short else ""
        return "+".join(f"{part.key}:{part.digest}" for part in self.device_parts) + padding

    @property
    def cache(self) -> str:
        return "hit" if all(p.source != "compiled" for p in self.device_parts) else "miss"

    # ---- which calls --------------------------------------------------------------------------

    def sizes_of(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        return {symbol: int(shapes[i][j]) for symbol, (i, j) in self._where.items()}

    def serves(self, shapes: Sequence[Sequence[int]]) -> bool:
        """True when a call of these shapes is compiled for by this bucket, padding included."""
        if not self._fits(shapes):
            return False
        sizes = self.sizes_of(shapes)
        key = tuple(sizes.values())
        known = self._served.get(key)
        if known is None:
            known = self._served[key] = self._holds(sizes)
        return known

    def _holds(self, sizes: dict[str, int]) -> bool:
        if self._buckets.exact(sizes).sizes == self.bucket.sizes:
            return True
        if not self.is_short:
            return False
        try:
            return self._buckets.choose(sizes).sizes == self.bucket.sizes
        except Decline:
            return False

    # ---- running ------------------------------------------------------------------------------

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The program's outputs for one call. Raises CoreError for what the call itself is wrong
        about, ExecutionError when the device failed."""
        return self._run(inputs, 0.0, 0.0)

    def padding_is_inert(self, inputs: list[torch.Tensor]) -> bool:
        """Runs the call with other values in the padding: the real part must not notice."""
        first = self._run(inputs, 0.0, 0.0)
        second = self._run(inputs, 1.0, 1.0)
        return all(
            torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
            for a, b in zip(first, second, strict=True)
        )

    def _run(self, inputs: list[torch.Tensor], fill: float, rows: float) -> list[torch.Tensor]:
        def attempt() -> list[torch.Tensor]:
            self._enter()
            padding = self._padding(self.sizes_of([t.shape for t in inputs]))
            return self._run_parts(inputs, padding, fill, rows)

        with self._lock:
            outputs: list[torch.Tensor] = self._as_execution(attempt)
            return outputs

    def _as_execution(self, body: Callable[[], Any]) -> Any:
        """The body's result, survived a crash. Raises CoreError for what the call itself is wrong
        about, ExecutionError when the device failed."""
        try:
            return self._surviving_a_crash(body)
        except _core.CoreError as error:
            if error.reason in ("", _FAILED) and error.code in BAD_CALL:
                raise  # the call is wrong, not the device
            raise ExecutionError(
                f"{error}; try the original, which serves this model now",
                code=error.reason or _FAILED,
            ) from error

    def _put(
        self, index: int, slot: torch.Tensor, tensor: torch.Tensor, padding: Padding, fill: float,
        rows: float,
    ) -> None:  # fmt: skip
        """Copies input ``index`` into its slot of the bucket's size."""
        mask = self._buckets.roles[index].is_mask
        place(slot, tensor, padding.inputs[index], 0.0 if mask else fill,
              1.0 if mask and rows else rows)  # fmt: skip

    def _run_parts(
        self, inputs: list[torch.Tensor], padding: Padding, fill: float, rows: float,
        states: Any = None,
    ) -> list[Any]:  # fmt: skip
        """The program's outputs; None for new values of states."""
        results: list[list[torch.Tensor]] = []
        shapes = self._shapes

        def gather(port: tuple[int, int]) -> torch.Tensor:
            source, index = port
            if source >= 0:
                return results[source][index]
            if tuple(inputs[index].shape) == shapes[index]:
                return inputs[index]
            slot = torch.empty(shapes[index], dtype=inputs[index].dtype)
            self._put(index, slot, inputs[index], padding, fill, rows)
            return slot

        def fill_slot(port: tuple[int, int], slot: torch.Tensor) -> None:
            source, index = port
            if source >= 0:
                slot.copy_(results[source][index])
            else:
                self._put(index, slot, inputs[index], padding, fill, rows)

        for part in self._parts:
            if isinstance(part, DevicePart):
                results.append(part.run(fill_slot, states))
            else:
                results.append(part.run(gather))
        outputs: list[Any] = []
        for i, (source, index) in enumerate(self.support.outputs):
            if source >= 0 and index >= len(results[source]):
                outputs.append(None)  # it stays on the device
                continue
            value = results[source][index] if source >= 0 else gather((source, index))
            outputs.append(take(value, padding.outputs[i], padding.output_shapes[i]))
        return outputs

    def _padding(self, sizes: dict[str, int]) -> Padding:
        key = (self.side, *sizes.values())
        found = self._paddings.get(key)
        if found is None:
            found = self._paddings[key] = padding_of(
                self.bucket, self._buckets.kinds, sizes, self._record.input_dims,
                self._output_dims, self.side,
            )  # fmt: skip
        return found

    # ---- weights and report -------------------------------------------------------------------

    def update_weights(self, weights: dict[str, torch.Tensor], shared: Any = None) -> None:
        """Takes other values of the same weights; compiles again where the artefact holds them.

        What the host's parts derive is not shared with other programs.
        """
        with self._lock:
            self._weights = weights
            for part in self._parts:
                if isinstance(part, HostPart):
                    part.update_weights(weights)
                else:
                    part.unload()
                    if self._compiler.embeds_weights:
                        part.prepare(weights)

    def report(self) -> dict[str, Any]:
        parts = Counter(
            f"{self._compiler.device} part of {p.nodes} nodes" for p in self.device_parts
        )
        return {
            "nodes": self.support.nodes,
            "native_nodes": self.support.device_nodes,
            "kernels": dict(parts),
            "instances": max(1, len(self._paddings)),
        }
