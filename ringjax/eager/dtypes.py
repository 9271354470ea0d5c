"""Element types: the names that numpy, JAX and PyTorch share, and the core's numbers.

The adapters of all frameworks use this module, so it imports no framework. Wire dtypes
are in `compression.py`.
"""

from __future__ import annotations

from ringjax import _native

_SHORT = {
    "bool": "bool",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "c64",
    "complex128": "c128",
}

NUMBERS = {name: _native.DTYPES[short] for name, short in _SHORT.items()}
"""The core's number of each element type that can be sent."""
