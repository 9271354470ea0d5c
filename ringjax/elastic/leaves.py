"""Arrays of numpy, JAX and PyTorch as bytes and back, where they lie if possible.

For what goes to another rank whole: parameters, moments. Imports no framework.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ringjax.elastic import values

Array = np.ndarray[Any, Any]

_PLAIN = "biufcmMSU"  # kinds of numpy's dtypes whose names say everything
_ALIGNMENT = 64  # so aligned, JAX takes memory over without a copy


class Leaf(NamedTuple):
    """What a receiver must know of an array.

    Attributes:
        kind: "jax", "key" (of jax.random), "shards" (of a jax array that other
            processes have parts of, too), "torch", "numpy" or "scalar" (of numpy).
        dtype: of the data.
        shape: of the data.
        detail: depends on the kind.
    """

    kind: str
    dtype: str
    shape: list[int]
    detail: str | bool = ""

    def memory(self) -> Array:
        """Room for the data."""
        if self.kind == "torch":
            item = getattr(_torch(), self.dtype).itemsize
        else:
            item = _dtype(self.dtype).itemsize
        size = math.prod(self.shape) * item
        if reserved := _reserve.get(size):
            return reserved.pop()
        room = np.empty(size + _ALIGNMENT, np.uint8)
        start = -room.ctypes.data % _ALIGNMENT
        return room[start : start + size]

    def value(self, memory: Array, like: Any) -> Any:
        """The array whose bytes are in `memory`, which belongs to it from now on."""
        if self.kind == "torch":
            return self._tensor(memory, like)
        data = memory.view(_dtype(self.dtype)).reshape(self.shape)
        if self.kind == "numpy":
            return data
        if self.kind == "scalar":
            return data[()]
        part = values.jax_part()
        if part is None:
            raise ValueError(
                "rank 0 has an array of JAX in a place of the state where this program "
                "has not even imported JAX"
            )
        return part.array_of(data, self.kind, self.detail, like)

    def _tensor(self, memory: Array, like: Any) -> Any:
        torch = _torch()
        flat = torch.from_numpy(memory).view(getattr(torch, self.dtype))
        tensor = flat.reshape(self.shape)
        return tensor.to(like.device) if isinstance(like, torch.Tensor) else tensor


_reserve: dict[int, list[Array]] = {}  # by size


def make_room(leaves: Iterable[Leaf]) -> None:
    """Takes the memory for these now, which for new pages takes longer than to fill it.

    A rank that joins does so before it asks in, since then all others wait for it.
    """
    room = [leaf.memory() for leaf in leaves]
    for memory in room:
        memory.fill(0)  # or else the system would only promise it
        _reserve.setdefault(len(memory), []).append(memory)


def forget_room() -> None:
    """Gives back what was not needed."""
    _reserve.clear()


def read(value: Any) -> tuple[Leaf, Array] | None:
    """An array as a leaf and its bytes, which must only be read. None: it is no array.

    Raises:
        ValueError: its memory was donated to a program.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _read_tensor(value, torch)
    if isinstance(value, np.ndarray | np.generic):
        name = dtype_name(value.dtype)
        kind = "numpy" if isinstance(value, np.ndarray) else "scalar"
        data = np.asarray(value)
        return (Leaf(kind, name, list(data.shape)), _bytes(data)) if name else None
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
    data = part.data_of(value)
    name = dtype_name(data.dtype)
    return Leaf(kind, name, list(data.shape), detail), _bytes(data)


def _torch() -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        raise ValueError(
            "rank 0 has a tensor of PyTorch in a place of the state where this program "
            "has not even imported PyTorch"
        )
    return torch


def dtype_name(dtype: np.dtype[Any]) -> str:
    """How a dtype is written down; empty if its memory says nothing to others."""
    if dtype.kind in _PLAIN and dtype.isbuiltin != 2:  # 2: float8_e5m2 of ml_dtypes
        return dtype.str
    return "" if dtype.hasobject or dtype.fields else dtype.name


def _dtype(name: str) -> np.dtype[Any]:
    if name[:1] in "<>|=":
        dtype = np.dtype(name)
        if dtype.kind not in _PLAIN:
            raise ValueError(f"not an array of plain data: dtype {name!r}")
        return dtype
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


def _bytes(data: Array) -> Array:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def _read_tensor(tensor: Any, torch: Any) -> tuple[Leaf, Array] | None:
    # A parameter, or a tensor of a subclass, is more than its data.
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        return None
    if tensor.layout != torch.strided or tensor.is_quantized:
        return None
    here = tensor.cpu().contiguous().resolve_conj().resolve_neg()
    data = here.reshape(-1).view(torch.uint8).numpy()
    name = str(tensor.dtype).removeprefix("torch.")
    return Leaf("torch", name, list(tensor.shape)), data
