"""oneCCL over Intel MPI, by oneccl.cc."""

from __future__ import annotations

import ctypes
import functools
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import compiled
from benchmarks.peers.adapter import COLLECTIVES, Array, Operation, Shapes
from benchmarks.peers.mpi4py import Mpi4py


def build(prefix: Path) -> Path:
    """Returns the shared object of oneccl.cc, for oneCCL in an environment of Python.

    Raises:
      CannotBuild: there is no compiler, or it does not find oneCCL.
    """
    libraries = prefix / "lib"
    words = (f"-I{prefix}/include", f"-L{libraries}", f"-Wl,-rpath,{libraries}")
    return compiled.build(Path(__file__).with_suffix(".cc"), *words, "-l:libccl.so.1")


class OneCcl(Mpi4py):
    """oneCCL on existing numpy arrays. MPI only passes its address to all ranks."""

    arrays = ("allreduce in place",)
    models = ("allreduce in place, one by one",)

    def __init__(self, rank: int, size: int, port: int) -> None:
        super().__init__(rank, size, port)
        self.version = f"oneCCL {metadata.version('oneccl-cpu')} over {self.version}"
        self._native = ctypes.CDLL(str(build(Path(sys.prefix))))
        self._native.oneccl_address_bytes.restype = ctypes.c_size_t
        self._native.oneccl_run.restype = None
        address = ctypes.create_string_buffer(self._native.oneccl_address_bytes())
        if self.rank == 0:
            self._native.oneccl_listen(address)
        given = self._world.bcast(address.raw)
        self._native.oneccl_join(self.rank, self.size, given)

    def total(self, value: float) -> float:
        out = np.array([value], np.float32)
        self._run("allreduce", out, out)()
        return float(out[0])

    def _run(self, name: str, given: Array, out: Array) -> Operation:
        # These pointers keep their arrays alive.
        places = (a.ctypes.data_as(ctypes.c_void_p) for a in (given, out))
        count = ctypes.c_size_t(given.size)
        return functools.partial(
            self._native.oneccl_run, COLLECTIVES.index(name), *places, count
        )

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        arrays: list[Any] = [np.zeros(s, dtype) for s in shapes]
        steps = [self._run("allreduce", array, array) for array in arrays]
        if variant in self.arrays:
            return steps[0]

        def average() -> None:
            for step, array in zip(steps, arrays, strict=True):
                step()
                array /= self.size

        return average

    def collective(self, name: str, given: Array, out: Array) -> Operation:
        return self._run(name, given, out)

    def close(self) -> None:
        self._native.oneccl_leave()
        super().close()
