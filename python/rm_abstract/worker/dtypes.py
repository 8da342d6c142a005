"""The IR's element types as torch's: one table for both sides of a worker. Needs torch only."""

from __future__ import annotations

import torch

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "u16": torch.uint16,
    "u32": torch.uint32,
    "u64": torch.uint64,
}
DTYPE_NAMES = {value: name for name, value in DTYPES.items()}
