"""Extensions of this package and of others in one process."""

from __future__ import annotations

import subprocess
import sys

# The interpreter's dictionary holds pybind11's records, one for each kind of build.
RECORDS = """
import ctypes
import {first}
import {second}
api = ctypes.pythonapi
api.PyInterpreterState_Get.restype = ctypes.c_void_p
api.PyInterpreterState_GetDict.argtypes = [ctypes.c_void_p]
api.PyInterpreterState_GetDict.restype = ctypes.py_object
names = [str(n) for n in api.PyInterpreterState_GetDict(api.PyInterpreterState_Get())]
print(*(n for n in names if "pybind11_internals" in n))
"""


def records(first: str, second: str) -> list[str]:
    script = RECORDS.format(first=first, second=second)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()


def test_the_core_shares_no_record_of_types_with_torch() -> None:
    alone = records("torch", "sys")
    assert alone  # torch is an extension by pybind11 and keeps a record
    both = records("rm_abstract._core", "torch")
    own = set(both) - set(alone)
    # pybind11 3.1 keeps more than one entry for a record: all of ours bear our name.
    assert own and all("rm_abstract" in name for name in own), both
