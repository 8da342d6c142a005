"""Does a plugin keep the contract of include/rm/backend.h, and compute what torch computes?

``python -m rm_abstract.testing.conformance path/to/rm_backend_x.so [--json]``, or of a plugin in
Python, ``rm_backend_x.py``.

Every check is a function named as a sentence; it returns what it compared, or ``None``, when it
holds, or raises.  A
check that does not apply to the plugin (it has no device here, it offers no kernels) is *skipped*
with the reason, never counted as passed.  Exit status 0 means nothing failed.
"""

from __future__ import annotations

import argparse
import ctypes as c
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rm_abstract.testing import abi, host
from rm_abstract.worker import python_plugins

GUARD = 0xA5
DL_CPU = 1  # kDLCPU


@dataclass
class Outcome:
    check: str
    verdict: str  # passed, failed, skipped
    detail: str = ""


class Skip(Exception):
    """The check does not apply to this plugin."""


class Subject:
    """The plugin under test; `device` opens device 0 or skips the check."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plugin = host.Plugin(path)
        self.api, self.host = self.plugin.api, self.plugin.host
        self._device: int | None = None

    def device(self) -> int:
        if self._device is None:
            if self.api.probe_score() <= 0:
                raise Skip("its probe says it cannot run here")
            try:
                self.plugin.initialize()
            except host.PluginFailure as failure:
                raise Skip(f"it cannot be initialised here: {failure}") from None
            if self.plugin.device_count() == 0:
                raise Skip("it has no device here")
            self._device = self.plugin.open_device(0)
        return self._device

    def info(self) -> Any:
        return self.plugin.device_info(self.device())

    def whole_program(self, code: bytes = b"") -> int:
        """An executable of an empty program, or skips for a backend that only offers kernels."""
        device = self.device()
        keep = c.create_string_buffer(code, len(code) + 1)
        program = abi.Program(
            c.sizeof(abi.Program), abi.borrowed("rm.ir/1"), abi.Bytes(c.addressof(keep), len(code))
        )
        options = abi.CompileOptions(struct_size=c.sizeof(abi.CompileOptions))
        options.constants.stride = c.sizeof(abi.Constant)
        out = abi.ptr()
        if not self.api.compile:
            raise Skip("it offers no whole-program compilation")
        try:
            self.host.check(
                self.api.compile(device, c.byref(program), c.byref(options), c.byref(out))
            )
        except host.PluginFailure as failure:
            if failure.code in ("UNIMPLEMENTED", "INVALID_ARGUMENT"):
                raise Skip(f"it compiles no empty program: {failure}") from None
            raise
        return out.value or 0


def check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


# ---- the table --------------------------------------------------------------------------------


def it_refuses_a_host_of_another_major(s: Subject) -> None:
    for major in (0, abi.ABI_MAJOR + 1, 0xFFFF):
        try:
            table = s.plugin.query(major << 16)
        except host.PluginFailure:
            continue
        check(table.abi_version >> 16 == major, f"it accepted a host of major {major}")


def its_table_is_complete(s: Subject) -> None:
    api = s.api
    check(api.struct_size >= c.sizeof(abi.BackendApi), f"struct_size is {api.struct_size}")
    check(api.abi_version >> 16 == abi.ABI_MAJOR, f"ABI version {api.abi_version:#x}")
    check(api.name.text().isidentifier(), f"its name {api.name.text()!r} is not an identifier")
    check(bool(api.version.text()), "it has no version")
    for entry in "probe_score initialize device_count device_open device_info".split():
        check(bool(getattr(api, entry)), f"it has no {entry}")


def its_entries_come_in_pairs(s: Subject) -> None:
    pairs = [
        ("compile", "executable_destroy"),
        ("buffer_alloc", "buffer_free"),
        ("buffer_alloc", "buffer_ptr"),
        ("stream_create", "stream_destroy"),
        ("stream_create", "stream_sync"),
        ("event_create", "event_destroy"),
        ("serialize", "deserialize"),
    ]
    for first, second in pairs:
        check(
            not getattr(s.api, first) or bool(getattr(s.api, second)),
            f"it has {first} without {second}",
        )


def querying_twice_gives_the_same_table(s: Subject) -> None:
    again = s.plugin.query(abi.ABI_VERSION)
    check(c.addressof(again) == c.addressof(s.api), "the table moved")


def its_probe_is_stable(s: Subject) -> None:
    scores = {s.api.probe_score() for _ in range(3)}
    check(len(scores) == 1 and min(scores) >= 0, f"probe scores {sorted(scores)}")


def an_unknown_extension_is_null(s: Subject) -> None:
    if not s.api.extension:
        raise Skip("it has no extension entry")
    check(not s.api.extension(abi.borrowed("rm.no-such-extension/1")), "it answered")
    check(not s.api.extension(abi.borrowed("rm.kernels/1x")), "it matched a prefix")


# ---- devices ----------------------------------------------------------------------------------


def a_device_beyond_the_last_is_refused(s: Subject) -> None:
    s.device()
    count = s.plugin.device_count()
    try:
        s.plugin.open_device(count)
    except host.PluginFailure:
        return
    raise AssertionError(f"it opened device {count} of {count}")


def device_info_stays_inside_the_callers_struct(s: Subject) -> None:
    device = s.device()
    full = c.sizeof(abi.DeviceInfo)
    for room in (full, abi.DeviceInfo.alignment.offset, abi.DeviceInfo.caps.offset):
        memory = (c.c_ubyte * (full + 256))(*([GUARD] * (full + 256)))
        c.c_size_t.from_buffer(memory).value = room
        s.host.check(s.api.device_info(device, c.addressof(memory)))
        check(all(b == GUARD for b in memory[room:]), f"it wrote past {room} bytes")
        check(c.c_size_t.from_buffer(memory).value <= room, "it claims more than it was given")


def device_info_is_sensible(s: Subject) -> None:
    info = s.info()
    check(bool(info.name.text()), "the device has no name")
    check(info.dl_device_type > 0, "no DLPack device type")
    check(
        info.alignment > 0 and info.alignment & (info.alignment - 1) == 0,
        f"alignment {info.alignment} is no power of two",
    )


def its_fingerprint_does_not_change(s: Subject) -> None:
    if not s.api.fingerprint:
        raise Skip("it has no fingerprint entry")
    prints = []
    for _ in range(2):
        blob = abi.Blob()
        s.host.check(s.api.fingerprint(s.device(), c.byref(blob)))
        prints.append(c.string_at(blob.data, blob.size))
        if blob.release:
            blob.release(c.byref(blob))
    check(prints[0] == prints[1] and prints[0] != b"", f"fingerprints {prints}")


def destroying_null_is_nothing(s: Subject) -> None:
    s.device()
    for entry in "executable_destroy buffer_free stream_destroy event_destroy".split():
        destroy = getattr(s.api, entry)
        if destroy:
            destroy(None)


# ---- memory, streams, events ------------------------------------------------------------------


def buffers_are_aligned_and_separate(s: Subject) -> None:
    if not s.api.buffer_alloc:
        raise Skip("it allocates no buffers")
    device, seen = s.device(), []
    for size, align in [(0, 64), (1, 64), (4096, 256), (1 << 20, 4096)]:
        buffer, address = abi.ptr(), abi.ptr()
        s.host.check(s.api.buffer_alloc(device, 0, size, align, c.byref(buffer)))
        s.host.check(s.api.buffer_ptr(buffer, c.byref(address)))
        check((address.value or 0) % align == 0, f"{address.value:#x} is not aligned to {align}")
        seen.append((address.value or 0, size, buffer))
    ranges = sorted((start, start + size) for start, size, _ in seen if size)
    for (_, end), (start, _) in pairwise(ranges):
        check(end <= start, "two buffers overlap")
    for _, _, buffer in seen:
        s.api.buffer_free(buffer)


def an_alignment_that_is_no_power_of_two_is_refused(s: Subject) -> None:
    if not s.api.buffer_alloc:
        raise Skip("it allocates no buffers")
    buffer = abi.ptr()
    status = s.api.buffer_alloc(s.device(), 0, 64, 3, c.byref(buffer))
    try:
        s.host.check(status)
    except host.PluginFailure:
        return
    s.api.buffer_free(buffer)
    raise AssertionError("it gave memory aligned to 3")


def an_event_recorded_on_a_stream_completes(s: Subject) -> None:
    if not (s.api.stream_create and s.api.event_create):
        raise Skip("it has no streams or events")
    device, stream, event, ready = s.device(), abi.ptr(), abi.ptr(), c.c_int(0)
    s.host.check(s.api.stream_create(device, 0, c.byref(stream)))
    s.host.check(s.api.event_create(device, c.byref(event)))
    s.host.check(s.api.event_record(event, stream))
    s.host.check(s.api.event_wait(event, stream))
    s.host.check(s.api.event_sync(event))
    s.host.check(s.api.event_query(event, c.byref(ready)))
    s.host.check(s.api.stream_sync(stream))
    s.api.event_destroy(event)
    s.api.stream_destroy(stream)
    check(ready.value != 0, "the event is not ready after event_sync")


# ---- programs ---------------------------------------------------------------------------------


def an_artefact_survives_serialising(s: Subject) -> None:
    executable = s.whole_program(b"")
    try:
        if not s.info().caps & abi.CAP_SERIALIZE:
            raise Skip("it does not claim RM_CAP_SERIALIZE")
        blob, compat, again = abi.Blob(), c.c_int(-1), abi.ptr()
        s.host.check(s.api.serialize(executable, c.byref(blob)))
        bytes_ = abi.Bytes(blob.data, blob.size)
        s.host.check(s.api.check_compat(s.device(), bytes_, c.byref(compat)))
        check(compat.value in (1, 2), f"its own artefact is judged {compat.value}")
        constants = abi.Constants(None, 0, c.sizeof(abi.Constant))
        s.host.check(s.api.deserialize(s.device(), bytes_, constants, c.byref(again)))
        if blob.release:
            blob.release(c.byref(blob))
        s.api.executable_destroy(again)
    finally:
        s.api.executable_destroy(executable)


def a_cancelled_compilation_stops(s: Subject) -> None:
    s.api.executable_destroy(s.whole_program(b""))
    program = abi.Program(c.sizeof(abi.Program), abi.borrowed("rm.ir/1"), abi.Bytes(None, 0))
    options = abi.CompileOptions(struct_size=c.sizeof(abi.CompileOptions))
    options.cancelled = abi.CANCELLED(lambda _: 1)
    out = abi.ptr()
    status = s.api.compile(s.device(), c.byref(program), c.byref(options), c.byref(out))
    try:
        s.host.check(status)
    except host.PluginFailure as failure:
        check(failure.code == "CANCELLED", f"it failed with {failure}")
        return
    s.api.executable_destroy(out)
    raise AssertionError("it compiled although it was cancelled")


# ---- kernels ----------------------------------------------------------------------------------


def rows_of(s: Subject) -> list[Any]:
    rows = list(s.plugin.rows())
    if not rows:
        raise Skip("it offers no kernel rows")
    return rows


def kernel_rows_are_complete(s: Subject) -> None:
    for row in rows_of(s):
        name = row.name.text()
        check(row.struct_size >= c.sizeof(abi.Kernel), f"{name}: struct_size {row.struct_size}")
        check(bool(row.op.text()) and bool(name), "a row without operator or name")
        check(bool(row.digest.text()), f"{name}: no digest, so it cannot be in a cache key")
        check(row.num_configs >= 1, f"{name}: num_configs {row.num_configs}")
        for entry in ("supports", "cost_ns", "prepare", "release", "launch"):
            check(bool(getattr(row, entry)), f"{name}: no {entry}")
        check(bool(row.packing) == bool(row.prepack), f"{name}: packing and prepack go together")


def kernel_names_are_unique(s: Subject) -> None:
    names = [f"{row.op.text()}:{row.name.text()}" for row in rows_of(s)]
    repeated = sorted({name for name in names if names.count(name) > 1})
    check(not repeated, f"more than one of {repeated}")


def every_operator_ends_with_a_fallback(s: Subject) -> None:
    rows = rows_of(s)
    if s.info().dl_device_type != DL_CPU:
        raise Skip("a device with memory of its own may leave problems to PyTorch")
    last: dict[str, Any] = {}
    for row in rows:
        last[row.op.text()] = row
    for op, row in last.items():
        check(bool(row.traits & abi.KERNEL_FALLBACK), f"{op} ends with {row.name.text()}")


def releasing_a_null_state_is_nothing(s: Subject) -> None:
    for row in rows_of(s):
        row.release(None)


def a_problem_that_makes_no_sense_is_no_crash(s: Subject) -> None:
    """supports() and prepare() see no operands and no attributes: they may refuse, not crash."""
    info = s.info()
    for row in rows_of(s):
        problem = host.make_problem(row.op.text(), [], [], {})
        why, state = abi.Str(), abi.ptr()
        if row.supports(c.byref(problem), c.addressof(info), c.byref(why)):
            status = row.prepare(c.byref(problem), c.addressof(info), 0, c.byref(state))
            try:
                s.host.check(status)
            except host.PluginFailure:
                continue
            row.release(state)
        else:
            check(bool(why.text()), f"{row.name.text()} refuses without a reason")


# ---- results ----------------------------------------------------------------------------------


def executed(path: Path, kernels: list[str]) -> str:
    """Runs rm_abstract.testing.execution on the plugin: a crash is its failure, not the suite's.
    What was compared and what was not. Raises AssertionError for a wrong result and Skip when
    nothing could be run."""
    if importlib.util.find_spec("torch") is None:
        raise Skip("torch, the reference, is not installed")
    command = [sys.executable, "-m", "rm_abstract.testing.execution", str(path), *kernels]
    env = {**os.environ, "RM_BACKEND_PATH": str(path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode != 0:
        raise AssertionError(f"exit status {done.returncode}: {done.stderr.strip()[-1500:]}")
    rows = json.loads(done.stdout.splitlines()[-1])
    failed = [f"{r['program']}: {r['detail']}" for r in rows if r["verdict"] == "failed"]
    check(not failed, "; ".join(failed))
    passed = [row for row in rows if row["verdict"] == "passed"]
    left = "; ".join(f"{row['program']}: {row['detail']}" for row in rows if row not in passed)
    if not passed:
        raise Skip(left[:1000])
    return f"{len(passed)} of {len(rows)}" + (f"; not {left[:1000]}" if left else "")


def programs_compute_what_torch_computes(s: Subject) -> str:
    s.device()
    if not s.api.compile or any(True for _ in s.plugin.rows()):
        raise Skip("it is not a backend that compiles whole programs")
    return executed(s.path, [])


def states_stay_where_they_are(s: Subject) -> str:
    s.device()
    return executed(s.path, ["--states"])


def its_generation_gives_the_tokens_of_the_model(s: Subject) -> str:
    s.device()
    return executed(s.path, ["--generation"])


def kernels_compute_what_torch_computes(s: Subject) -> str:
    s.device()
    rows = [f"{row.op.text()}:{row.name.text()}" for row in rows_of(s)]
    if s.info().dl_device_type != DL_CPU:
        raise Skip("its kernels take memory of their device; tests of its own compare them")
    return executed(s.path, rows)


def no_status_is_left_over(s: Subject) -> None:
    """Last: every status the plugin made was handed to the host."""
    s.device()
    check(s.host.live == 0, f"{s.host.live} statuses were created and never returned")


CHECKS: list[Callable[[Subject], str | None]] = [
    it_refuses_a_host_of_another_major,
    querying_twice_gives_the_same_table,
    its_table_is_complete,
    its_entries_come_in_pairs,
    its_probe_is_stable,
    an_unknown_extension_is_null,
    a_device_beyond_the_last_is_refused,
    device_info_stays_inside_the_callers_struct,
    device_info_is_sensible,
    its_fingerprint_does_not_change,
    destroying_null_is_nothing,
    buffers_are_aligned_and_separate,
    an_alignment_that_is_no_power_of_two_is_refused,
    an_event_recorded_on_a_stream_completes,
    an_artefact_survives_serialising,
    a_cancelled_compilation_stops,
    kernel_rows_are_complete,
    kernel_names_are_unique,
    every_operator_ends_with_a_fallback,
    releasing_a_null_state_is_nothing,
    a_problem_that_makes_no_sense_is_no_crash,
    programs_compute_what_torch_computes,
    states_stay_where_they_are,
    its_generation_gives_the_tokens_of_the_model,
    kernels_compute_what_torch_computes,
    no_status_is_left_over,
]


def run(path: Path) -> Iterator[Outcome]:
    """Every check on the plugin, in order."""
    if path.suffix == ".py":
        yield from run_python(path.resolve())
        return
    try:
        subject = Subject(path.resolve())
    except (OSError, AttributeError, host.PluginFailure) as error:
        yield Outcome("it loads", "failed", str(error))
        return
    for function in CHECKS:
        name = function.__name__.replace("_", " ")
        try:
            detail = function(subject) or ""
        except Skip as reason:
            yield Outcome(name, "skipped", str(reason))
        except (AssertionError, host.PluginFailure) as error:
            yield Outcome(name, "failed", str(error))
        else:
            yield Outcome(name, "passed", detail)


def run_python(path: Path) -> Iterator[Outcome]:
    """A plugin in Python has no table to check: the package wrote it."""
    try:
        found = python_plugins.read(path)
        devices = list(found.plugin.devices())
    except Exception as error:  # somebody else's code
        yield Outcome("it loads", "failed", repr(error))
        return
    yield Outcome("it loads", "passed")
    for check_of, asked in (
        (programs_compute_what_torch_computes, []),
        (states_stay_where_they_are, ["--states"]),
        (its_generation_gives_the_tokens_of_the_model, ["--generation"]),
    ):
        name = check_of.__name__.replace("_", " ")
        if not devices:
            yield Outcome(name, "skipped", "it has no device here")
            continue
        try:
            detail = executed(path, asked)
        except Skip as reason:
            yield Outcome(name, "skipped", str(reason))
        except AssertionError as error:
            yield Outcome(name, "failed", str(error))
        else:
            yield Outcome(name, "passed", detail)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rm_abstract.testing.conformance", description=__doc__
    )
    parser.add_argument("plugin", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON array instead of lines")
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this first: a bridge needs its framework in the process",
    )
    options = parser.parse_args(argv)
    for module in options.modules:
        importlib.import_module(module)
    outcomes = list(run(options.plugin))
    if options.json:
        print(json.dumps([vars(o) for o in outcomes], indent=2))
    else:
        for o in outcomes:
            print(f"{o.verdict:8}{o.check}" + (f": {o.detail}" if o.detail else ""))
    return 1 if any(o.verdict == "failed" for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
