"""Memory of the session for users: `rm_abstract.memory`. Importing it imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from rm_abstract import session
from rm_abstract.base.errors import Error, ExecutionError
from rm_abstract.engines.base import Traceable

__all__ = ["empty_cache", "stats", "unload"]


def stats() -> dict[str, Any]:
    """What is held now, in bytes.

    ``process``: resident memory of this process. ``devices``: name -> {"total", "free"} of the host
    and, once torch uses CUDA, of every GPU. ``models``: one row a caught model, with ``weights``
    (its own tensors, which programs share), ``packed``, ``derived`` and ``scratch`` (of compiled
    programs) and ``processes`` (process id -> resident memory of what its engine runs elsewhere).
    Raises Error without a session.
    """
    rows = []
    for router in _routers(None):
        owner = None if router.name else router.module_ref()  # a part's are its model's
        row = {"model": router.label, "weights": _weights(owner)}
        row |= {"packed": 0, "derived": 0, "scratch": 0, "processes": {}}
        for program in _programs(router):
            report = program.report()
            row["packed"] += int(report.get("packed_bytes", 0))
            row["derived"] += int(report.get("derived_bytes", 0))
            row["scratch"] += int(report.get("free_arena_bytes", 0))
        engine = router.remote_engine
        if engine is not None:
            row["processes"] = {pid: _resident(pid) for pid in engine.pids()}
        rows.append(row)
    return {"process": _resident(os.getpid()), "devices": _devices(), "models": rows}


def empty_cache() -> int:
    """Gives up what is only kept to be faster next time: scratch memory of programs that do not run
    now, prefixes that vLLM remembers, free memory of torch's CUDA allocator. The bytes of scratch
    memory that were freed. Raises Error without a session."""
    freed = 0
    for router in _routers(None):
        for program in _programs(router):
            release = getattr(program, "release_arenas", None)
            freed += 0 if release is None else int(release())
        engine = router.remote_engine
        if engine is not None:
            try:
                engine.call("empty_cache")
            except ExecutionError:  # it has just ended: nothing is remembered
                continue
    cuda = _cuda()
    if cuda is not None:
        cuda.empty_cache()
    return freed


def unload(model: Any = None) -> None:
    """Drops the compiled programs of a model, or of all, and ends the processes of its engine.

    The model stays caught: its next call takes programs from the compile cache, and its next
    generation starts an engine again. Raises Error without a session, or for a model that was not
    caught.
    """
    for router in _routers(model):
        router.reset()


def _routers(model: Any) -> list[Any]:
    active = session.current()
    if active is None:
        raise Error("[memory] expected an initialised session, got none; try rm_abstract.init()")
    found = [one for one in active.routers() if model is None or one.module_ref() is model]
    if model is not None and not found:
        raise Error(
            f"[memory.unload] expected a model that was caught, got a {type(model).__name__}; try "
            "rm_abstract.explain(model)"
        )
    return found


def _programs(router: Any) -> Iterator[Any]:
    if isinstance(router.engine, Traceable):
        yield from (program for _, program in router.engine.programs())


def _weights(module: Any) -> int:
    """Tensors that share memory count once."""
    if module is None:
        return 0
    seen: dict[int, int] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def _resident(pid: int) -> int:
    """0 for a process that is gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _cuda() -> Any:
    """torch.cuda where this process uses it already; asking must not start a GPU."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _devices() -> dict[str, dict[str, int]]:
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES")
    found = {"cpu": {"total": total * page, "free": free * page}}
    cuda = _cuda()
    for index in range(0 if cuda is None else cuda.device_count()):
        free, total = cuda.mem_get_info(index)
        found[f"cuda:{index}"] = {"total": int(total), "free": int(free)}
    return found
