"""Print the folder that holds dlpack/dlpack.h >= 1.3, without importing anything heavy.

torch ships the same header as ATen/dlpack.h; only apache-tvm-ffi has it under its canonical name.
"""

import importlib.util
from pathlib import Path

spec = importlib.util.find_spec("tvm_ffi")
if spec is not None and spec.origin is not None:
    folder = Path(spec.origin).parent / "include"
    if (folder / "dlpack" / "dlpack.h").is_file():
        print(folder)
