"""The peer `limit`: what this machine allows, by limit.cc."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import compiled
from benchmarks.peers.adapter import COLLECTIVES, Array, Operation, Peer, Shapes

SOURCE = Path(__file__).resolve().parents[1] / "limit" / "limit.cc"
# Numbers of polls before a waiting rank yields its core to others: with more ranks than
# cores, and with enough cores.
SPINS_OVERSUBSCRIBED, SPINS = 100, 1000
# There are several variants, because the best size of a tile depends on the caches that
# cores share, and the best way to copy depends on the distance between cores.
_MEMCPY, _STREAMED, _VECTOR = range(3)  # limit_copy.h
# variant -> bytes of a tile, and how to copy
VARIANTS = {
    "in place, 512 KiB tiles": (512 << 10, _MEMCPY),
    "streamed out, 512 KiB tiles": (512 << 10, _STREAMED),
    "in place, 1 MiB tiles": (1 << 20, _MEMCPY),
    "vector copies, 512 KiB tiles": (512 << 10, _VECTOR),
}

# The variants of the other collectives: the tile, the copy, and the way to move data.
# Data that a rank reads from another rank is added up in pieces.
_IN_TILES, _READ, _READ_AND_WRITE = range(3)  # limit_collectives.h
MOVES = {
    "512 KiB tiles": (512 << 10, _MEMCPY, _IN_TILES),
    "512 KiB tiles, vector copies": (512 << 10, _VECTOR, _IN_TILES),
    "512 KiB tiles, streamed out": (512 << 10, _STREAMED, _IN_TILES),
    "read": (128 << 10, _MEMCPY, _READ),
    "read, streamed out": (128 << 10, _STREAMED, _READ),
    # Only a broadcast has this variant.
    "read and written": (0, _MEMCPY, _READ_AND_WRITE),
}
_MOVED = COLLECTIVES[1:]  # names, in the order of limit_collectives.h


class _Job(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("tensors", ctypes.c_size_t),
        ("tile", ctypes.c_size_t),
        ("scale", ctypes.c_float),
        ("bfloat16", ctypes.c_int),
        ("copying", ctypes.c_int),
    )


class _Move(ctypes.Structure):
    _fields_ = (
        ("given", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("piece", ctypes.c_size_t),
        ("which", ctypes.c_int),
        ("way", ctypes.c_int),
        ("copying", ctypes.c_int),
    )


def build(folder: Path = compiled.BUILD) -> Path:
    """Returns the shared object of limit.cc.

    Raises:
      CannotBuild: there is no compiler, or the compiler fails.
    """
    return compiled.build(SOURCE, "-lrt", folder=folder)


def load(library: Path) -> Any:
    native, number, size = ctypes.CDLL(str(library)), ctypes.c_int, ctypes.c_size_t
    pointer = ctypes.c_void_p
    native.limit_join.argtypes = (ctypes.c_char_p, number, number, number)
    native.limit_join.restype = pointer
    native.limit_allreduce.argtypes = (pointer, pointer, number)
    native.limit_move.argtypes = (pointer, pointer, number)
    native.limit_can_read.argtypes = (pointer,)
    native.limit_transfer.argtypes = (pointer, size, number, number)
    native.limit_leave.argtypes = (pointer,)
    native.limit_leave.restype = None
    return native


def _pointers(arrays: list[Any]) -> Any:
    return np.array([a.ctypes.data for a in arrays], np.uintp)


class Native:
    """A function of limit.cc that repeats an operation of this rank."""

    def __init__(self, function: Any, *words: Any) -> None:
        self._function, self._words = function, words

    def repeat(self, calls: int) -> None:
        if self._function(*self._words, calls):
            raise ConnectionError("another rank of the limit is missing")

    def __call__(self) -> None:
        self.repeat(1)


class Allreduce(Native):
    """An allreduce of the arrays `inputs`, into `outputs`, which may be the same."""

    def __init__(
        self,
        native: Any,
        rank: int,
        inputs: list[Any],
        variant: str,
        scale: float,
        *,
        in_place: bool = False,
    ) -> None:
        tile, copying = VARIANTS[variant]
        self.inputs = self.outputs = inputs
        if copying == _STREAMED and not in_place:
            self.outputs = [np.empty_like(a) for a in inputs]
            for array in self.outputs:
                array.fill(0)  # page faults must not count, so touch the memory first
        ends = np.cumsum([a.nbytes for a in inputs]).astype(np.uintp)
        self._kept = (_pointers(inputs), _pointers(self.outputs), ends)
        places = [array.ctypes.data for array in self._kept]
        half = inputs[0].dtype.itemsize == 2
        job = _Job(*places, len(inputs), tile, scale, half, copying)
        super().__init__(native.limit_allreduce, rank, ctypes.pointer(job))


class Move(Native):
    """Another collective, from one array into another; in place for a broadcast."""

    def __init__(
        self, native: Any, rank: int, variant: str, given: Array, out: Array, size: int
    ) -> None:
        name, _, how = variant.partition(": ")
        piece, copying, way = MOVES[how]
        whole = given.nbytes * (size if name == "allgather" else 1)
        places = given.ctypes.data, out.ctypes.data
        self._kept = given, out
        move = _Move(*places, whole, piece, _MOVED.index(name), way, copying)
        super().__init__(native.limit_move, rank, ctypes.pointer(move))


def variants(can_read: bool) -> tuple[str, ...]:
    """Returns the variants of all collectives: name, ":", key of VARIANTS or MOVES."""
    names = [f"allreduce: {how}" for how in VARIANTS]
    for name in _MOVED:
        for how, (_, copying, way) in MOVES.items():
            # The root of a broadcast copies nothing for itself, and only the root may
            # write.
            idle = name == "broadcast" and (way, copying) == (_READ, _STREAMED)
            other = name != "broadcast" and way == _READ_AND_WRITE
            if not (idle or other) and (can_read or way == _IN_TILES):
                names.append(f"{name}: {how}")
    return tuple(names)


class Limit(Peer):
    """The speed that the memory allows, without a library; ranks are bound to cores."""

    arrays = models = tuple(VARIANTS)
    streams = ("1 stream", "2 streams")
    collectives = variants(can_read=True)

    def __init__(self, rank: int, size: int, port: int) -> None:
        self.rank, self.size = rank, size
        self.version = f"limit.cc for {platform.machine()}"
        cores = sorted(os.sched_getaffinity(0))
        if size > 1:
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
        self._native = load(build())
        # The name differs from the name in other runs, because all ranks have one
        # parent.
        name = f"/ringjax-limit-{os.getppid()}-{port}".encode()
        spins = SPINS if size <= len(cores) else SPINS_OVERSUBSCRIBED
        self._self = self._native.limit_join(name, rank, size, spins)
        if not self._self:
            raise ConnectionError(f"the limit has no place for rank {rank} of {size}")
        if not self._native.limit_can_read(self._self):
            self.collectives = variants(can_read=False)
        first = next(iter(VARIANTS))
        one = [np.zeros(1, np.float32)]
        self._total = Allreduce(self._native, self._self, one, first, 1.0)
        self._arrays: tuple[Any, list[Any]] = (None, [])

    def total(self, value: float) -> float:
        self._total.inputs[0][0] = value
        self._total()
        return float(self._total.outputs[0][0])

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        """Makes the blocking function. Variants share their input."""
        if variant in self.streams:
            size = 4 * sum(int(np.prod(s)) for s in shapes)
            streams = 1 + self.streams.index(variant)
            return Native(self._native.limit_transfer, self._self, size, streams)
        held, arrays = self._arrays
        if held != (key := (list(shapes), dtype)):
            self._arrays = (None, [])  # clear first, so that memory is not held twice
            kind = np.float32 if dtype == "float32" else np.uint16
            arrays = [np.empty(s, kind) for s in shapes]
            # Unwritten pages are all one page of zeros, which would stay in the caches.
            for array in arrays:
                array.fill(0)
            self._arrays = (key, arrays)
        scale = 1.0 if len(shapes) == 1 else 1.0 / self.size
        return Allreduce(self._native, self._self, arrays, variant, scale)

    def collective(self, name: str, given: Array, out: Array) -> Operation:
        """Makes the blocking function. `name` selects the variant, too."""
        which, _, how = name.partition(": ")
        if which == "allreduce":
            return Allreduce(self._native, self._self, [out], how, 1.0, in_place=True)
        return Move(self._native, self._self, name, given, out, self.size)

    def close(self) -> None:
        self._native.limit_leave(self._self)
