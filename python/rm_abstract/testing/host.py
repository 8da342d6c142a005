"""A host to run a plugin with, in ctypes and without the core: for the conformance suite and tests
of single kernels."""

from __future__ import annotations

import ctypes as c
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rm_abstract.testing.abi import (
    ABI_VERSION,
    CODES,
    LOG,
    STATUS_CODE,
    STATUS_CREATE,
    STATUS_RELEASE,
    Attr,
    BackendApi,
    DeviceInfo,
    HostApi,
    Kernel,
    Kernels,
    Launch,
    Options,
    Problem,
    Str,
    Tensor,
    borrowed,
    i64,
    ptr,
    size_t,
    u32,
)


class PluginFailure(Exception):
    """A status a plugin returned."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Host:
    """rm_host_api with every status accounted for: `live` must be 0 when all were handled."""

    def __init__(self) -> None:
        self._statuses: dict[int, tuple[int, str]] = {}
        self._next = 1
        self.log: list[tuple[int, str]] = []
        self._callbacks = (
            STATUS_CREATE(self._create),
            STATUS_RELEASE(lambda status: self._statuses.pop(status, None) and None),
            STATUS_CODE(lambda status: self._statuses[status][0] if status else 0),
            LOG(lambda severity, text: self.log.append((severity, text.text()))),
        )
        create, release, code, log = self._callbacks
        size = c.sizeof(HostApi)
        self.api = HostApi(size, ABI_VERSION, 0, create, release, code, None, log, None)

    @property
    def live(self) -> int:
        return len(self._statuses)

    def _create(self, code: int, message: Str, file: bytes, line: int) -> int:
        handle, self._next = self._next, self._next + 1
        self._statuses[handle] = (code, message.text())
        return handle

    def check(self, status: int | None) -> None:
        """Consumes a status; raises PluginFailure unless it is NULL."""
        if status:
            code, message = self._statuses.pop(status)
            raise PluginFailure(CODES[code], message)


class Plugin:
    """A loaded plugin and its table.

    A library has one host at a time, the last that queried it.  `private` loads a copy of the file,
    a library of its own: for a process in which the core has loaded the same plugin.
    """

    def __init__(self, path: str | Path, *, private: bool = False) -> None:
        self.path, self.host = Path(path), Host()
        if private:
            with tempfile.TemporaryDirectory() as folder:
                copy = shutil.copy(path, folder)
                self._library = c.CDLL(str(copy), mode=c.RTLD_LOCAL)
        else:
            self._library = c.CDLL(str(path), mode=c.RTLD_LOCAL)
        self.api = self.query(ABI_VERSION)

    def query(self, host_abi: int) -> Any:
        """The table for a host of that version; raises PluginFailure when the plugin refuses."""
        query = self._library.rm_backend_query
        query.restype, query.argtypes = c.POINTER(BackendApi), [u32, c.POINTER(HostApi)]
        table = query(host_abi, c.byref(self.host.api))
        if not table:
            raise PluginFailure("FAILED_PRECONDITION", f"it does not speak ABI {host_abi:#x}")
        return table.contents

    def initialize(self) -> None:
        self.host.check(self.api.initialize(Options(None, 0)))

    def device_count(self) -> int:
        out = size_t(0)
        self.host.check(self.api.device_count(c.byref(out)))
        return out.value

    def open_device(self, index: int) -> int:
        out = ptr()
        self.host.check(self.api.device_open(index, c.byref(out)))
        return out.value or 0

    def device_info(self, device: int) -> Any:
        # Room behind the struct: a plugin that overruns it must not take the test process along.
        memory = (c.c_ubyte * (c.sizeof(DeviceInfo) + 1024))()
        info = DeviceInfo.from_buffer(memory)
        info.struct_size = c.sizeof(DeviceInfo)
        self.host.check(self.api.device_info(device, c.byref(info)))
        return info

    def rows(self) -> Iterator[Any]:
        """The plugin's rm.kernels/1 rows, stepping by its own stride."""
        table_at = self.api.extension(borrowed("rm.kernels/1")) if self.api.extension else None
        if not table_at:
            return
        table = Kernels.from_address(table_at)
        for i in range(table.count):
            yield Kernel.from_address(table.rows + i * table.row_stride)


class Operand:
    """A DLTensor over caller-owned memory."""

    def __init__(
        self,
        data: int,
        shape: Sequence[int],
        strides: Sequence[int],
        code: int,
        bits: int,
        device: tuple[int, int] = (1, 0),
    ) -> None:
        self._shape = (i64 * max(1, len(shape)))(*shape)
        self._strides = (i64 * max(1, len(strides)))(*strides)
        self.data = data
        self.tensor = Tensor(
            None, device[0], device[1], len(shape), code, bits, 1, self._shape, self._strides, 0
        )


def make_problem(
    op: str,
    inputs: Sequence[Operand | None],
    outputs: Sequence[Operand | None],
    attrs: dict[str, Any],
) -> Any:
    """An rm_problem; attributes are int, float, str, list[int] or list[float]."""
    name_of_op = borrowed(op)
    keep: list[Any] = [name_of_op]

    def pointers(operands: Sequence[Operand | None]) -> Any:
        array = (c.POINTER(Tensor) * max(1, len(operands)))()
        for i, operand in enumerate(operands):
            if operand is not None:
                array[i] = c.pointer(operand.tensor)
        keep.append((array, list(operands)))
        return array

    rows = (Attr * max(1, len(attrs)))()
    for row, (name, value) in zip(rows, attrs.items(), strict=False):
        text = borrowed(name)
        keep.append(text)
        row.struct_size, row.name = c.sizeof(Attr), text
        _set_attr(row, value, keep)
    problem = Problem(
        c.sizeof(Problem),
        name_of_op,
        pointers(inputs),
        len(inputs),
        pointers(outputs),
        len(outputs),
        rows,
        len(attrs),
        c.sizeof(Attr),
        0,
    )
    problem._keep = keep
    return problem


def _set_attr(row: Any, value: Any, keep: list[Any]) -> None:
    if isinstance(value, (bool, int)):
        row.kind, row.i = 0, int(value)
    elif isinstance(value, float):
        row.kind, row.f = 1, value
    elif isinstance(value, str):
        text = borrowed(value)
        keep.append(text)
        row.kind, row.s = 2, text
    elif all(isinstance(v, int) for v in value):
        row.kind, row.count = 3, len(value)
        ints = (i64 * max(1, len(value)))(*value)
        keep.append(ints)
        row.ints = ints
    else:
        row.kind, row.count = 4, len(value)
        floats = (c.c_double * max(1, len(value)))(*value)
        keep.append(floats)
        row.floats = floats


class PreparedKernel:
    """A row prepared for a problem; launches take data pointers, as the core's plans do."""

    def __init__(self, plugin: Plugin, row: Any, problem: Any, device_info: Any) -> None:
        self._plugin, self._row = plugin, row
        why = Str()
        if not row.supports(c.byref(problem), c.addressof(device_info), c.byref(why)):
            raise PluginFailure("UNIMPLEMENTED", why.text())
        self._state = ptr()
        plugin.host.check(
            row.prepare(c.byref(problem), c.addressof(device_info), 0, c.byref(self._state))
        )
        size = row.workspace(self._state) if row.workspace else 0
        self._memory = c.create_string_buffer(size + 64)
        self._workspace = -(-c.addressof(self._memory) // 64) * 64

    def launch(self, inputs: Sequence[int | None], outputs: Sequence[int | None]) -> None:
        ins, outs = (ptr * max(1, len(inputs)))(*inputs), (ptr * max(1, len(outputs)))(*outputs)
        args = Launch(c.sizeof(Launch), self._state, ins, outs, self._workspace, None)
        self._plugin.host.check(self._row.launch(c.byref(args)))

    def close(self) -> None:
        self._row.release(self._state)
        self._state = ptr()
