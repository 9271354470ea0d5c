"""Operations that one node of a graph has submitted and another node will finish.

Threads of this module wait for the operations, so that TensorFlow's threads need not.
Tensors are addresses of TF_Tensor in this module. token_queues.py describes how graphs
wait, and kernels.py has the nodes of a graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ringjax import stderr
from ringjax.eager import lane
from ringjax.errors import RingjaxError
from ringjax.tensorflow import c_api
from ringjax.tensorflow.collective_spec import CollectiveSpec, finish_with_work
from ringjax.tensorflow.token_queues import TokenQueue
from ringjax.world import timeouts

_POLL_INTERVAL = 0.002  # seconds between two polls of the younger operations


class OwnedTensors:
    """Tensors that are deleted with the last reference to this object."""

    def __init__(self, tensors: Sequence[int]) -> None:
        self.tensors = list(tensors)

    # When the interpreter ends, the names of this module may be None already. The
    # default value of an argument still exists then.
    def __del__(
        self, delete: Callable[[Sequence[int]], None] = c_api.tensors.delete
    ) -> None:
        delete(self.tensors)


class PendingOperation:
    """A submitted operation whose results the graph has not taken yet.

    Args:
        call: the operation.
        name: the name of the operation on all ranks.
        tensors: the arguments, and for alltoall the splits after them. The new object
            owns these tensors and deletes them.
        queue: the queue from which the graph takes a token. If it is None, the caller
            sets `on_end`.

    Attributes:
        ended: the monotonic time at which the end was noticed; infinity before.
        on_end: a function that is called once when the operation has ended.
    """

    def __init__(
        self,
        call: CollectiveSpec,
        name: str,
        tensors: Sequence[int],
        queue: TokenQueue | None,
    ) -> None:
        self.queue = queue
        self.ended = math.inf
        self.on_end: Callable[[], None] | None = None
        # Give the tensors an owner now, because the code below may raise exceptions.
        inputs = OwnedTensors(tensors)
        self._work: Any = None  # the native work, after the wait
        self._error: RingjaxError | None = None
        process_set = call.process_set()
        arguments = call.lane_arguments(process_set)
        if call.op == "alltoall":
            *tensors, splits = tensors
            arguments["splits"] = _integers(splits)
        described = c_api.tensors.describe(tensors)
        self._dtypes = [dtype for _, dtype, _ in described]
        self._pieces = [_lane_piece(call, name, *each) for each in described]
        self._outs = OwnedTensors([])
        if call.op in ("allreduce", "broadcast"):
            self._outs.tensors = c_api.tensors.allocate_like(tensors)
        elif call.op == "reducescatter":
            for piece, dtype in zip(self._pieces, self._dtypes, strict=True):
                shape = lane.scattered_shape(call.op, name, piece, process_set)
                self._outs.tensors.append(c_api.allocate(dtype, shape))
        outs = c_api.tensors.describe(self._outs.tensors)
        with contextlib.ExitStack() as stack:
            if call.timeout != timeouts.JOB_LIMIT:
                stack.enter_context(timeouts.collective_timeout(call.timeout))
            self._handle = lane.submit(
                call.op,
                name,
                self._pieces,
                [address for address, _, _ in outs],
                finish_with_work,
                process_set,
                keep=(inputs, self._outs),
                **arguments,
            )

    def notify(self) -> None:
        """Makes the graph continue."""
        self.ended = time.monotonic()
        if self.queue is not None:
            self.queue.put_token()
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()

    def note_end(self) -> None:
        """Records when a session's operation ended, if RingjaxWait has not taken it."""
        if self.queue is None and self.ended == math.inf and self.done():
            self.ended = time.monotonic()

    def done(self) -> bool:
        """Returns whether the operation has ended."""
        return self._handle.done()

    def wait_for_end(self) -> None:
        """Waits for the end; does not raise if the operation has failed."""
        if self._work is None and self._error is None:
            try:
                self._work = self._handle.wait()
            except RingjaxError as error:
                self._error = error

    def results(self) -> list[int]:
        """Returns the results. Call this method once, and delete the results.

        Raises the error with which the operation has failed.
        """
        self.wait_for_end()
        if self._error is not None:
            raise self._error
        if self._outs.tensors:
            outs, self._outs.tensors = self._outs.tensors, []
            return outs
        results: list[int] = []
        counts: list[int] = []
        for i, (_, _, shape) in enumerate(self._pieces):
            received = self._work.received(i)
            results.append(c_api.allocate(self._dtypes[i], (sum(received), *shape[1:])))
            _copy(results[-1], self._work.output(i))
            counts.append(c_api.allocate(c_api.INT32, (len(received),)))
            _copy(counts[-1], (ctypes.c_int32 * len(received))(*received))
        return results + counts


def _lane_piece(
    call: CollectiveSpec, name: str, address: int, dtype: int, shape: tuple[int, ...]
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


class CompletionThreads:
    """Threads that wait for operations and notify each operation when it ends.

    One thread waits for the oldest operation, and then notifies all operations that
    have ended by then. Operations may end in any order, so a second thread polls the
    younger operations. The threads start with the first operation and never end.
    """

    def __init__(self) -> None:
        self._pending: deque[PendingOperation] = deque()
        self._changed = threading.Condition()
        self._started = False

    def add(self, item: PendingOperation) -> None:
        """Adds an operation; returns immediately."""
        with self._changed:
            self._pending.append(item)
            # The first operation wakes `_wait_for_oldest`, the second `_poll_others`.
            # With more operations, neither thread waits for `_changed`.
            if len(self._pending) <= 2:
                self._changed.notify_all()
            if not self._started:
                self._started = True
                for work in (self._wait_for_oldest, self._poll_others):
                    name = f"ringjax-tensorflow{work.__name__}"
                    threading.Thread(target=work, name=name, daemon=True).start()

    def _wait_for_oldest(self) -> None:
        while True:
            with self._changed:
                while not self._pending:
                    self._changed.wait()
                first = self._pending[0]
            first.wait_for_end()
            ended = []
            with self._changed:
                while self._pending and self._pending[0].done():
                    ended.append(self._pending.popleft())
            for item in ended:
                _notify(item)

    def _poll_others(self) -> None:
        while True:
            with self._changed:
                while len(self._pending) < 2:
                    self._changed.wait()
            # No event reports the end of an operation that is not the oldest.
            time.sleep(_POLL_INTERVAL)
            with self._changed:
                # `_wait_for_oldest` waits for the first operation, so leave it out
                # here.
                ended = [item for item in list(self._pending)[1:] if item.done()]
                for item in ended:
                    self._pending.remove(item)
            for item in ended:
                _notify(item)


def _notify(item: PendingOperation) -> None:
    try:
        item.wait_for_end()
        item.notify()
    except Exception as error:  # the thread must continue after a failed notification
        cause = f"{type(error).__name__}: {error}"
        stderr.line(f"[ringjax] error: a graph of TensorFlow waits for ever: {cause}")
