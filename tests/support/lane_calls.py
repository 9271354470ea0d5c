"""Calls of the eager lane with numpy arrays as CUDA tensors, for tests on the stubs.

The stub of CUDA uses host memory as device memory, so the address of a numpy array is a
device pointer. JAX is not loaded, as in a program that uses PyTorch. This module does
not work on GPUs.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ringjax import _native, runtime
from support.device_calls import empty_like, inputs_of
from support.draws import dtype_of


def without_jax() -> None:
    """Makes `ringjax.init` believe that this process uses PyTorch and not JAX."""
    assert "jax" not in sys.modules
    sys.modules.setdefault("torch", ModuleType("torch"))


class Pending:
    """A submitted operation and the arrays for its results."""

    def __init__(self, ticket: Any, outs: Sequence[np.ndarray]) -> None:
        self.ticket, self.outs = ticket, list(outs)

    def wait(self, **options: Any) -> list[np.ndarray]:
        """Waits for the device and returns the results."""
        self.ticket.wait(**options)
        deadline = time.monotonic() + 20
        while not self.ticket.done:
            assert time.monotonic() < deadline, "the device does not end"
            time.sleep(1e-4)
        return self.outs


class PendingOutput(Pending):
    """A pending operation whose results are in memory that the core allocates."""

    def __init__(self, ticket: Any, like: Sequence[np.ndarray]) -> None:
        super().__init__(ticket, [])
        self._like = like

    def wait(self, **options: Any) -> list[np.ndarray]:
        """Waits for the device and returns copies of the results."""
        super().wait(**options)
        return [
            copy_of_output(self.ticket.output(i), like)
            for i, like in enumerate(self._like)
        ]


class LaneClient:
    """Submits this rank's operations to an eager lane, for tensors on the device."""

    def __init__(self, process_set: runtime.ProcessSet | None = None) -> None:
        chosen = runtime.global_process_set if process_set is None else process_set
        self.lane = runtime.lane(chosen)
        self.rank, self.size = self.lane.rank, self.lane.size

    def submit(
        self,
        op: str,
        name: str,
        ins: Sequence[np.ndarray],
        outs: Sequence[np.ndarray] | None = None,
        reduce: str = "Sum",
        **options: Any,
    ) -> Pending:
        """Submits an operation. Results go to new memory unless `outs` is given."""
        makes = op in ("allgather", "alltoall", "barrier")
        if outs is None:
            outs = [] if makes else empty_like(ins)
        ticket = self.lane.submit(
            _native.COLLECTIVES[op],
            name,
            inputs_of(ins),
            [out.ctypes.data for out in outs],
            reduce_op=_native.REDUCE_OPS[reduce],
            **{"cuda": True, "keep": (list(ins), list(outs)), **options},
        )
        return PendingOutput(ticket, ins) if makes else Pending(ticket, outs)

    def run(self, *args: Any, **options: Any) -> list[np.ndarray]:
        """Submits an operation and waits for its results."""
        return self.submit(*args, **options).wait()

    def stats(self, op: str) -> dict[str, Any]:
        """Returns counts of the operations enqueued so far; zeros before a call."""
        found = self.lane.cuda_stats().get(op, {})
        return {"calls": 0, "launches": 0, "nccl_ops": 0, "packed_bytes": 0, **found}


# -- DLPack ----------------------------------------------------------------------------

CUDA = 2  # kDLCUDA


class _Tensor(ctypes.Structure):  # DLTensor
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def copy_of_output(output: Any, like: np.ndarray) -> np.ndarray:
    """Imports an output by DLPack, as a framework does, and returns a copy of it.

    The rows of the output must have the shape and dtype of the rows of `like`.
    """
    device = output.__dlpack_device__()
    assert device[0] == CUDA, device
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = output.__dlpack__(stream=1)
    tensor = _Tensor.from_address(get(capsule, b"dltensor"))
    assert (tensor.device_type, tensor.device_id) == tuple(device)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    assert shape[1:] == like.shape[1:]
    assert tensor.bits == 8 * like.dtype.itemsize
    copy = np.empty(shape, like.dtype)
    if copy.size:
        ctypes.memmove(copy.ctypes.data, tensor.data, copy.nbytes)
    return copy


# -- resources of the stub's device ----------------------------------------------------


def live_resources() -> tuple[int, int, int]:
    """Returns the numbers of events, streams and allocations that the stub holds."""
    counts = [ctypes.c_size_t() for _ in range(3)]
    ctypes.CDLL("libcuda.so.1").stub_cuda_alive(*map(ctypes.byref, counts))
    events, streams, memory = (count.value for count in counts)
    return events, streams, memory


class OtherDeviceMemory:
    """Memory on another device of this process, full of ones."""

    def __init__(self, device: int, count: int, dtype: str = "float32") -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._device, before = device, ctypes.c_void_p()
        context, memory = ctypes.c_void_p(), ctypes.c_size_t()
        self._call("cuCtxGetCurrent", ctypes.byref(before))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        kind = dtype_of(dtype)
        size = ctypes.c_size_t(count * kind.itemsize)
        self._call("cuMemAlloc_v2", ctypes.byref(memory), size)
        self._call("cuCtxSetCurrent", before)
        text = (ctypes.c_char * size.value).from_address(memory.value)
        self.array = np.frombuffer(memoryview(text), kind)
        self.array[:] = 1

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._cuda, name)(*args)
        assert code == 0, f"{name}: {code}"
