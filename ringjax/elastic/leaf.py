"""Converts arrays of numpy, JAX and PyTorch to bytes and back, mostly without a copy.

This module is for arrays that are sent completely to another rank, such as parameters
and an optimizer's moments. The module imports no framework.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ringjax.control.objects import Array, dtype_name, dtype_of
from ringjax.elastic import values

NUMPY_KINDS = "biufcmMSU"  # the `dtype.kind` of numpy arrays that can be sent as bytes
_ALIGNMENT = 64  # JAX uses memory with this alignment without a copy


class Leaf(NamedTuple):
    """How a receiver stores the bytes of an array.

    Attributes:
        kind: "jax", "key" (of jax.random), "shards" (this process's shards of a JAX
            array that is sharded over several processes), "torch" or "numpy".
        dtype: the name of the data's dtype.
        shape: the shape of the data.
        detail: for "jax", whether the type is weak; for "key", the implementation of
            the key; for "shards", how the shards are placed on the devices.
    """

    kind: str
    dtype: str
    shape: list[int]
    detail: str | bool = ""

    def memory(self) -> Array:
        """Returns memory for the bytes, if possible memory from `preallocate`."""
        if self.kind == "torch":
            item_size: int = getattr(_torch(), self.dtype).itemsize
        else:
            item_size = dtype_of(self.dtype, NUMPY_KINDS).itemsize
        size = math.prod(self.shape) * item_size
        if reserved := _reserved.get(size):
            return reserved.pop()
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + size]

    def value(self, memory: Array, own: object) -> Any:
        """Returns an array that uses `memory`. Afterwards, do not change `memory`.

        If `own`, the value of this rank, is an array on a device, the new array is put
        on that device, too.
        """
        if self.kind == "torch":
            torch = _torch()
            flat = torch.from_numpy(memory).view(getattr(torch, self.dtype))
            tensor = flat.reshape(self.shape)
            return tensor.to(own.device) if isinstance(own, torch.Tensor) else tensor
        data = memory.view(dtype_of(self.dtype, NUMPY_KINDS)).reshape(self.shape)
        if self.kind == "numpy":
            return data
        part = values.jax_part()
        if part is None:
            raise ValueError(
                "rank 0 has an array of JAX in a place of the state where this program "
                "has not even imported JAX"
            )
        return part.array_of(data, self.kind, self.detail, own)


# Memory that `preallocate` has reserved, by size in bytes.
_reserved: dict[int, list[Array]] = {}


def preallocate(leaves: Iterable[Leaf]) -> None:
    """Reserves memory for arrays with these shapes and dtypes.

    A joining rank calls this function before it requests admission, because after the
    admission all other ranks wait for the joining rank, and the kernel needs more time
    to map new pages than the rank needs to fill them.
    """
    for memory in [leaf.memory() for leaf in leaves]:
        memory.fill(0)  # the kernel maps a page only when it is written
        _reserved.setdefault(len(memory), []).append(memory)


def release_reserved() -> None:
    """Frees the reserved memory that `Leaf.memory` has not returned."""
    _reserved.clear()


def read(value: Any) -> tuple[Leaf, Array] | None:
    """Returns an array's `Leaf` and its bytes, which the caller must not change.

    Returns None if `value` is no array, or if its bytes have a meaning only in this
    process. Raises ValueError if the memory of `value` was donated to a program.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _read_tensor(value, torch)
    if isinstance(value, np.ndarray):
        return _leaf("numpy", value) if dtype_name(value.dtype, NUMPY_KINDS) else None
    part = values.jax_part()
    if part is None or not part.is_array(value):
        return None
    if part.is_deleted(value):
        raise ValueError(
            "its memory was donated to a program (donate_argnums) after the last "
            "commit, and nothing else has the value; commit after every step, or do "
            "not donate what the state holds"
        )
    kind, detail = part.describe(value)
    return _leaf(kind, part.data_of(value), detail)


def _leaf(kind: str, data: Array, detail: str | bool = "") -> tuple[Leaf, Array]:
    leaf = Leaf(kind, dtype_name(data.dtype, NUMPY_KINDS), list(data.shape), detail)
    return leaf, np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def _torch() -> ModuleType:
    torch = sys.modules.get("torch")
    if torch is None:
        raise ValueError(
            "rank 0 has a tensor of PyTorch in a place of the state where this program "
            "has not even imported PyTorch"
        )
    return torch


def _read_tensor(tensor: Any, torch: ModuleType) -> tuple[Leaf, Array] | None:
    # A parameter, or a tensor of a subclass, has properties that its bytes do not hold.
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        return None
    if tensor.layout != torch.strided or tensor.is_quantized:
        return None
    on_cpu = tensor.cpu().contiguous().resolve_conj().resolve_neg()
    data = on_cpu.reshape(-1).view(torch.uint8).numpy()
    name = str(tensor.dtype).removeprefix("torch.")
    return Leaf("torch", name, list(tensor.shape)), data
