"""Node tests of the onnx package: of those ONNX Runtime passes, what we pass, refuse or miss."""

from __future__ import annotations

import collections
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import rm_abstract as rm


def same(got: list[Any], wanted: list[Any], case: Any) -> bool:
    return all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and np.allclose(a, b, max(case.rtol, 1e-3), max(case.atol, 1e-5), equal_nan=True)
        for a, b in zip(got, wanted, strict=True)
    )


def theirs(path: Path, case: Any) -> bool:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(path), options)
        names = [port.name for port in session.get_inputs()]
        return all(
            same(session.run(None, dict(zip(names, given, strict=True))), wanted, case)
            for given, wanted in case.data_sets
        )
    except Exception:  # whatever it raises: the case is not one that it passes
        return False


def ours(path: Path, case: Any) -> str:
    """ "passed", "refused: ..." or "wrong: ..."."""
    try:
        run = rm.compile(str(path), device="cpu")
    except rm.CompileError as error:
        return f"refused: {str(error).partition(' at ')[0].partition(' (')[0]}"
    try:
        for given, wanted in case.data_sets:
            got = [r if isinstance(r, np.ndarray) else r.numpy() for r in run(*given)]
            if not same(got, wanted, case):
                return f"wrong: {case.name}"
    except rm.Error as error:
        return f"wrong: {case.name}: {error}"
    return "passed"


def main() -> None:
    from onnx.backend.test.loader import load_model_tests

    warnings.filterwarnings("ignore")
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.onnx"
        for case in load_model_tests(kind="node"):
            if case.model is None:
                continue
            onnx.save(case.model, path)
            if theirs(path, case):
                counts["ONNX Runtime passes"] += 1
                said = ours(path, case)
                counts[said] += 1
                counts[f"{said.partition(':')[0]} in all"] += 1
    for said, number in counts.most_common():
        print(f"{number:5} {said}")


if __name__ == "__main__":
    main()
