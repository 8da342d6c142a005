"""Fuzzes what reads files: ONNX models, and program text with the passes behind it.

    python tests/fault/fuzz_readers.py --seconds 600 --seed 7

Seeds are the models of onnx's own operator tests. A mutant is one of them with fields of its
protobuf changed (sizes, types, names, attributes, edges), or bytes, or tokens of its program.
Child processes with bounded memory read them: anything but a program or an error with a code is a
finding (a crash, another exception, more than TOO_LONG_S, more than MEMORY), printed with the
file it is kept in. `cache_fuzz` (tests/cpp/cache) does the same for the files of the cache.
"""

from __future__ import annotations

import argparse
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

MEMORY = 6 << 30  # of addresses: torch's libraries alone take four
TOO_LONG_S = 20  # of processor time
NUMBERS = [0, 1, -1, 2, 3, 7, 64, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63)]
WORDS = [
    "",
    "x",
    "y",
    "\x00",
    "Add",
    "Loop",
    "If",
    "Scan",
    "Reshape",
    "SAME_UPPER",
    "nearest",
    "%0",
]


def seeds() -> list[bytes]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    files = sorted({case.model.SerializeToString() for case in cases})
    return [file for file in files if len(file) < 20_000]


def messages(message: Any) -> list[Any]:
    """The message and all that are inside it."""
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for inner in value if field.is_repeated else [value]:
            found += messages(inner)
    return found


def _value(draw: random.Random, field: Any) -> Any:
    kinds = {field.CPPTYPE_FLOAT: float, field.CPPTYPE_DOUBLE: float}
    if field.cpp_type == field.CPPTYPE_STRING:
        word = draw.choice(WORDS)
        return draw.randbytes(draw.randrange(40)) if field.type == field.TYPE_BYTES else word
    if field.cpp_type in kinds:
        return draw.choice([0.0, -1.0, 1e30, float("inf"), float("nan"), 0.5])
    number = draw.choice(NUMBERS)
    if field.cpp_type == field.CPPTYPE_ENUM:
        return draw.choice(list(field.enum_type.values_by_number))
    if field.cpp_type == field.CPPTYPE_INT32:
        return draw.choice([number % 24, 2**31 - 1, -(2**31)])
    return number % 2**63 if field.cpp_type == field.CPPTYPE_UINT64 else number


def change_message(draw: random.Random, message: Any) -> None:
    """Changes one field: its value, one of its values, their number, or whether it is there."""
    fields = [field for field, _ in message.ListFields()] or list(message.DESCRIPTOR.fields)
    field = draw.choice(fields if draw.random() < 0.9 else list(message.DESCRIPTOR.fields))
    if draw.random() < 0.15:
        message.ClearField(field.name)
        return
    held = getattr(message, field.name)
    if field.message_type is not None:
        if field.is_repeated and len(held):
            at = draw.randrange(len(held))
            if draw.random() < 0.5:
                del held[at]
            else:
                held.add().CopyFrom(held[at])
        return
    value = _value(draw, field)
    if not field.is_repeated:
        setattr(message, field.name, value)
    elif len(held) and draw.random() < 0.7:
        at = draw.randrange(len(held))
        held[at] = draw.choice([value, *held]) if draw.random() < 0.7 else value
    else:
        held.append(value)


def mutant(draw: random.Random, corpus: list[bytes]) -> bytes:
    import onnx

    whole = draw.choice(corpus)
    if draw.random() < 0.3:
        changed = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(changed))
            changed[at] = draw.randrange(256)
        return bytes(changed[: draw.randrange(len(changed))] if draw.random() < 0.2 else changed)
    model = onnx.ModelProto.FromString(whole)
    for _ in range(draw.randint(1, 3)):
        change_message(draw, draw.choice(messages(model)))
    return bytes(model.SerializeToString())


def text_mutant(draw: random.Random, text: str) -> str:
    tokens = re.split(r"(\W)", text)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(tokens))
        other = draw.choice(tokens)
        number = str(draw.choice(NUMBERS))
        tokens[at] = draw.choice([other, number, "", tokens[at] * 2])
    return "".join(tokens)


def read(file: bytes, draw: random.Random | None = None) -> str:
    """Reads a model, its program, and with `draw` a changed program; the first line of an error,
    or "". Raises what is no error of ours."""
    from rm_abstract import _core

    try:
        text = _core.onnx.import_model(file)["text"]
        _core.ir.run_passes(_core.ir.canonical(text))
        if draw is not None:
            _core.ir.run_passes(_core.ir.canonical(text_mutant(draw, text)))
    except _core.CoreError as error:
        return str(error).splitlines()[0]
    return ""


def child(seed: int, seconds: float, folder: Path) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    corpus, draw = seeds(), random.Random(seed)
    end, count, refused = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        again = draw.randrange(2**32)
        file = mutant(draw, corpus)
        (folder / "current.onnx").write_bytes(file)
        (folder / "current.seed").write_text(str(again))
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + TOO_LONG_S, -1))
        refused += bool(read(file, random.Random(again)))
        count += 1
        if count % 2000 == 0:
            print(f"{count} mutants read so far, {refused} refused", flush=True)
    print(f"{count} mutants read, {refused} refused", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        return child(given.seed, given.seconds, given.child)
    kept = Path(tempfile.mkdtemp(prefix="fuzz_readers_"))
    end, seed, findings = time.monotonic() + given.seconds, given.seed, 0
    while (left := end - time.monotonic()) > 1:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--seed", str(seed), "--seconds", str(left)]
            done = subprocess.run(
                [*command, "--child", folder], capture_output=True, text=True, errors="replace"
            )
            print(done.stdout, end="", flush=True)
            if done.returncode:
                findings += 1
                name = kept / f"{seed}.onnx"
                shutil.copy(Path(folder) / "current.onnx", name)
                shutil.copy(Path(folder) / "current.seed", name.with_suffix(".seed"))
                last = done.stderr.strip().splitlines()[-1:] or [""]
                print(f"exit {done.returncode}: {last[0][:300]} ({name})", flush=True)
        seed += 1
    print(f"{findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
