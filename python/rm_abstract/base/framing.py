"""Messages through a pipe: eight bytes of length, then the bytes."""

from __future__ import annotations

import struct
from typing import IO

_LENGTH = struct.Struct("<Q")


def write_frame(stream: IO[bytes], data: bytes) -> None:
    """Raises OSError when the other side is gone."""
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next message; None at the end of the stream, also in the middle of a message."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None
