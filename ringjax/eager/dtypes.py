"""Maps the dtype names that numpy, JAX and PyTorch share to the native core's codes.

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
"""The native core's code of each dtype that can be sent, by name."""
