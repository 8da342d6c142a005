"""Rebellions' errors as ours. Public sources of the texts: docs.rbln.ai, error codes; optimum-rbln
and its pull requests; logs of users. Matched by parts, because versions word them differently."""

from __future__ import annotations

import re

from rm_abstract.plugin import Failure

_OPERATORS = re.compile(r"operators are not implemented: (\[[^\]]*\])")
_MEMORY = ("Lack of device memory", "ENOMEM", "out of memory")
_LOST = ("ENODEV", "is not available", "not a valid NPU", "No such device")
_OTHER_VERSION = ("VERSION", "does not match", "recompile")


def of_compiling(error: Exception) -> Failure:
    """What an exception of `rebel.compile_from_torch` means."""
    said = _first_lines(error)
    found = _OPERATORS.search(str(error))
    if found or isinstance(error, NotImplementedError):
        names = found.group(1) if found else said
        return Failure(
            f"[rbln compile] expected operators the vendor's compiler has, got {names}", "RM304"
        )
    if isinstance(error, MemoryError) or _says(error, _MEMORY):
        return Failure(f"[rbln compile] expected memory for the program, got: {said}", "RM305")
    return Failure(f"[rbln compile] expected the program to compile, got: {said}", "RM301")


def of_running(doing: str, error: Exception) -> Failure:
    """What an exception means that came while a program was loaded or ran."""
    said, where = _first_lines(error), f"[rbln {doing}]"
    if isinstance(error, MemoryError) or _says(error, _MEMORY):
        return Failure(f"{where} expected memory on the NPU, got: {said}", "RM305")
    if "RBLN_DEVICES" in said:
        return Failure(
            f"{where} expected RBLN_DEVICES as it was at the start, got: {said}", "RM407"
        )
    if _says(error, _LOST):
        return Failure(f"{where} expected the NPU, got: {said}; try rbln-smi", "RM407")
    if _says(error, ("LOADING_",)):
        return Failure(f"{where} expected a whole artefact, got: {said}", "RM602")
    if _says(error, _OTHER_VERSION):
        return Failure(f"{where} expected an artefact of this version, got: {said}", "RM403")
    return Failure(f"{where} expected the NPU to run the program, got: {said}", "RM307")


def no_npu(index: int, count: int) -> Failure:
    return Failure(
        f"[rbln load] expected NPU {index}, got {count} that the vendor's software sees; try "
        "rbln-smi, and RBLN_DEVICES",
        "RM407",
    )


def _says(error: Exception, parts: tuple[str, ...]) -> bool:
    return any(part in str(error) for part in parts)


def _first_lines(error: Exception) -> str:
    text = " ".join(str(error).split())[:600]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
