"""The CUDA driver through ctypes: memory, events and copies, without any framework.

With this module bandwidth can be measured without torch and cupy, and with nothing else
on the device. The module has only functions that the benchmarks and tests/gpu need.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNMENT = 256  # bytes to which XLA's allocator aligns every buffer
# All other functions have only int arguments and results.
_U64, _SIZE, _PTR = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
_FUNCTIONS: dict[str, Sequence[Any]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDriverGetVersion": (_PTR,),
    "cuDeviceGetCount": (_PTR,),
    "cuDeviceGet": (_PTR, ctypes.c_int),
    "cuDeviceGetName": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_PTR, ctypes.c_int),
    "cuCtxSetCurrent": (_PTR,),
    "cuStreamCreateWithPriority": (_PTR, ctypes.c_uint, ctypes.c_int),
    "cuStreamSynchronize": (_PTR,),
    "cuEventCreate": (_PTR, ctypes.c_uint),
    "cuEventRecord": (_PTR, _PTR),
    "cuEventElapsedTime": (_PTR, _PTR, _PTR),
    "cuMemAlloc_v2": (_PTR, _SIZE),
    "cuMemFree_v2": (_U64,),
    "cuMemcpyDtoDAsync_v2": (_U64, _U64, _SIZE, _PTR),
    "cuMemcpyHtoDAsync_v2": (_U64, _PTR, _SIZE, _PTR),
    "cuMemcpyDtoHAsync_v2": (_PTR, _U64, _SIZE, _PTR),
    "cuMemsetD32Async": (_U64, ctypes.c_uint, _SIZE, _PTR),
}


class DriverError(RuntimeError):
    """A call of the driver failed, or there is no driver."""


def _library() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(str(error)) from None
    for name, types in _FUNCTIONS.items():
        function = getattr(library, name, None)
        if function is None:
            raise DriverError(f"libcuda.so.1 has no {name}")
        function.argtypes = list(types)
        function.restype = ctypes.c_int
    return library


def count_devices() -> tuple[int, str]:
    """Returns the number of devices, and the reason if there is no device."""
    try:
        library = _library()
    except DriverError as error:
        return 0, str(error)
    count = ctypes.c_int()
    for name, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGetCount", (ctypes.byref(count),)),
    ):
        if code := getattr(library, name)(*arguments):
            return 0, f"{name} returned {code}"
    return count.value, "" if count.value else "cuDeviceGetCount says 0"


class Device:
    """A device: its primary context, current on this thread, and one stream.

    Attributes:
      stream: a non-blocking stream, as an integer.
    """

    def __init__(self, number: int = 0) -> None:
        self._cuda = _library()
        self._call("cuInit", 0)
        device, context, stream = ctypes.c_int(), _PTR(), _PTR()
        self._call("cuDeviceGet", ctypes.byref(device), number)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
        self.number, self.stream = number, stream.value or 0
        self._blocks: set[int] = set()
        name = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", name, 128, device)
        self.name = name.value.decode()

    def free_bytes(self) -> int:
        """Returns the bytes of free memory, or 0 if the driver does not report them."""
        function = getattr(self._cuda, "cuMemGetInfo_v2", None)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        if function is None or function(ctypes.byref(free), ctypes.byref(total)):
            return 0
        return free.value

    def allocate(self, size: int) -> int:
        pointer = _U64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), max(size, ALIGNMENT))
        self._blocks.add(pointer.value)
        return pointer.value

    def release(self, pointer: int) -> None:
        self._blocks.discard(pointer)
        self._call("cuMemFree_v2", pointer)

    def release_all(self) -> None:
        self.synchronize()
        for pointer in list(self._blocks):
            self.release(pointer)

    def copy(self, target: int, source: int, size: int) -> None:
        """Copies within the device, on the stream."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, size, self.stream)

    def fill(self, target: int, word: int, size: int) -> None:
        """Fills memory with a 32-bit word, on the stream."""
        self._call("cuMemsetD32Async", target, word, size // 4, self.stream)

    def upload(self, target: int, values: np.ndarray[Any, Any]) -> None:
        """Copies an array to the device and waits."""
        values = np.ascontiguousarray(values)
        pointer = values.ctypes.data
        self._call("cuMemcpyHtoDAsync_v2", target, pointer, values.nbytes, self.stream)
        self.synchronize()

    def download(self, source: int, like: np.ndarray[Any, Any]) -> None:
        """Copies device memory into a contiguous array and waits."""
        assert like.flags.c_contiguous
        pointer = like.ctypes.data
        self._call("cuMemcpyDtoHAsync_v2", pointer, source, like.nbytes, self.stream)
        self.synchronize()

    def event(self) -> int:
        """Returns a new event with timing, as an integer."""
        event = _PTR()
        self._call("cuEventCreate", ctypes.byref(event), 0)
        return event.value or 0

    def record(self, event: int) -> None:
        self._call("cuEventRecord", event, self.stream)

    def seconds(self, start: int, end: int) -> float:
        milliseconds = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        return milliseconds.value / 1e3

    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", self.stream)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            raise DriverError(f"{name} returned {code}")
