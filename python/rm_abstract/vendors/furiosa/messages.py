"""FuriosaAI's errors as ours: several of the compiler's name something else than what is wrong."""

from __future__ import annotations

import ctypes
import re
import shutil

from rm_abstract.plugin import Failure

RUNTIME = "librenegade.so"  # comes with the driver, not with furiosa-torch
CROSS_COMPILER = "aarch64-linux-gnu-gcc"
_NO_IMPORT = re.compile(r"Not importable for all cases, (\S+)")
_NO_LOWERING = re.compile(r"not an operator that is yet supported by the compiler")
_PRIMITIVE = re.compile(r"Primitive operators are not supported[^A-Z]*([A-Z]\w*)")


def of_compiling(text: str) -> Failure:
    """What the text of a compiler's UnsupportedOpError means: it wraps every kind of failure."""
    where = "[furiosa compile]"
    last = text.rpartition("compile error:")[2].strip()[:600]
    if "No such file or directory" in text and shutil.which(CROSS_COMPILER) is None:
        return missing_cross_compiler()
    found = _NO_IMPORT.search(text)
    if found:
        return Failure(
            f"{where} expected operators the compiler imports, got {found.group(1)}: {last}",
            "RM304",
        )
    if _NO_LOWERING.search(text):
        primitive = _PRIMITIVE.search(text)
        name = primitive.group(1) if primitive else "one it does not name"
        return Failure(
            f"{where} expected operators the compiler lowers, got {name}: {last}", "RM304"
        )
    if "count_valid_operators_if" in text:
        return Failure(
            f"{where} expected a program the compiler can schedule, got operators left: {last}",
            "RM304",
        )
    return Failure(f"{where} expected the program to compile, got: {last}", "RM301")


def missing_cross_compiler() -> Failure:
    return Failure(
        f"[furiosa compile] expected {CROSS_COMPILER} on PATH, which FuriosaAI's compiler starts, "
        "got none; try apt-get install gcc-aarch64-linux-gnu",
        "RM401",
    )


def of_moving(text: str) -> Failure:
    """A tensor that cannot be put on a device: torch calls everything out of memory."""
    said = text.strip().splitlines()[0][:200] if text.strip() else "nothing"
    try:
        ctypes.CDLL(RUNTIME)
    except OSError as error:
        return Failure(
            f"[furiosa] expected FuriosaAI's device runtime {RUNTIME}, got: {error}; try the "
            f"driver packages of the vendor's installation guide (it is called '{said}')",
            "RM401",
        )
    return Failure(f"[furiosa] expected memory on the device, got '{said}'", "RM305")
