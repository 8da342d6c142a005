"""One process of the fault tests. Prints a line of JSON per key: its source, or "wrong" content.

    fault_worker.py NUMBERS [--compile-ms N] [--repeat N] [--forever] [--log FILE] [--large]

The content of a key follows from its number, so every reader can tell a wrong hit by itself. Each
compile appends a line to the log: what was compiled, and by whom.
"""

from __future__ import annotations

import argparse
import json
import os
import time

from rm_abstract import _core

LARGE_BYTES = 5 << 20  # above the size from which entries are mapped


def content(number: int, large: bool) -> bytes:
    size = LARGE_BYTES if large else 3000 + 977 * number
    piece = f"content of {number} ".encode()
    return (piece * (size // len(piece) + 1))[:size]


def key(number: int) -> _core.cache.Key:
    return _core.cache.KeyBuilder("program").set("program", f"program {number}").finish()


def is_right(entry: _core.cache.Entry, number: int, large: bool) -> bool:
    expected = {"program": content(number, large), "log": f"made {number}".encode()}
    return {name: bytes(entry.section(name)) for name in entry.sections} == expected


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("numbers", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--compile-ms", type=float, default=0)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--forever", action="store_true")
    parser.add_argument("--log")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--counters", action="store_true")
    options = parser.parse_args()

    def compiler(number: int):
        def compile() -> dict[str, bytes | str]:
            if options.log:
                with open(options.log, "a") as log:
                    log.write(f"{number} {os.getpid()}\n")
            time.sleep(options.compile_ms / 1e3)
            return {"program": content(number, options.large), "log": f"made {number}"}

        return compile

    rounds = 0
    while options.forever or rounds < options.repeat:
        rounds += 1
        cache = _core.cache.CompileCache()  # fresh: every round reads the disk
        for number in options.numbers:
            entry, source = cache.get_or_compile(key(number), compiler(number))
            result = source if is_right(entry, number, options.large) else "wrong"
            print(json.dumps([number, result]), flush=True)
    if options.counters:
        print(json.dumps(cache.counters()))


if __name__ == "__main__":
    main()
