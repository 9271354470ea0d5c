"""Calls of the device communicator with numpy arrays, for tests on the stubs.

The stub of CUDA uses host memory as device memory, so the address of a numpy array is a
device pointer. This module does not use JAX, because JAX does not see the stub's
device. It does not work on GPUs.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ringjax
from ringjax import _native, runtime

INTEGERS = ("int8", "int32", "int64", "uint8", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
REDUCIBLE = ("bool", *INTEGERS, *FLOATS, *COMPLEX)  # the dtypes that NCCL reduces
DTYPES = (*REDUCIBLE, "int16", "uint16")
OPS = ("Sum", "Average", "Min", "Max", "Product")

_SHORT = {"bool": "bool", "bfloat16": "bf16", "complex64": "c64", "complex128": "c128"}
_LETTER = {"i": "i", "u": "u", "f": "f"}


def number_of(dtype: np.dtype[Any]) -> int:
    """Returns the number of an element type in the native core."""
    short = _SHORT.get(dtype.name) or f"{_LETTER[dtype.kind]}{8 * dtype.itemsize}"
    return int(_native.DTYPES[short])


def wire(name: str) -> int:
    return int(_native.DTYPES[name])


# When a test ends with an error, its operations may still run on the stub's streams.
# The newest arrays are kept, because their memory must not be freed before. XLA also
# keeps the buffers of running operations.
_kept_alive: deque[np.ndarray] = deque(maxlen=64)


def inputs_of(arrays: Sequence[np.ndarray]) -> list[tuple[int, int, tuple[int, ...]]]:
    _kept_alive.extend(arrays)
    return [(a.ctypes.data, number_of(a.dtype), a.shape) for a in arrays]


def outputs_of(arrays: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    _kept_alive.extend(arrays)
    return [(a.ctypes.data, a.nbytes) for a in arrays]


def open_at_init() -> None:
    """Makes every later `ringjax.init` open a device, if the stub has a device.

    Call this before any import of JAX, because JAX reports that there is no device.
    """
    assert "ringjax.xla.jax_private" not in sys.modules

    def take() -> None:
        world = runtime.current("test")
        seen = world.devices.counts[world.rank]
        seen = min(seen, world.config.devices_per_rank or seen)
        mine = world.device_share or range(seen)
        world.open_devices(() if world.cuda_absence else mine, world.cuda_absence)

    runtime.on_init(take)


class Device:
    """This rank's device communicator for one of its devices."""

    def __init__(self, number: int = 0, place: int = 0) -> None:
        world = runtime.current("test")
        problem = world.devices.problem(number)
        assert not problem, problem
        self.core = world.devices.communicators[number][place]
        self.rank, self.size = self.core.rank, self.core.size

    def enqueue(
        self,
        op: str,
        ins: Sequence[np.ndarray] = (),
        outs: Sequence[np.ndarray] | None = None,
        reduce: str = "Sum",
        **options: Any,
    ) -> None:
        """Enqueues a call, in place if `outs` is None."""
        self.core.execute(
            _native.COLLECTIVES[op],
            _native.REDUCE_OPS[reduce],
            inputs_of(ins),
            outputs_of(ins if outs is None else outs),
            **options,
        )

    def run(self, op: str, *args: Any, **options: Any) -> None:
        """Enqueues a call and waits for its results."""
        self.enqueue(op, *args, **options)
        self.core.synchronize()

    def start(
        self,
        ins: Sequence[np.ndarray],
        outs: Sequence[np.ndarray] | None = None,
        *,
        site: int = 0,
        first: bool = True,
        reduce: str = "Sum",
        **options: Any,
    ) -> None:
        self.core.start(
            inputs_of(ins),
            outputs_of(ins if outs is None else outs),
            site=site,
            first=first,
            reduce_op=_native.REDUCE_OPS[reduce],
            **options,
        )

    def done(
        self,
        ins: Sequence[np.ndarray] = (),
        outs: Sequence[np.ndarray] | None = None,
        *,
        site: int = 0,
        **options: Any,
    ) -> None:
        outs = ins if outs is None else outs
        self.core.done(inputs_of(ins), outputs_of(outs), site=site, **options)

    def stats(self, op: str) -> dict[str, Any]:
        """Returns counts of the operations enqueued so far; zeros before a call."""
        found: dict[str, Any] = self.core.stats().get(op, {})
        return {"calls": 0, "launches": 0, "nccl_ops": 0, "packed_bytes": 0, **found}


_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DefaultStream:
    """Enqueues work of other libraries, such as XLA, on stream 0 of a stub's device."""

    def __init__(self, device: int = 0) -> None:
        self._device = device
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
        self._context, self._others = ctypes.c_void_p(), list[int]()
        self._bodies: list[Any] = []  # keeps host functions that may run later
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def sleep(self, seconds: float) -> None:
        """Keeps the stream busy."""
        self._on("cuLaunchHostFunc", None, self._usleep, int(seconds * 1e6))

    def hold(self) -> Callable[[], None]:
        """Keeps the stream busy until the returned function is called."""
        gate = threading.Event()

        def wait(_: Any) -> None:
            gate.wait(30)

        body = _HOST_FUNCTION(wait)
        self._bodies.append(body)
        self._on("cuLaunchHostFunc", None, body, None)
        return gate.set

    def copy(self, source: np.ndarray, target: np.ndarray, on: int = 0) -> None:
        """Enqueues a copy. Both arrays must live until the copy has ended."""
        there, here = target.ctypes.data, source.ctypes.data
        self._on("cuMemcpyDtoDAsync_v2", there, here, source.nbytes, on)

    def finish(self, on: int = 0) -> None:
        """Waits until the stream is idle."""
        self._on("cuStreamSynchronize", on)

    def another(self) -> int:
        """Makes another stream of this device, for `on`. `close` destroys it."""
        made = ctypes.c_size_t()
        self._on("cuStreamCreateWithPriority", ctypes.byref(made), 1, 0)
        self._others.append(made.value)
        return made.value

    def close(self) -> None:
        for stream in self._others:
            self._call("cuStreamDestroy_v2", stream)
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _on(self, name: str, *args: Any) -> None:
        self._call("cuCtxSetCurrent", self._context)
        self._call(name, *args)
        self._call("cuCtxSetCurrent", None)

    def _call(self, name: str, *args: Any) -> None:
        wide = [ctypes.c_size_t(a) if isinstance(a, int) else a for a in args]
        code = getattr(self._cuda, name)(*wide)
        assert code == 0, f"{name}: {code}"


def reopen(**settings: str) -> Device:
    """Starts a new epoch of the job with other settings. All ranks must call this."""
    ringjax.shutdown()
    os.environ.update(settings)
    ringjax.init()
    return Device()


def reduced(op: str, xs: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the result of an allreduce of all ranks' arrays `xs`."""
    dtype = xs[0].dtype
    combine: Any = np.add
    if dtype.kind == "b":
        combine = np.logical_or if op in ("Sum", "Max") else np.logical_and
    elif op in ("Min", "Max", "Product"):
        combine = {"Min": np.minimum, "Max": np.maximum, "Product": np.multiply}[op]
    total = xs[0]
    for x in xs[1:]:
        total = combine(total, x).astype(dtype)
    if op != "Average":
        return total
    if dtype.kind in "iu":
        return np.trunc(total.astype("f8") / len(xs)).astype(dtype)
    wide = total.astype("c16" if dtype.kind == "c" else "f8") / len(xs)
    return np.asarray(wide).astype(dtype)


def empty_like(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Makes arrays for results, filled with a value that no result has."""
    return [np.full_like(a, 1 if a.dtype == bool else 77) for a in arrays]


def equal(got: np.ndarray, expected: np.ndarray, tolerance: float = 0.0) -> None:
    """Asserts equal dtypes and shapes, and values equal up to the tolerance."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if tolerance == 0.0 or got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, expected)
        return
    wide = "c16" if got.dtype.kind == "c" else "f8"
    np.testing.assert_allclose(
        got.astype(wide), expected.astype(wide), rtol=tolerance, atol=tolerance
    )


class NcclLog:
    """The log of this rank's calls to the NCCL stub."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    @classmethod
    def begin(cls, folder: str) -> NcclLog:
        """Starts this rank's log. Call this before the stub is loaded."""
        path = Path(folder) / f"nccl.{os.getpid()}"
        os.environ["NCCL_STUB_LOG"] = str(path)
        return cls(path)

    def take(self) -> list[dict[str, Any]]:
        """Returns the operations since the last call."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        new, self._read = lines[self._read :], len(lines)
        return [json.loads(line) for line in new]
