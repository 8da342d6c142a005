"""Two loss curves as a PNG, with the standard library only. Used by the training examples."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 640, 360, 20
COLOURS = ((200, 60, 40), (30, 90, 200))  # eager red and thick, compiled blue and thin


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


def save(path: Path, eager: Sequence[float], compiled: Sequence[float]) -> None:
    """Steps to the right, losses upwards from 0; where the curves agree the thin one is inside."""
    pixels = bytearray(b"\xff" * (WIDTH * HEIGHT * 3))
    highest = max((*eager, *compiled))

    def dot(x: int, y: int, colour: tuple[int, int, int], size: int) -> None:
        for dy in range(-size, size + 1):
            if 0 <= y + dy < HEIGHT and 0 <= x < WIDTH:
                at = ((y + dy) * WIDTH + x) * 3
                pixels[at : at + 3] = bytes(colour)

    for x in range(MARGIN, WIDTH - MARGIN):
        dot(x, HEIGHT - MARGIN, (0, 0, 0), 0)
    for y in range(MARGIN, HEIGHT - MARGIN):
        dot(MARGIN, y, (0, 0, 0), 0)
    for losses, colour, size in ((eager, COLOURS[0], 3), (compiled, COLOURS[1], 0)):
        before = None
        for x in range(MARGIN, WIDTH - MARGIN):
            step = (x - MARGIN) * (len(losses) - 1) // (WIDTH - 2 * MARGIN - 1)
            y = HEIGHT - MARGIN - round(losses[step] / highest * (HEIGHT - 2 * MARGIN))
            for level in range(min(y, before or y), max(y, before or y) + 1):
                dot(x, level, colour, size)
            before = y
    rows = b"".join(
        b"\0" + pixels[y * WIDTH * 3 : (y + 1) * WIDTH * 3] for y in range(HEIGHT)
    )  # filter 0 in front of each
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header)
    path.write_bytes(png + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b""))
