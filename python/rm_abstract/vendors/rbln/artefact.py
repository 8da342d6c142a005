"""What an artefact of this backend is: a `.rbln` file's bytes, and for how many NPUs.

u32 header bytes | JSON header | the file
"""

from __future__ import annotations

import json
import struct

from rm_abstract.plugin import Failure

_SIZE = struct.Struct("<I")


def pack(file: bytes, devices: int) -> bytes:
    header = json.dumps({"devices": devices}).encode()
    return _SIZE.pack(len(header)) + header + file


def unpack(data: bytes) -> tuple[bytes, int]:
    """(file, number of NPUs). Raises Failure RM602 for what pack() did not make."""
    try:
        (size,) = _SIZE.unpack_from(data)
        devices = int(json.loads(data[_SIZE.size : _SIZE.size + size])["devices"])
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise Failure(f"[rbln] expected an artefact, got {error!r}", "RM602") from None
    return data[_SIZE.size + size :], devices
