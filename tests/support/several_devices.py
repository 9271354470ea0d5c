"""Uses several devices in one process, each with a thread and a CUDA context.

XLA does this in a program of JAX, but this module does not use JAX. A call finds its
device by the current context of the thread. Tests on the stubs use this module.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ringjax import _native, runtime
from support.device_calls import Device


class Devices:
    """This rank's devices of one process set."""

    def __init__(self, number: int = 0) -> None:
        self._number, self._cuda = number, ctypes.CDLL("libcuda.so.1")
        cores = runtime.current("test").devices.communicators[number]
        self.all = [Device(number, place) for place in range(len(cores))]
        self.numbers = [device.core.device for device in self.all]

    def here(self, number: int | None) -> int:
        """Returns the device that a call finds while a context is current.

        Args:
            number: the CUDA device whose primary context to make current; None: no
                context.
        """
        context = ctypes.c_void_p()
        if number is not None:
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self._call("cuCtxSetCurrent", context)
        try:
            return int(_native.device_here(self._number))
        finally:
            self._call("cuCtxSetCurrent", None)
            if number is not None:
                self._call("cuDevicePrimaryCtxRelease_v2", number)

    def run(
        self,
        body: Callable[[int, Device], Any],
        places: Sequence[int] | None = None,
    ) -> list[Any]:
        """Runs ``body(place, device)`` on a thread for each device, concurrently.

        Returns:
            The result or the exception for each of `places`, by default all devices.
        """
        chosen = list(range(len(self.all)) if places is None else places)
        out: dict[int, Any] = {}

        def one(place: int) -> None:
            try:
                assert self.here(self.numbers[place]) == self.numbers[place]
                out[place] = body(place, self.all[place])
            except Exception as error:
                out[place] = error

        threads = [threading.Thread(target=one, args=(place,)) for place in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [out[place] for place in chosen]

    def run_checked(
        self, body: Callable[[int, Device], Any], **options: Any
    ) -> list[Any]:
        """Calls `run`, and raises the first exception of a device."""
        out = self.run(body, **options)
        for one in out:
            if isinstance(one, Exception):
                raise one
        return out

    def confirm(self) -> None:
        """Waits until all devices have confirmed their calls, as a commit does."""
        runtime.confirm()

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._cuda, name)(*args)
        assert code == 0, f"{name}: {code}"
