"""include/rm/backend.h and include/rm/kernels.h in ctypes: layouts only.

A second, independent reading of the C contract: the layout test compares it with the compiled one,
`testing.host` drives plugins through it without the core.
"""

from __future__ import annotations

import ctypes as c
from typing import Any

ABI_MAJOR, ABI_MINOR = 1, 2
ABI_VERSION = (ABI_MAJOR << 16) | ABI_MINOR

CODES = (
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS "
    "PERMISSION_DENIED RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED "
    "INTERNAL UNAVAILABLE DATA_LOSS"
).split()

KERNEL_FALLBACK, KERNEL_DETERMINISTIC, KERNEL_CAPTURABLE, KERNEL_BRIDGE = 1, 2, 4, 8
CAP_ASYNC, CAP_CONCURRENT_EXECUTE, CAP_SERIALIZE, CAP_GRAPH_CAPTURE = 1, 2, 4, 8


def _struct(name: str, *fields: tuple[str, Any]) -> type[c.Structure]:
    return type(name, (c.Structure,), {"_fields_": list(fields)})


size_t, ptr, u32, i32, u64, i64 = (
    c.c_size_t,
    c.c_void_p,
    c.c_uint32,
    c.c_int32,
    c.c_uint64,
    c.c_int64,
)


class Str(c.Structure):
    """rm_str: borrowed bytes."""

    _fields_ = [("data", ptr), ("size", size_t)]

    def text(self) -> str:
        return c.string_at(self.data, self.size).decode() if self.data and self.size else ""


def borrowed(text: str) -> Str:
    """An rm_str over `text`; the bytes live as long as the struct."""
    raw = text.encode()
    buffer = c.create_string_buffer(raw, len(raw) + 1)
    out = Str(c.addressof(buffer), len(raw))
    out._keep = buffer
    return out


Bytes = _struct("rm_bytes", ("data", ptr), ("size", size_t))


class Blob(c.Structure):
    """rm_blob: owned by whoever receives it."""


RELEASE_BLOB = c.CFUNCTYPE(None, c.POINTER(Blob))
Blob._fields_ = [("data", ptr), ("size", size_t), ("ctx", ptr), ("release", RELEASE_BLOB)]

Option = _struct("rm_option", ("key", Str), ("value", Str))
Options = _struct("rm_options", ("data", c.POINTER(Option)), ("size", size_t))
Tensor = _struct(
    "DLTensor",
    ("data", ptr),
    ("device_type", i32),
    ("device_id", i32),
    ("ndim", i32),
    ("dtype_code", c.c_uint8),
    ("dtype_bits", c.c_uint8),
    ("dtype_lanes", c.c_uint16),
    ("shape", c.POINTER(i64)),
    ("strides", c.POINTER(i64)),
    ("byte_offset", u64),
)

STATUS_CREATE = c.CFUNCTYPE(ptr, c.c_int, Str, c.c_char_p, c.c_int)
STATUS_RELEASE = c.CFUNCTYPE(None, ptr)
STATUS_CODE = c.CFUNCTYPE(c.c_int, ptr)
# ctypes callbacks cannot return a struct: nothing in this host calls status_message back.
LOG = c.CFUNCTYPE(None, c.c_int, Str)
HostApi = _struct(
    "rm_host_api",
    ("struct_size", size_t),
    ("abi_version", u32),
    ("reserved", u32),
    ("status_create", STATUS_CREATE),
    ("status_release", STATUS_RELEASE),
    ("status_code", STATUS_CODE),
    ("status_message", ptr),
    ("log", LOG),
    ("extension", ptr),
)
DeviceInfo = _struct(
    "rm_device_info",
    ("struct_size", size_t),
    ("caps", u64),
    ("dl_device_type", i32),
    ("dl_device_id", i32),
    ("memory_bytes", u64),
    ("alignment", u32),
    ("reserved", u32),
    ("name", Str),
    ("arch", Str),
    ("properties", Options),
)
NodeSupport = _struct(
    "rm_node_support",
    ("struct_size", size_t),
    ("verdict", c.c_int),
    ("cluster", u32),
    ("est_ns", c.c_double),
    ("reason", Str),
)
Program = _struct("rm_program", ("struct_size", size_t), ("format", Str), ("code", Bytes))
Constant = _struct(
    "rm_constant",
    ("struct_size", size_t),
    ("name", Str),
    ("digest", Bytes),
    ("tensor", c.POINTER(Tensor)),
)
Constants = _struct(
    "rm_constants", ("data", c.POINTER(Constant)), ("size", size_t), ("stride", size_t)
)
PROGRESS = c.CFUNCTYPE(None, ptr, c.c_double, Str)
CANCELLED = c.CFUNCTYPE(c.c_int, ptr)
CompileOptions = _struct(
    "rm_compile_options",
    ("struct_size", size_t),
    ("options", Options),
    ("progress", PROGRESS),
    ("progress_ctx", ptr),
    ("cancelled", CANCELLED),
    ("cancelled_ctx", ptr),
    ("constants", Constants),
)
ExecutableInfo = _struct(
    "rm_executable_info",
    ("struct_size", size_t),
    ("num_inputs", size_t),
    ("num_outputs", size_t),
    ("workspace_bytes", u64),
    ("device_bytes", u64),
    ("stats_json", Str),
)
ExecuteArgs = _struct(
    "rm_execute_args",
    ("struct_size", size_t),
    ("stream", ptr),
    ("inputs", ptr),
    ("num_inputs", size_t),
    ("outputs", ptr),
    ("num_outputs", size_t),
    ("workspace", ptr),
    ("states", ptr),
    ("num_states", size_t),
)


def _fn(*args: Any, result: Any = ptr) -> Any:
    return c.CFUNCTYPE(result, *args)


BackendApi = _struct(
    "rm_backend_api",
    ("struct_size", size_t),
    ("abi_version", u32),
    ("reserved", u32),
    ("name", Str),
    ("version", Str),
    ("build_id", Str),
    ("probe_score", _fn(result=c.c_int)),
    ("initialize", _fn(Options)),
    ("shutdown", _fn(result=None)),
    ("device_count", _fn(c.POINTER(size_t))),
    ("device_open", _fn(size_t, c.POINTER(ptr))),
    ("device_close", _fn(ptr, result=None)),
    ("device_info", _fn(ptr, ptr)),
    ("fingerprint", _fn(ptr, c.POINTER(Blob))),
    ("query_support", _fn(ptr, c.POINTER(Program), ptr, size_t)),
    ("compile", _fn(ptr, c.POINTER(Program), c.POINTER(CompileOptions), c.POINTER(ptr))),
    ("serialize", _fn(ptr, c.POINTER(Blob))),
    ("check_compat", _fn(ptr, Bytes, c.POINTER(c.c_int))),
    ("deserialize", _fn(ptr, Bytes, Constants, c.POINTER(ptr))),
    ("executable_info", _fn(ptr, ptr)),
    ("executable_destroy", _fn(ptr, result=None)),
    ("execute", _fn(ptr, c.POINTER(ExecuteArgs))),
    ("buffer_alloc", _fn(ptr, u32, size_t, size_t, c.POINTER(ptr))),
    ("buffer_free", _fn(ptr, result=None)),
    ("buffer_ptr", _fn(ptr, c.POINTER(ptr))),
    ("copy", _fn(ptr, c.POINTER(Tensor), c.POINTER(Tensor))),
    ("stream_create", _fn(ptr, u32, c.POINTER(ptr))),
    ("stream_wrap", _fn(ptr, ptr, c.POINTER(ptr))),
    ("stream_sync", _fn(ptr)),
    ("stream_destroy", _fn(ptr, result=None)),
    ("event_create", _fn(ptr, c.POINTER(ptr))),
    ("event_record", _fn(ptr, ptr)),
    ("event_wait", _fn(ptr, ptr)),
    ("event_query", _fn(ptr, c.POINTER(c.c_int))),
    ("event_sync", _fn(ptr)),
    ("event_destroy", _fn(ptr, result=None)),
    ("extension", _fn(Str)),
)

Attr = _struct(
    "rm_attr",
    ("struct_size", size_t),
    ("name", Str),
    ("kind", c.c_int),
    ("reserved", u32),
    ("i", i64),
    ("f", c.c_double),
    ("s", Str),
    ("ints", c.POINTER(i64)),
    ("floats", c.POINTER(c.c_double)),
    ("count", size_t),
)
Problem = _struct(
    "rm_problem",
    ("struct_size", size_t),
    ("op", Str),
    ("inputs", c.POINTER(c.POINTER(Tensor))),
    ("num_inputs", size_t),
    ("outputs", c.POINTER(c.POINTER(Tensor))),
    ("num_outputs", size_t),
    ("attrs", c.POINTER(Attr)),
    ("num_attrs", size_t),
    ("attr_stride", size_t),
    ("constant_inputs", u64),
)
Packing = _struct(
    "rm_packing",
    ("struct_size", size_t),
    ("bytes", u64),
    ("alignment", u32),
    ("reserved", u32),
    ("layout", Str),
)
Launch = _struct(
    "rm_launch",
    ("struct_size", size_t),
    ("state", ptr),
    ("inputs", c.POINTER(ptr)),
    ("outputs", c.POINTER(ptr)),
    ("workspace", ptr),
    ("stream", ptr),
)
Edge = _struct("rm_edge", ("axis", u32), ("reserved", u32), ("size", i64))
Kernel = _struct(
    "rm_kernel",
    ("struct_size", size_t),
    ("op", Str),
    ("name", Str),
    ("digest", Str),
    ("traits", u32),
    ("num_configs", u32),
    ("supports", _fn(c.POINTER(Problem), ptr, c.POINTER(Str), result=c.c_int)),
    ("cost_ns", _fn(c.POINTER(Problem), ptr, u32, result=c.c_double)),
    ("prepare", _fn(c.POINTER(Problem), ptr, u32, c.POINTER(ptr))),
    ("release", _fn(ptr, result=None)),
    ("workspace", _fn(ptr, result=u64)),
    ("packing", _fn(ptr, size_t, c.POINTER(Packing), result=None)),
    ("prepack", _fn(ptr, size_t, c.POINTER(Tensor), ptr)),
    ("launch", _fn(c.POINTER(Launch))),
    ("edges", c.POINTER(Edge)),
    ("num_edges", size_t),
)
Kernels = _struct(
    "rm_kernels", ("struct_size", size_t), ("rows", ptr), ("count", size_t), ("row_stride", size_t)
)

#: Every struct of the contract by its C name, for the layout test.
STRUCTS: dict[str, type[c.Structure]] = {
    "rm_blob": Blob,
    "rm_host_api": HostApi,
    "rm_device_info": DeviceInfo,
    "rm_node_support": NodeSupport,
    "rm_program": Program,
    "rm_constant": Constant,
    "rm_compile_options": CompileOptions,
    "rm_execute_args": ExecuteArgs,
    "rm_executable_info": ExecutableInfo,
    "rm_backend_api": BackendApi,
    "rm_attr": Attr,
    "rm_problem": Problem,
    "rm_packing": Packing,
    "rm_launch": Launch,
    "rm_edge": Edge,
    "rm_kernel": Kernel,
    "rm_kernels": Kernels,
}
