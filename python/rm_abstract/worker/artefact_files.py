"""Artefacts that a vendor's compiler writes as a file or a folder: into memory the user's process
can map, and back into files beside the vendor's runtime. Read and written in pieces, never whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import time
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from rm_abstract.plugin import Failure
from rm_abstract.worker import artefact_header
from rm_abstract.worker.artefact_header import FILE, FOLDER, Header

_PIECE = 4 << 20
_ADD_SEALS, _FROZEN = 1033, 0x1 | 0x2 | 0x4 | 0x8  # F_ADD_SEALS: no more seals, sizes and writes
_UNKNOWN = "0" * hashlib.sha256().digest_size * 2


class _Sink(io.RawIOBase):
    """Writes to a descriptor, and digests what it writes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self.digest = descriptor, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        done = 0
        while done < len(view):
            done += os.write(self._descriptor, view[done:])
        return len(view)


def packed(source: Path, header: Callable[[str, str, str], Header]) -> int:
    """A descriptor of frozen memory: ``header(digest, form, file name)`` and what lies at the path.
    The vendor's file may go afterwards. Raises OSError."""
    _check(source)
    form = FOLDER if source.is_dir() else FILE
    name = source.name if form == FILE else ""
    descriptor = os.memfd_create("rm_artefact", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, artefact_header.encode(header(_UNKNOWN, form, name)))
        sink = _Sink(descriptor)
        if form == FOLDER:
            with tarfile.open(fileobj=sink, mode="w|", bufsize=_PIECE) as archive:
                for path in sorted(source.iterdir()):
                    archive.add(path, arcname=path.name)
        else:
            with source.open("rb") as file:
                shutil.copyfileobj(file, sink, _PIECE)
        digest = sink.digest.hexdigest()  # as long as the one it takes the place of
        os.pwrite(descriptor, artefact_header.encode(header(digest, form, name)), 0)
        fcntl.fcntl(descriptor, _ADD_SEALS, _FROZEN)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(source: Path) -> None:
    """Only what can be taken out again, in a folder of its own. Raises ValueError."""
    for path in [source, *source.rglob("*")] if source.is_dir() else [source]:
        if path.is_symlink() and path != source:
            target = os.readlink(path)
            inside = not os.path.isabs(target) and ".." not in Path(target).parts
            if inside:
                continue
            raise ValueError(f"[artefact] expected links inside the folder, got {path} -> {target}")
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"[artefact] expected files and folders, got {path}")


class _Source(io.RawIOBase):
    """Reads from memory, in pieces."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._data[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def unpacked(header: Header, payload: memoryview) -> Path:
    """The file or folder again, in a folder of this process that goes with it (or by `remove`).
    Raises Failure (RM602) for what is no archive of ours."""
    sweep()
    folder = _made()
    weakref.finalize(_kept, _removed, folder)
    if header.form == FILE:
        path = folder / (header.file_name or "artefact")
        with path.open("wb") as file:
            shutil.copyfileobj(_Source(payload), file, _PIECE)
        return path
    inside = folder / "artefact"
    inside.mkdir()
    try:
        with tarfile.open(fileobj=_Source(payload), mode="r|", bufsize=_PIECE) as archive:
            archive.extractall(inside, filter="data")
    except tarfile.TarError as error:
        raise Failure(f"[artefact] expected a folder, got {error}", "RM602") from error
    return inside


def remove(path: Path) -> None:
    """What `unpacked` gave, once nobody reads it."""
    _removed(path.parent)


# A process that is ended leaves its folders, of the artefact's size: who ended it removes them
# (pool.py), or else the next one. Beside each lies a file with the owner's number, which the owner
# holds locked: that says who lives, in any container.
_PREFIX, _LOCK = "rm-artefact-", ".lock"
_ENDS_WITHIN_S = 10.0  # a killed process that is inside the system's own removal of gigabytes
_held: dict[Path, int] = {}  # descriptors of the locked files, by their folders


def _made() -> Path:
    while True:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_LOCK)
        with contextlib.suppress(OSError):  # no locks there: it is swept early, or not at all
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # another process swept before it was locked
    os.write(descriptor, b"%d" % os.getpid())
    folder = Path(name.removesuffix(_LOCK))
    folder.mkdir(0o700)
    _held[folder] = descriptor
    return folder


def _removed(folder: Path) -> None:
    descriptor = _held.pop(folder, None)
    if descriptor is None:
        return
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(f"{folder}{_LOCK}")
    os.close(descriptor)


def sweep(ended: Collection[int] = ()) -> None:
    """Removes the folders of this user's processes that are gone, and waits a moment for those of
    ``ended``, which were killed just now."""
    until = time.monotonic() + _ENDS_WITHIN_S
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*{_LOCK}"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                continue
            owner = os.pread(descriptor, 20, 0)
            while not _locked(descriptor):
                if not (owner.isdigit() and int(owner) in ended and time.monotonic() < until):
                    break  # its owner lives
                time.sleep(0.01)
            else:
                shutil.rmtree(str(lock).removesuffix(_LOCK), ignore_errors=True)
                lock.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class _Kept:
    """Lives as long as the process: its end removes what is left."""


_kept = _Kept()
