"""Arrays of any framework as memory, and results in the framework they came from.

Looks at frameworks that the program has imported already and imports none. Not for the
adapters, which know their own tensors better and work in place.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ringjax.eager.dtypes import NUMBERS
from ringjax.eager.lane import TensorRef, title

Array = np.ndarray[Any, Any]


class Operand(NamedTuple):
    """An argument as memory of this process, and the way back.

    Attributes:
        array: contiguous; where numpy lacks the dtype, another one of the same size.
        dtype: the core's number.
        restore: makes the caller's kind of an array like `array`.
    """

    array: Array
    dtype: int
    restore: Callable[[Array], Any]

    @property
    def ref(self) -> TensorRef:
        """What the lane wants to know."""
        return self.array.ctypes.data, self.dtype, self.array.shape

    def new_array(self, shape: tuple[int, ...]) -> Array:
        """New memory for a result."""
        return np.empty(shape, self.array.dtype)

    def from_core_memory(self, memory: Any, rows: int) -> Any:
        """The caller's kind of `rows` rows in memory of the core."""
        shape = (rows, *self.array.shape[1:])
        if not math.prod(shape):
            return self.restore(self.new_array(shape))
        return self.restore(np.frombuffer(memory, self.array.dtype).reshape(shape))


def to_operand(op: str, name: str | None, value: Any) -> Operand:
    """Any array on this side.

    Raises:
        TypeError: it is none, or its dtype is unknown to the core.
        ValueError: it is spread over several devices.
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
        else:
            array = np.asarray(memoryview(value))
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise TypeError(
            f"{title(op, name)}: a {type(value).__name__} is no array in the memory of "
            f"this host ({error})"
        ) from None
    return _from_numpy(op, name, array, lambda out: out)


def output_array(
    op: str, name: str | None, out: Any, given: Operand, shape: tuple[int | None, ...]
) -> Array:
    """The memory of `out`, where a result like `given` is to go.

    Args:
        shape: of the result; None: only the ranks together know.

    Raises:
        TypeError: it is no array of numpy, and no tensor of PyTorch on the CPU.
        ValueError: the result does not fit, or not in one piece, or `out` is read-only
            or shares memory with the argument.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(out, torch.Tensor) and out.device.type == "cpu":
        halves = out.dtype == torch.bfloat16
        array: Array = (
            out.detach().view(torch.int16) if halves else out.detach()
        ).numpy()
    elif isinstance(out, np.ndarray):
        array = out
    else:
        raise TypeError(
            f"{title(op, name)}: out must be a numpy array, or a PyTorch tensor on the "
            f"CPU, got {type(out).__name__}"
        )
    if array.dtype != given.array.dtype or not _fits(array.shape, shape):
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
    same = op in ("allreduce", "broadcast") and array.ctypes.data == given.ref[0]
    if not same and np.may_share_memory(array, given.array):
        raise ValueError(f"{title(op, name)}: out shares memory with the tensor")
    return array


def _fits(have: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(have) == len(wanted) and all(
        want in (None, n) for n, want in zip(have, wanted, strict=True)
    )


def _dtype_number(op: str, name: str | None, dtype: str) -> int:
    if dtype not in NUMBERS:
        raise TypeError(
            f"{title(op, name)}: dtype {dtype}, expected one of {', '.join(NUMBERS)}"
        )
    return NUMBERS[dtype]


def _from_numpy(
    op: str, name: str | None, array: Array, restore: Callable[[Array], Any]
) -> Operand:
    number = _dtype_number(op, name, array.dtype.name)
    native = array.dtype.newbyteorder("=")
    # Not ascontiguousarray, which makes 0-d arrays 1-d.
    return Operand(np.asarray(array, native, order="C"), number, restore)


def _from_jax(op: str, name: str | None, value: Any, jax: Any) -> Operand:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{title(op, name)} runs outside of jit only, this is inside")
    devices = value.devices()
    if len(devices) > 1:
        raise ValueError(
            f"{title(op, name)}: the array is sharded over {len(devices)} devices, "
            "expected an array on one device"
        )
    (device,) = devices
    # Waits until the array is ready; its memory is only read.
    return _from_numpy(
        op, name, np.asarray(value), lambda out: jax.device_put(out, device)
    )


def _from_torch(op: str, name: str | None, value: Any, torch: Any) -> Operand:
    number = _dtype_number(op, name, str(value.dtype).removeprefix("torch."))
    device = value.device
    tensor = value.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if value.dtype != torch.bfloat16:
        return Operand(
            tensor.numpy(), number, lambda out: torch.from_numpy(out).to(device)
        )
    # numpy has no bfloat16 of its own.
    return Operand(
        tensor.view(torch.int16).numpy(),
        number,
        lambda out: torch.from_numpy(out).view(torch.bfloat16).to(device),
    )
