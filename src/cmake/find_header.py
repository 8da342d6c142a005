"""Print the folder that `#include <NAME>` needs, from a package of this interpreter; else nothing.

    python find_header.py dlpack/dlpack.h

Only the packages' folders are looked up: nothing heavy is imported. torch ships DLPack's header as
ATen/dlpack.h; ask for that name to find torch's folder.
"""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

# Header -> packages that carry it, with the folder below the package.
PLACES = {
    "oneapi/dnnl/dnnl.h": [("torch", "include")],
    "dlpack/dlpack.h": [("tvm_ffi", "include")],
    "ATen/dlpack.h": [("torch", "include")],
    "nlohmann/json.hpp": [("nlohmann_json", "include")],
    "doctest/doctest.h": [("pgm_build_deps", "doctest/include")],
}


# Header -> distributions that are no packages: they put it into the environment's own folder.
DISTRIBUTIONS = {"oneapi/dnnl/dnnl.h": ["onednn-devel-cpu-gomp"]}


def folder_of(header: str) -> Path | None:
    for name in DISTRIBUTIONS.get(header, []):
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if str(file).endswith("/" + header) and Path(file.locate()).is_file():
                return Path(file.locate()).resolve().parents[header.count("/")]
    for package, below in PLACES[header]:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        folder = Path(spec.origin).parent / below
        if (folder / header).is_file():
            return folder
    return None


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PLACES:
        sys.exit(f"usage: python find_header.py {'|'.join(PLACES)}")
    found = folder_of(sys.argv[1])
    if found is not None:
        print(found)
