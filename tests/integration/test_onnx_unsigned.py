"""Unsigned integers of 16, 32 and 64 bits in ONNX files, against numpy: large values, broadcasting,
empty tensors, casts from and to everything, bits read as another type."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

import rm_abstract as rm

onnx = pytest.importorskip("onnx")
from onnx import helper  # noqa: E402

UNSIGNED = [np.uint16, np.uint32, np.uint64]
OPSET = 26


def _run(op: str, *given: np.ndarray[Any, Any], **attributes: Any) -> Any:
    node = helper.make_node(op, [f"x{k}" for k in range(len(given))], ["y"], **attributes)
    return rm.onnx.run_node(node, list(given), opset_version=OPSET)[0]


def _draw(dtype: Any, shape: tuple[int, ...], rng: Any) -> np.ndarray[Any, Any]:
    """Small numbers, numbers around powers of two up to the largest, and any."""
    top = np.iinfo(dtype).bits
    bits = [int(rng.integers(0, top)) for _ in range(int(np.prod(shape)))]
    values = [
        [int(rng.integers(0, 9)), (1 << b) - 1, 1 << b, (1 << top) - 1 - int(rng.integers(0, 9))][
            int(rng.integers(0, 4))
        ]
        for b in bits
    ]
    return np.array(values, dtype=dtype).reshape(shape)


SHAPES = [
    ((3, 4), (3, 4)),
    ((2, 1, 5), (3, 1)),
    ((), (7,)),
    ((4,), ()),
    ((0, 3), (1, 3)),
    ((9,), (9,)),
]
BINARY = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.floor_divide,
    "Mod": np.mod,
    "Min": np.minimum,
    "Max": np.maximum,
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
}


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("dtype", UNSIGNED)
def test_two_unsigned_operands_give_what_numpy_gives(op: str, dtype: Any) -> None:
    rng = np.random.default_rng(random.getrandbits(32))
    for a, b in SHAPES:
        x, y = _draw(dtype, a, rng), _draw(dtype, b, rng)
        if op in ("Div", "Mod"):
            y = np.maximum(y, np.array(1, dtype))
        with np.errstate(over="ignore"):
            wanted = np.asarray(BINARY[op](x, y))
        got = _run(op, x, y)
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        np.testing.assert_array_equal(got, wanted, err_msg=f"{x} {y}")


@pytest.mark.parametrize("dtype", [np.uint8, *UNSIGNED])
@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
def test_shifts_of_unsigned_numbers_bring_zeros(dtype: Any, direction: str) -> None:
    rng = np.random.default_rng(random.getrandbits(32))
    bits = np.iinfo(dtype).bits
    x = _draw(dtype, (40,), rng)
    by = np.array([k % bits for k in range(40)], dtype)
    wanted = x << by if direction == "LEFT" else x >> by
    np.testing.assert_array_equal(_run("BitShift", x, by, direction=direction), wanted)
    past = np.full(40, bits, dtype)
    assert not _run("BitShift", x, past, direction=direction).any()


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_casts_from_and_to_unsigned_numbers_keep_every_bit_they_can(dtype: Any) -> None:
    rng = np.random.default_rng(random.getrandbits(32))
    x = _draw(dtype, (200,), rng)
    for to in (np.float32, np.float64, np.int64, np.int32, np.int16, np.uint8, *UNSIGNED, np.bool_):
        number = helper.np_dtype_to_tensor_dtype(np.dtype(to))
        got = _run("Cast", x, to=number)
        np.testing.assert_array_equal(got, x.astype(to), err_msg=str(to))
        if to in (np.float32, np.float64):  # of numbers that fit
            back = got[got < 2.0 ** np.iinfo(dtype).bits]
            unsigned = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
            np.testing.assert_array_equal(_run("Cast", back, to=unsigned), back.astype(dtype))


SAME_SIZE = [
    (np.uint16, np.int16),
    (np.float16, np.uint16),
    (np.uint32, np.float32),
    (np.float32, np.int32),
    (np.uint64, np.int64),
    (np.float64, np.uint64),
    (np.int8, np.uint8),
]


@pytest.mark.parametrize(("a", "b"), SAME_SIZE)
def test_bits_read_as_another_type_stay_what_they_are(a: Any, b: Any) -> None:
    rng = np.random.default_rng(random.getrandbits(32))
    for (source, target), shape in itertools.product([(a, b), (b, a)], [(3, 5), (), (0, 2)]):
        raw = rng.integers(0, 256, (*shape, np.dtype(source).itemsize), dtype=np.uint8)
        x = raw.view(source).reshape(shape) if shape else np.array(raw.view(source)[0])
        number = helper.np_dtype_to_tensor_dtype(np.dtype(target))
        got = _run("BitCast", x, to=number)
        assert got.dtype == target and got.shape == x.shape
        assert got.tobytes() == x.tobytes()


def test_a_type_of_another_size_is_refused_by_name() -> None:
    with pytest.raises(rm.CompileError, match="BitCast"):
        _run("BitCast", np.ones(3, np.float32), to=onnx.TensorProto.INT64)


def test_what_would_order_64_bits_wrongly_is_refused() -> None:
    """Operators that programs compute in i64: a typed error, never a wrong order."""
    x = np.array([1, 2**63 + 5, 3], np.uint64)
    for op, more in (("ReduceMax", []), ("TopK", [np.array([2])]), ("Clip", [x[:1].reshape(())])):
        with pytest.raises(rm.CompileError, match=r"u64|integer"):
            _run(op, x, *more)


def test_unsigned_numbers_pass_views_and_moves_of_a_file() -> None:
    rng = np.random.default_rng(random.getrandbits(32))
    for dtype in UNSIGNED:
        x = _draw(dtype, (4, 6), rng)
        np.testing.assert_array_equal(_run("Transpose", x), x.T)
        index = np.array([[3, 0], [1, 1]])
        np.testing.assert_array_equal(_run("Gather", x, index), x[index])
        np.testing.assert_array_equal(_run("Concat", x, x, axis=1), np.concatenate([x, x], 1))
        mask = rng.integers(0, 2, (4, 6)).astype(bool)
        np.testing.assert_array_equal(
            _run("Where", mask, x, x[::-1].copy()), np.where(mask, x, x[::-1])
        )


@pytest.mark.parametrize("shapes", [((3, 3), (3, 1)), ((2, 4, 5), (5, 7)), ((16,), (16, 2))])
def test_products_of_32_bits_are_those_of_whole_numbers(shapes: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = (_draw(np.uint32, shape, rng) for shape in shapes)
    got = _run("MatMul", a, b)
    assert got.dtype == np.uint32 and np.array_equal(got, a @ b)
