"""What an artefact of this backend is: the program's text and the compiler's bytes.

    u32 header bytes | JSON header | furiosa.torch.ir.Runnable.serialize()

The compiler's bytes hold no weights: they are leading inputs, in the order ``inputs`` names them
(a buffer of the program's module, or "" for the next input of a call).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rm_abstract.plugin import Failure

_SIZE = struct.Struct("<I")


@dataclass(frozen=True)
class Artefact:
    text: str
    inputs: Sequence[str]
    runnable: bytes

    def pack(self) -> bytes:
        header = json.dumps({"text": self.text, "inputs": list(self.inputs)}).encode()
        return _SIZE.pack(len(header)) + header + self.runnable


def unpack(data: bytes) -> Artefact:
    """Raises Failure RM602 for what pack() did not make."""
    try:
        (size,) = _SIZE.unpack_from(data)
        header = json.loads(data[_SIZE.size : _SIZE.size + size])
        text, inputs = header["text"], header["inputs"]
        if not isinstance(text, str) or not all(isinstance(name, str) for name in inputs):
            raise TypeError("texts")
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise Failure(f"[furiosa] expected an artefact, got {error!r}", "RM602") from None
    return Artefact(text, inputs, data[_SIZE.size + size :])
