"""Operations of graphs that are under way: submitted by one node, finished by another.

Tensors are addresses of TF_Tensor here. How graphs wait is in signals.py, which nodes
they have in kernels.py.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringjax.eager import lane
from ringjax.errors import RingjaxError
from ringjax.tensorflow import c_api
from ringjax.tensorflow.calls import Call
from ringjax.tensorflow.signals import Signal
from ringjax.world import timeouts


class Held:
    """Tensors that live until the last reference to this is gone."""

    def __init__(self, tensors: Sequence[int]) -> None:
        self.tensors = list(tensors)

    def __del__(
        self, delete: Callable[[Sequence[int]], None] = c_api.tensors.delete
    ) -> None:
        delete(self.tensors)


class PendingOperation:
    """A submitted operation, until its graph takes the results.

    Args:
        call: what it is.
        name: what it is called on all ranks.
        tensors: the arguments, for alltoall the splits behind them; taken over.
        signal: what its graph waits with; None: it sets `then`.

    Attributes:
        signal: as given.
        ended: when, as far as it was seen.
        then: called when it has ended.

    Raises: as `lane.submit`.
    """

    def __init__(
        self, call: Call, name: str, tensors: Sequence[int], signal: Signal | None
    ) -> None:
        self.signal = signal
        self.ended = math.inf
        self.then: Callable[[], None] | None = None
        self._call, self._name = call, name
        self._ticket: Any = None
        self._error: RingjaxError | None = None
        given = Held(tensors)
        self._set = process_set = call.members()
        details = call.details(process_set)
        if call.op == "alltoall":
            *tensors, splits = tensors
            details["splits"] = _integers(splits)
        described = c_api.tensors.describe(tensors)
        self._types = [dtype for _, dtype, _ in described]
        self._pieces = [_piece(call, name, *each) for each in described]
        self._outs = Held([])
        if call.op in ("allreduce", "broadcast"):
            self._outs.tensors = c_api.tensors.allocate_like(tensors)
        elif call.op == "reducescatter":
            for piece, dtype in zip(self._pieces, self._types, strict=True):
                shape = lane.scattered_shape(call.op, name, piece, process_set)
                self._outs.tensors.append(c_api.allocate(dtype, shape))
        made = c_api.tensors.describe(self._outs.tensors)
        addresses = [address for address, _, _ in made]
        arguments = (call.op, name, self._pieces, addresses, _itself, process_set)
        keep = (given, self._outs)
        if call.timeout == timeouts.JOBS:
            self._handle = lane.submit(*arguments, keep, **details)
        else:
            with timeouts.collective_timeout(call.timeout):
                self._handle = lane.submit(*arguments, keep, **details)

    def tell(self) -> None:
        """Tells the graph that it has ended."""
        self.ended = time.monotonic()
        if self.signal is not None:
            self.signal.send()
        then, self.then = self.then, None
        if then is not None:
            then()

    def look(self) -> None:
        """Notes the end of an operation that nobody waits for yet: a session's."""
        if self.signal is None and self.ended == math.inf and self.done():
            self.ended = time.monotonic()

    def done(self) -> bool:
        """Whether the operation has ended."""
        return self._handle.done()

    def settle(self) -> None:
        """Waits until it has; does not raise."""
        if self._ticket is None and self._error is None:
            try:
                self._ticket = self._handle.wait()
            except RingjaxError as error:
                self._error = error

    def results(self) -> list[int]:
        """The results, to be given to `delete_tensor`; once.

        Raises:
            RingjaxError: the operation has failed.
        """
        self.settle()
        if self._error is not None:
            raise self._error
        if self._outs.tensors:
            outs, self._outs.tensors = self._outs.tensors, []
            return outs
        results: list[int] = []
        counts: list[int] = []
        for i, (_, _, shape) in enumerate(self._pieces):
            received = self._ticket.received(i)
            results.append(c_api.allocate(self._types[i], (sum(received), *shape[1:])))
            _copy(results[-1], self._ticket.output(i))
            counts.append(c_api.allocate(c_api.INT32, (len(received),)))
            _copy(counts[-1], (ctypes.c_int32 * len(received))(*received))
        return results + counts


def _itself(ticket: Any) -> Any:
    return ticket


def _piece(
    call: Call, name: str, address: int, dtype: int, shape: tuple[int, ...]
) -> lane.TensorRef:
    number = c_api.CORE_DTYPES.get(dtype)
    if number is None:
        raise TypeError(
            f"{lane.title(call.op, name)}: TensorFlow's dtype number {dtype} cannot be "
            f"sent (shape {list(shape)})"
        )
    piece = (address, number, shape)
    if call.op in ("allgather", "alltoall"):
        lane.require_rows(call.op, name, piece)
    return piece


def _integers(tensor: int) -> list[int]:
    kind = ctypes.c_int64 if c_api.type_of(tensor) == c_api.INT64 else ctypes.c_int32
    count = c_api.bytes_of(tensor) // ctypes.sizeof(kind)
    if not count:
        return []
    return list((kind * count).from_address(c_api.data_of(tensor)))


def _copy(tensor: int, memory: Any) -> None:
    size = c_api.bytes_of(tensor)
    if size:
        source = (ctypes.c_char * size).from_buffer(memory)
        ctypes.memmove(c_api.data_of(tensor), source, size)
