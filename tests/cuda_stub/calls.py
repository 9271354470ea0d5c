"""The stubs from Python, for scripts that tests run in processes of their own.

Names and arguments are those of CUDA and NCCL. `cuda.X` and `nccl.X` raise unless the
call succeeds; `cuda.code.X` and `nccl.code.X` return what it says.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

OK, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 0, 4, 5, 6, 7
SUM, PROD, MAX, MIN, AVG = range(5)
TYPES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64", "bfloat16",
)  # fmt: skip


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("blocking", "cga", "min", "max")),
        ("net", ctypes.c_char_p),
        ("split", ctypes.c_int),
    ]


class Library:
    """The functions of one library, by their names without the prefix."""

    def __init__(self, file: str, prefix: str, good: tuple[int, ...]) -> None:
        self._library = ctypes.CDLL(file)
        self._prefix = prefix
        self._good = good
        self.code = _Codes(self._call)

    def _call(self, name: str, *args: Any) -> int:
        whole = [ctypes.c_size_t(a) if isinstance(a, int) else a for a in args]
        result: int = getattr(self._library, self._prefix + name)(*whole)
        return result

    def __getattr__(self, name: str) -> Callable[..., int]:
        def checked(*args: Any) -> int:
            result = self._call(name, *args)
            if result not in self._good:
                raise RuntimeError(f"{self._prefix}{name}: {result}")
            return result

        return checked

    def text(self, name: str, *args: Any) -> str:
        function = getattr(self._library, self._prefix + name)
        function.restype = ctypes.c_char_p
        found: bytes = function(*args)
        return found.decode()


class _Codes:
    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args: self._call(name, *args)


cuda = Library("libcuda.so.1", "cu", (0,))
nccl = Library("libnccl.so.2", "nccl", (OK, IN_PROGRESS))


def handle(function: Callable[..., int], *args: Any) -> int:
    """Calls `function` and returns the handle that it writes to its first argument."""
    place = ctypes.c_size_t()
    function(ctypes.byref(place), *args)
    return place.value


def use_device(ordinal: int = 0) -> None:
    cuda.Init(0)
    cuda.CtxSetCurrent(handle(cuda.DevicePrimaryCtxRetain, ordinal))


def new_stream() -> int:
    return handle(cuda.StreamCreateWithPriority, 1, 0)


def new_event(flags: int = 2) -> int:
    return handle(cuda.EventCreate, flags)


def at(array: np.ndarray) -> int:
    """Returns the address of an array, which also is an address on the device."""
    return int(array.ctypes.data)


def unique_id(path: Path, rank: int) -> UniqueId:
    """Returns the id that rank 0 makes and the other ranks read from a file."""
    made = UniqueId()
    if rank == 0:
        nccl.GetUniqueId(ctypes.byref(made))
        path.with_suffix(".new").write_bytes(bytes(made))
        path.with_suffix(".new").rename(path)
    else:
        wait_until(path.exists)
        ctypes.memmove(ctypes.byref(made), path.read_bytes(), 128)
    return made


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.002)


class Comm:
    """An NCCL communicator of one rank, nonblocking by default."""

    def __init__(self, rank: int, size: int, made: UniqueId, blocking: int = 0) -> None:
        self.rank, self.size = rank, size
        unset = -(2**31)
        config = Config(
            ctypes.sizeof(Config), 0xCAFEBEEF, 21800, blocking, unset, unset, unset,
            None, unset,
        )  # fmt: skip
        place = ctypes.c_size_t()
        self.started = nccl.code.CommInitRankConfig(
            ctypes.byref(place), size, made, rank, ctypes.byref(config)
        )
        self.handle = place.value

    def state(self) -> int:
        place = ctypes.c_int()
        nccl.CommGetAsyncError(self.handle, ctypes.byref(place))
        return place.value

    def settle(self, seconds: float = 10) -> int:
        """Waits while the state is "in progress", and returns the next state."""
        wait_until(lambda: self.state() != IN_PROGRESS, seconds)
        return self.state()

    def run(self, function: str, *args: Any, stream: int = 0) -> None:
        """Enqueues one operation and waits until NCCL has launched it."""
        getattr(nccl, function)(*args, self.handle, stream)
        assert self.settle() == OK


def join(size: int | None = None, device: int = 0) -> Comm:
    """Makes the communicator of all processes that the test has started."""
    rank = int(os.environ["STUB_RANK"])
    use_device(device)
    made = unique_id(Path(os.environ["STUB_FOLDER"]) / "id", rank)
    return Comm(rank, size or int(os.environ["STUB_SIZE"]), made)
