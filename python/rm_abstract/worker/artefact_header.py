"""What lies before a Python plugin's own bytes in the cache, so that no vendor writes it again.

    "RMPYART1" | u32 header bytes | JSON header | payload

The header has the plugin's name, the target, the fingerprint and the payload's digest: whether an
artefact fits is known from the header, whether it is whole from the digest.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass

from rm_abstract.plugin import Failure

MAGIC = b"RMPYART1"
BYTES, FILE, FOLDER = "bytes", "file", "folder"
_SIZE = struct.Struct("<I")
_MAX_HEADER = 1 << 20
_TEXTS = ("name", "target", "fingerprint", "digest", "form", "file_name")


@dataclass(frozen=True)
class Header:
    name: str
    target: str
    fingerprint: str
    digest: str
    form: str = BYTES
    file_name: str = ""  # of a payload that was a file
    payload_at: int = 0

    def fits(self, name: str, target: str, fingerprint: str) -> bool:
        return (self.name, self.target, self.fingerprint) == (name, target, fingerprint)


def wrap(payload: bytes, name: str, target: str, fingerprint: str) -> bytes:
    return encode(Header(name, target, fingerprint, hashlib.sha256(payload).hexdigest())) + payload


def encode(header: Header) -> bytes:
    """What stands before the payload."""
    fields = asdict(header)
    del fields["payload_at"]
    text = json.dumps(fields).encode()
    return MAGIC + _SIZE.pack(len(text)) + text


def read(artefact: memoryview | bytes) -> Header | None:
    """The header; None for what wrap() did not make."""
    start = len(MAGIC) + _SIZE.size
    if len(artefact) < start or bytes(artefact[: len(MAGIC)]) != MAGIC:
        return None
    (size,) = _SIZE.unpack(bytes(artefact[len(MAGIC) : start]))
    if size > min(_MAX_HEADER, len(artefact) - start):
        return None
    try:
        fields = json.loads(bytes(artefact[start : start + size]))
        texts = {key: fields[key] for key in _TEXTS}
    except (ValueError, KeyError, TypeError):
        return None
    if not all(isinstance(text, str) for text in texts.values()):
        return None
    if texts["form"] not in (BYTES, FILE, FOLDER) or "/" in texts["file_name"]:
        return None
    return Header(**texts, payload_at=start + size)


def unwrap(
    artefact: memoryview, name: str, target: str, fingerprint: str
) -> tuple[Header, memoryview]:
    """The header and the payload. Raises Failure RM602 for a damaged artefact, RM403 for
    another's."""
    header = read(artefact)
    if header is None:
        raise Failure(f"[{name}] expected an artefact, got damaged bytes", "RM602")
    if not header.fits(name, target, fingerprint):
        raise Failure(
            f"[{name}] expected an artefact for {target} by {fingerprint}, got one for "
            f"{header.target} by {header.fingerprint}; it is compiled again",
            "RM403",
        )
    payload = artefact[header.payload_at :]
    if hashlib.sha256(payload).hexdigest() != header.digest:
        raise Failure(f"[{name}] expected a whole artefact, got a damaged one", "RM602")
    return header, payload
