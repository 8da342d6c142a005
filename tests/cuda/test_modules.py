"""What holds of every operator module on any machine, with or without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

MODULES = (
    "ewise",
    "layernorm",
    "rmsnorm",
    "softmax",
    "cross_entropy",
    "gemv",
    "gemm",
    "sdpa",
    "copy",
    "rope",
    "kv_append",
    "embedding",
    "reduction",
    "optim",
    "sampling",
    "conv2d",
)
ALLOWED = re.compile(
    r"^(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|cudart|cublas|cublasLt)\.so\.\d+|ld-linux-.*)$"
)

CALLS = {
    "ewise": "m.forward_numpy([4, 0, 0, -1, -1], [], [x], dtype=x.dtype)",
    "layernorm": "m.forward_numpy(x)",
    "rmsnorm": "m.forward_numpy(x)",
    "softmax": "m.forward_numpy(x)",
    "gemv": "m.forward_numpy(x, x)",
    "copy": "m.forward_numpy(x)",
    "rope": "m.forward_numpy(x[None, None], x[None, None], x[None, None])",
    "kv_append": "m.forward_numpy(*[x[None, None]] * 4, numpy.zeros(1, 'int32'))",
    "embedding": "m.forward_numpy(x, numpy.zeros(2, 'int64'))",
    "optim": "m.step_numpy(x, x, kind='sgd', lr=0.1)",
    "reduction": "m.forward_numpy(x, 'sum', axes=[1])",
    "sdpa": "m.forward_numpy(x[None, None], x[None, None], x[None, None])",
    "sampling": "m.forward_numpy(x, temperature=0.0)",
    "conv2d": "m.forward_numpy(x[None, None], x[None, None])",
    "gemm": "m.forward_numpy(x, x, trans_b=True)",
    "cross_entropy": "m.forward_numpy(x, numpy.zeros(2, 'int64'))",
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_links_only_the_system_and_the_cuda_runtime(
    module: Callable[[str], ModuleType], name: str
) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    path = module(name).__file__
    assert path is not None
    text = subprocess.run(
        ["readelf", "-d", path], capture_output=True, text=True, check=True
    ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", text)
    assert needed
    assert [lib for lib in needed if not ALLOWED.match(lib)] == []


@pytest.mark.parametrize("name", MODULES)
def test_a_call_without_a_device_says_so(module: Callable[[str], ModuleType], name: str) -> None:
    path = module(name).__file__
    code = (
        "import importlib.util, numpy\n"
        f"spec = importlib.util.spec_from_file_location('_ops_{name}', {path!r})\n"
        "m = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(m)\n"
        "x = numpy.ones((2, 8), 'float32')\n"
        f"try:\n    {CALLS[name]}\n"
        "except m.NoDevice as error:\n    print('NoDevice', error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"},
    )
    assert result.stdout.startswith(f"NoDevice [{name}] expected a CUDA device, got cudaError")


@pytest.mark.parametrize("name", MODULES)
def test_a_table_names_its_kernels_and_ends_with_the_one_for_any_problem(
    module: Callable[[str], ModuleType], name: str
) -> None:
    m = module(name)
    tables = [m.kernels()] + ([m.backward_kernels()] if hasattr(m, "backward_kernels") else [])
    for table in tables:
        names = [kernel for kernel, _ in table]
        assert len(set(names)) == len(names)
        assert names[-1].endswith("_any")
        assert all(text for _, text in table)


@pytest.mark.parametrize("name", MODULES)
def test_every_function_is_described(module: Callable[[str], ModuleType], name: str) -> None:
    m = module(name)
    functions = [f for f in vars(m).values() if callable(f) and not isinstance(f, type)]
    assert len(functions) >= 3
    assert all(len(f.__doc__.splitlines()) >= 3 for f in functions)


def test_a_list_where_an_array_belongs_is_named(module: Callable[[str], ModuleType]) -> None:
    m = module("softmax")
    with pytest.raises(m.InvalidArgument, match=r"\[softmax\] expected a DLPack tensor for x"):
        m.forward([1.0], y=[1.0])


@pytest.mark.parametrize("name", ("softmax", "kv_append"))
def test_what_no_kernel_can_read_is_named(module: Callable[[str], ModuleType], name: str) -> None:
    m, torch = module(name), pytest.importorskip("torch")

    def call(x: object) -> None:
        if name == "softmax":
            m.forward(x, y=x)
        else:
            m.forward(x, x, x, x, x)

    for host in (np.ones((2, 8), "float32"), torch.ones(2, 8)):
        with pytest.raises(m.InvalidArgument, match=r"in CUDA memory, got the host's; try \.cuda"):
            call(host)
    with pytest.raises(m.InvalidArgument, match=r"as DLPack describes tensors, got .*meta"):
        call(torch.ones(2, 8, device="meta"))
    for other in (None, "x", 3):
        with pytest.raises(
            m.InvalidArgument, match=f"DLPack tensor for ., got {type(other).__name__}"
        ):
            call(other)


def test_arrays_that_no_module_takes_are_named(module: Callable[[str], ModuleType]) -> None:
    m = module("softmax")
    with pytest.raises(m.InvalidArgument, match="x of rank <= 8, got 9"):
        m.forward_numpy(np.zeros((1,) * 9, "float32"))
    for kind in ("complex64", "uint32", "U1", "O"):
        with pytest.raises(m.InvalidArgument, match=r"expected x of float32, .* got numpy's"):
            m.forward_numpy(np.zeros((2, 4), kind))


def test_a_program_that_reads_an_unknown_register_is_refused(
    module: Callable[[str], ModuleType],
) -> None:
    m = module("ewise")
    with pytest.raises(m.InvalidArgument, match="5 integers an instruction"):
        m.gradient([1, 2], [], 1, 0)
    with pytest.raises(m.InvalidArgument, match="operand's index"):
        m.gradient([4, 0, 0, -1, -1], [], 1, 3)
    assert np.array_equal(m.gradient([19, 0, 0, -1, -1], [], 1, 0)[0], [])
