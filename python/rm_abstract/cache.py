"""The compile cache for users and engines: `rm_abstract.cache`.

Looks at the same directory the engines use (RM_CACHE_DIR, rm_abstract.toml or init's cache_dir).
Functions that only look never create the directory; only `warm` imports torch and transformers.
"""

from __future__ import annotations

import functools
import io
import json
import tarfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rm_abstract.base.errors import CacheError, from_core

if TYPE_CHECKING:
    from rm_abstract._core.cache import CompileCache

__all__ = [
    "clear",
    "entries",
    "explain",
    "export_bundle",
    "gc",
    "import_bundle",
    "open_cache",
    "path",
    "show",
    "stats",
    "verify",
    "warm",
]

_MAX_ENTRY_BYTES = 64 << 30  # a bundle member that claims more is not one of ours


def open_cache() -> CompileCache:
    """The session's cache; without a session one for what the environment says. Equal settings
    share one object, and so its memory and its compiles under way."""
    from rm_abstract import session

    active = session.current()
    if active is not None:
        return active.compile_cache()
    return _cache_of(tuple(sorted(_options().items())))


def path() -> str:
    """The cache directory, whether or not it exists yet."""
    return str(_reader().directory)


def stats() -> dict[str, Any]:
    """Entries and bytes by kind, the counters of all processes, hit rate and time saved."""
    from rm_abstract import session

    if session.current() is not None or _cache_of.cache_info().currsize:
        open_cache().flush_counters()  # what this process counted so far belongs to it too
    cache = _reader()
    rows = cache.entries()
    counters = dict(cache.total_counters())
    hits = sum(counters.get(name, 0) for name in ("hit_mem", "hit_disk", "hit_shared"))
    asked = hits + counters.get("miss", 0)
    kinds: dict[str, dict[str, int]] = {}
    for row in rows:
        kind = kinds.setdefault(row["kind"], {"entries": 0, "bytes": 0})
        kind["entries"] += 1
        kind["bytes"] += row["size"]
    return {
        "directory": cache.directory,
        "problem": cache.disk_problem,
        "entries": len(rows),
        "bytes": sum(row["size"] for row in rows),
        "kinds": kinds,
        "hit_rate": hits / asked if asked else None,
        "saved_ms": counters.get("saved_ms", 0),
        "compile_ms": counters.get("compile_ms", 0),
        "counters": counters,
    }


def entries() -> list[dict[str, Any]]:
    """Every entry, most recently used first."""
    return sorted(_reader().entries(), key=lambda row: row["used"], reverse=True)


def show(key: str) -> dict[str, Any]:
    """The entry whose name starts with `key` (at least four digits). Raises CacheError when there
    is none or more than one."""
    found = _matching(entries(), key)
    if len(found) > 1:
        names = ", ".join(row["name"][:16] for row in found[:8])
        raise CacheError(f"[cache] expected one entry, got {len(found)} ({names}); try more digits")
    return found[0]


def explain(
    key: str | None = None, other: str | None = None, *, last_miss: bool = False
) -> dict[str, Any]:
    """Which fields of two keys differ. With one key the closest entry of its kind is the other;
    with `last_miss` the key is the last one that was not found by any process."""
    rows = entries()
    if last_miss:
        asked = _last_miss()
    elif key is not None:
        asked = show(key)
    else:
        raise CacheError("[cache] expected a key or last_miss=True, got neither; try cache ls")
    against = show(other) if other is not None else _closest(asked, rows)
    result = {"key": asked["key"], "kind": asked["kind"], "fields": asked["fields"]}
    if against is None:
        return {**result, "other": None, "differing": [], "same": []}
    mine, theirs = asked["fields"], against["fields"]
    names = list(mine) + [name for name in theirs if name not in mine]
    differing = [name for name in names if mine.get(name) != theirs.get(name)]
    return {
        **result,
        "other": against["key"],
        "differing": differing,
        "same": [name for name in names if name not in differing],
    }


def verify(remove: bool = False) -> dict[str, Any]:
    """Reads every entry whole: {"sound": n, "bad": [(path, why)]}. With `remove` bad ones go to
    quarantine."""
    return dict((_writer() if remove else _reader()).verify(remove))


def gc(
    max_size: str | int | None = None, max_age: str | int | None = None, dry_run: bool = False
) -> dict[str, Any]:
    """Evicts the least recently used entries ("10G", "30d"; default: the configured limits)."""
    limits = _limits(max_size=max_size, max_age=max_age)
    return dict(_writer().collect(dry_run=dry_run, **limits))


def clear() -> int:
    """Removes every entry; processes that use one keep it. Returns how many were removed."""
    return int(_writer().clear())


def export_bundle(bundle: str | Path, keys: Iterable[str] = ()) -> int:
    """Writes entries (default: all) into a tar file of .rmc files. Returns how many."""
    rows = entries()
    chosen = [row for key in keys for row in _matching(rows, key)] if keys else rows
    unique = {row["name"]: row for row in chosen}
    with tarfile.open(bundle, "w") as archive:
        for name, row in sorted(unique.items()):
            try:
                data = Path(row["path"]).read_bytes()
            except FileNotFoundError:  # evicted since it was listed
                continue
            member = tarfile.TarInfo(f"{name}.rmc")
            member.size, member.mode = len(data), 0o400
            archive.addfile(member, io.BytesIO(data))
        return len(archive.getmembers())


def import_bundle(bundle: str | Path) -> dict[str, Any]:
    """Stores the entries of a bundle that are sound: {"imported", "known", "refused": [(name,
    why)]}. Entries hold compiled programs: import only what you would also run."""
    from rm_abstract import _core

    cache = _writer()
    if cache.disk_problem:
        raise CacheError(cache.disk_problem)
    imported = known = 0
    refused: list[tuple[str, str]] = []
    try:
        with tarfile.open(bundle, "r:") as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.isfile() else None
                if stream is None or member.size > _MAX_ENTRY_BYTES:
                    refused.append((member.name, "not an entry"))
                    continue
                try:
                    new = cache.import_entry(stream.read())
                except _core.CoreError as error:
                    refused.append((member.name, str(error)))
                    continue
                imported, known = imported + new, known + (not new)
    except (tarfile.TarError, OSError) as error:
        raise CacheError(f"[cache] expected a bundle, got '{bundle}': {error}") from None
    return {"imported": imported, "known": known, "refused": refused}


def warm(
    model_dir: str | Path,
    *,
    device: Any = None,
    batch_size: Sequence[int] = (1,),
    sequence_length: Sequence[int] = (16,),
    auto_class: str | None = None,
) -> dict[str, Any]:
    """Compiles a model folder ahead: what each call of these sizes was (`cache` says hit or miss),
    and the entries this made, by kind. Raises CacheError when nothing could be compiled."""
    from rm_abstract.ahead import compile_ahead

    started = time.perf_counter()
    before = {row["name"] for row in entries()}
    report = compile_ahead(
        model_dir,
        device=device,
        batch_size=batch_size,
        sequence_length=sequence_length,
        auto_class=auto_class,
    )
    compiled = [entry for model in report.models for entry in model["entries"]]
    if not compiled:
        raise CacheError(f"[cache] expected something to compile, got {report.why_not()}")
    shown = ("signature", "artefact", "cache", "parity", "capture_ms", "compile_ms", "shapes")
    return {
        "directory": path(),
        "device": report.device,
        "seconds": time.perf_counter() - started,
        "programs": [{name: entry[name] for name in shown} for entry in compiled],
        "new": dict(Counter(row["kind"] for row in entries() if row["name"] not in before)),
    }


def _options() -> dict[str, str]:
    """The cache's options as canonical texts: the session's, else what the environment says."""
    from rm_abstract import session
    from rm_abstract.base import config

    active = session.current()
    settings = active.settings if active is not None else config.resolve({})
    return {name: settings.text(name) for name in settings.values if name.startswith("cache_")}


@functools.lru_cache(maxsize=8)
def _cache_of(options: tuple[tuple[str, str], ...]) -> CompileCache:
    from rm_abstract import _core

    return _core.cache.CompileCache(dict(options))


def _open(mode: str) -> CompileCache:
    from rm_abstract import _core

    try:
        # Management looks at one directory: what the shared tier holds is its owner's business.
        return _core.cache.CompileCache(
            {**_options(), "cache_mode": mode, "cache_shared_dir": ""},
        )
    except _core.CoreError as error:
        raise from_core(error, CacheError) from None


def _reader() -> CompileCache:
    return _open("read")


def _writer() -> CompileCache:
    return _open("readwrite")


def _limits(**given: str | int | None) -> dict[str, int]:
    """Sizes and ages as numbers, understood as the options of these names are."""
    from rm_abstract import _core

    texts = {f"cache_{name}": str(value) for name, value in given.items() if value is not None}
    try:
        resolved: Mapping[str, tuple[str, str]] = _core.options.resolve(texts)
    except _core.CoreError as error:
        raise from_core(error, CacheError) from None
    return {name.removeprefix("cache_"): int(resolved[name][0]) for name in texts}


def _matching(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    found = [row for row in rows if row["name"].startswith(key.lower())]
    if len(key) < 4 or not found:
        raise CacheError(
            f"[cache] expected the first digits (four or more) of an entry's name, got {key!r}; "
            "try rm-abstract cache ls"
        )
    return found


def _last_miss() -> dict[str, Any]:
    text = _reader().last_miss()
    try:
        miss = json.loads(text)
        return {name: miss[name] for name in ("key", "kind", "fields")}
    except (ValueError, KeyError, TypeError):
        raise CacheError(
            "[cache] expected a recorded miss, got none; try a run that misses"
        ) from None


def _closest(asked: Mapping[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The entry of the same kind, but another key, that shares most fields; newest wins ties."""
    others = [r for r in rows if r["kind"] == asked["kind"] and r["key"] != asked["key"]]

    def shared(row: Mapping[str, Any]) -> int:
        fields: Mapping[str, str] = asked["fields"]
        counted = Counter(row["fields"].get(name) == digest for name, digest in fields.items())
        return counted[True]

    return max(others, key=shared, default=None)
