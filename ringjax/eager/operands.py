"""Converts arrays of any framework to host memory, and results back.

This module imports no framework, because an argument can belong only to a framework
that the program has imported. The adapters `ringjax.torch` and so on do not use this
module: they work in place on tensors of their own framework.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ringjax.eager import result_memory
from ringjax.eager.dtypes import NUMBERS
from ringjax.eager.lane import TensorRef, title

Array = np.ndarray[Any, Any]
AnyArray = Any
"""An array of numpy, JAX or PyTorch, a number, or an object with a buffer, DLPack or a
method `asnumpy`."""


class Operand(NamedTuple):
    """An array argument, converted to memory of this process.

    Attributes:
        array: the contiguous memory. If numpy lacks the dtype of the argument, `array`
            has another dtype of equal size.
        dtype: the native core's code of the argument's dtype.
        restore: converts a result of the type of `array` to the caller's type of array.
    """

    array: Array
    dtype: int
    restore: Callable[[Array], object]

    @property
    def ref(self) -> TensorRef:
        """The address, dtype code and shape, for `lane.submit`."""
        return self.array.ctypes.data, self.dtype, self.array.shape

    def new_array(self, shape: tuple[int, ...]) -> Array:
        """Allocates memory for a result of this shape."""
        return result_memory.empty(shape, self.array.dtype)

    def from_core_memory(self, memory: Any, rows: int) -> object:
        """Returns `rows` rows that the native core has stored, as the caller's type."""
        shape = (rows, *self.array.shape[1:])
        if not math.prod(shape):
            return self.restore(self.new_array(shape))
        return self.restore(np.frombuffer(memory, self.array.dtype).reshape(shape))


def to_operand(op: str, name: str | None, value: AnyArray) -> Operand:
    """Converts an array of any framework, or a number, to an `Operand`.

    Raises:
        TypeError: `value` is not an array, or the native core does not support its
            dtype.
        ValueError: `value` is sharded over several devices.
    """
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_torch(op, name, value, torch)
    if jax is not None and isinstance(value, jax.Array):
        return _from_jax(op, name, value, jax)
    if isinstance(value, np.generic):
        return _from_numpy(op, name, np.asarray(value), lambda out: out[()])
    if isinstance(value, bool | int | float | complex):
        return _from_numpy(op, name, np.asarray(value), lambda out: out.item())
    if isinstance(value, np.ndarray):
        return _from_numpy(op, name, value, lambda out: out)
    try:
        if hasattr(value, "__dlpack__"):
            array = np.from_dlpack(value)
        elif hasattr(value, "asnumpy"):
            array = _host_copy(value)
        else:
            array = np.asarray(memoryview(value))
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise TypeError(
            f"{title(op, name)}: a {type(value).__name__} is no array in the memory of "
            f"this host ({error})"
        ) from None
    return _from_numpy(op, name, array, lambda out: out)


def output_array(
    op: str,
    name: str | None,
    out: AnyArray,
    given: Operand,
    shape: tuple[int | None, ...],
) -> Array:
    """Checks an argument `out` and returns its memory as a numpy array.

    Args:
        given: the tensor argument of the operation.
        shape: the shape of the result, with None for each dimension that this rank does
            not know.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(out, torch.Tensor) and out.device.type == "cpu":
        plain = out.detach()
        array: Array = (
            plain.view(torch.int16) if out.dtype == torch.bfloat16 else plain
        ).numpy()
    elif isinstance(out, np.ndarray):
        array = out
    else:
        kind, advice = type(out).__name__, ""
        if hasattr(out, "asnumpy"):
            advice = f". Write the result into the {kind} instead: `array[:] = result`"
        raise TypeError(
            f"{title(op, name)}: out must be a numpy array, or a PyTorch tensor on the "
            f"CPU, got {kind}{advice}"
        )
    if array.dtype != given.array.dtype or not _matches(array.shape, shape):
        expected = ",".join("*" if n is None else str(n) for n in shape)
        raise ValueError(
            f"{title(op, name, [given.ref])}: out is {array.dtype.name}"
            f"[{','.join(map(str, array.shape))}], expected "
            f"{given.array.dtype.name}[{expected}]"
        )
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(
            f"{title(op, name)}: out must be contiguous and writeable, "
            f"got strides {array.strides} and writeable={array.flags.writeable}"
        )
    in_place = op in ("allreduce", "broadcast") and array.ctypes.data == given.ref[0]
    if not in_place and np.may_share_memory(array, given.array):
        raise ValueError(f"{title(op, name)}: out shares memory with the tensor")
    return array


def _host_copy(value: AnyArray) -> Array:
    """Copies an array of a framework from before DLPack, such as MXNet, to the host.

    `asnumpy` also makes sparse arrays dense, and waits for a GPU. Both may take far
    more memory or time than the caller expects, so the caller must ask for them.
    """
    device = getattr(value, "context", None)
    if not getattr(device, "device_type", "cpu").startswith("cpu"):
        raise TypeError(f"it is on {device}; copy it to the CPU first")
    layout = getattr(value, "stype", "default")
    if layout != "default":
        raise TypeError(f"its storage is {layout}; make it dense first")
    array = value.asnumpy()
    if not isinstance(array, np.ndarray):
        raise TypeError(f"asnumpy() returned a {type(array).__name__}")
    return array


def _matches(shape: tuple[int, ...], pattern: tuple[int | None, ...]) -> bool:
    return len(shape) == len(pattern) and all(
        expected in (None, n) for n, expected in zip(shape, pattern, strict=True)
    )


def _dtype_number(op: str, name: str | None, dtype: str) -> int:
    if dtype not in NUMBERS:
        raise TypeError(
            f"{title(op, name)}: dtype {dtype}, expected one of {', '.join(NUMBERS)}"
        )
    return NUMBERS[dtype]


def _from_numpy(
    op: str, name: str | None, array: Array, restore: Callable[[Array], object]
) -> Operand:
    number = _dtype_number(op, name, array.dtype.name)
    native = array.dtype.newbyteorder("=")
    # np.ascontiguousarray would turn a 0-d array into a 1-d array.
    return Operand(np.asarray(array, native, order="C"), number, restore)


def _from_jax(op: str, name: str | None, value: AnyArray, jax: ModuleType) -> Operand:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{title(op, name)} runs outside of jit only, this is inside")
    devices = value.devices()
    if len(devices) > 1:
        raise ValueError(
            f"{title(op, name)}: the array is sharded over {len(devices)} devices, "
            "expected an array on one device"
        )
    (device,) = devices
    # np.asarray waits until the array is computed. On CPUs the result shares the memory
    # of the immutable JAX array, which the native core only reads.
    return _from_numpy(
        op, name, np.asarray(value), lambda out: jax.device_put(out, device)
    )


def _from_torch(
    op: str, name: str | None, value: AnyArray, torch: ModuleType
) -> Operand:
    number = _dtype_number(op, name, str(value.dtype).removeprefix("torch."))
    device = value.device
    tensor = value.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if value.dtype != torch.bfloat16:
        return Operand(
            tensor.numpy(), number, lambda out: torch.from_numpy(out).to(device)
        )
    # numpy has no bfloat16, so pass the bits as int16.
    return Operand(
        tensor.view(torch.int16).numpy(),
        number,
        lambda out: torch.from_numpy(out).view(torch.bfloat16).to(device),
    )
