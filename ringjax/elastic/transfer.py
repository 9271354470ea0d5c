"""Copies the state of one rank to other ranks: its structure first, then its arrays.

If all ranks receive, the state is sent over the eager lane. If only some ranks receive,
separate links connect these ranks to the sender, so that the other ranks need not make
any call. Arrays are sent from their own memory into their final memory, in chunks. No
object is pickled unless the caller allows pickles.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ringjax import _native, errors, failpoints, runtime
from ringjax.control import object_messages
from ringjax.control.objects import Array
from ringjax.eager import dtypes, handle, lane
from ringjax.elastic import leaf
from ringjax.elastic.state_codec import StateDecoder, StateEncoder
from ringjax.elastic.values import Attributes

CHUNK = 8 << 20
_MAX_IN_FLIGHT = 4  # most chunks to wait for at a time in the eager lane
_BYTE = dtypes.NUMBERS["uint8"]
_BROADCAST = (_native.COLLECTIVES["broadcast"], _native.REDUCE_OPS["Sum"])


class Participants(NamedTuple):
    """The sender and the receivers of a state, as ranks of the world."""

    source: int
    receivers: tuple[int, ...]


_participants: ContextVar[Participants | None] = ContextVar(
    "participants", default=None
)


@contextlib.contextmanager
def between(participants: Participants) -> Iterator[None]:
    """Makes `broadcast_state` use these participants, inside of a `with` block.

    Outside of the block, rank 0 sends to all ranks; in a job of groups, each rank of
    the first group sends to the ranks at the same place in the other groups.
    """
    token = _participants.set(participants)
    try:
        yield
    finally:
        _participants.reset(token)


def broadcast_state(values: Attributes, *, allow_pickle: bool = False) -> Any:
    """Sends the source's values to the receivers. Every rank calls this function.

    Receivers use their own `values` for functions, which are not sent, and as templates
    for objects of JAX's registered types. If `allow_pickle` is True on all ranks,
    objects of unknown types are sent as pickles.

    Returns:
        The source's values on the receivers; None on all other ranks.

    Raises:
        TypeError, ValueError: the source's values cannot be sent, or the receivers'
            values have another structure. Both ends raise the error.
    """
    if not values:
        return None
    ranks = _participants.get()
    if ranks is None:
        first, *others = runtime.replica_set().ranks
        ranks = Participants(first, tuple(others))
    rank = runtime.rank()
    if not ranks.receivers or rank not in (ranks.source, *ranks.receivers):
        return None
    with _open_transfer(ranks) as transfer:
        if rank == ranks.source:
            _send(values, transfer, rank, allow_pickle)
            return None
        return _receive(values, transfer, ranks.source, allow_pickle)


def preallocate(values: Attributes, *, allow_pickle: bool = False) -> None:
    """Reserves memory for arrays like those in `values`, for `broadcast_state`."""
    leaf.preallocate(StateEncoder(values, allow_pickle=allow_pickle).leaves)


def _send(
    values: Attributes, transfer: _Transfer, rank: int, allow_pickle: bool
) -> None:
    try:
        state = StateEncoder(values, allow_pickle=allow_pickle)
    except Exception as error:
        # The receivers already wait for a structure, so send them the error instead.
        text = f"the state of rank {rank} cannot be sent: {error}"
        _broadcast_object({"error": text}, transfer, rank, is_source=True)
        is_argument = type(error) in (TypeError, ValueError)
        raise type(error)(text) if is_argument else error from error
    _broadcast_object({"state": state.structure}, transfer, rank, is_source=True)
    _move_all(state.memory, transfer)


def _receive(
    values: Attributes, transfer: _Transfer, source: int, allow_pickle: bool
) -> Attributes:
    message = _broadcast_object(None, transfer, source, is_source=False)
    if "error" in message:
        raise ValueError(message["error"])
    state = StateDecoder(message["state"], values, allow_pickle=allow_pickle)
    _move_all(state.memory, transfer)
    leaf.release_reserved()
    return state.values()


def _move_all(memory: Sequence[Array], transfer: _Transfer) -> None:
    failpoints.passing("state.described")
    for pieces in _chunks(memory):
        transfer.move(pieces)
        failpoints.passing("state.chunk")
    transfer.finish()


def _broadcast_object(
    message: Attributes | None, transfer: _Transfer, source: int, *, is_source: bool
) -> Any:
    def move(array: Array, _: str) -> Array:
        transfer.move([array.view(np.uint8).reshape(-1)])
        transfer.finish()
        return array

    return object_messages.broadcast(
        "elastic",
        message,
        move,
        object_messages.exact_size,
        is_root=is_source,
        root_rank=source,
        secret=runtime.current("elastic").secret,
        allow_pickle=False,
    )


def _chunks(memory: Sequence[Array]) -> Iterator[list[Array]]:
    """Cuts all memory, in order, into chunks: lists of pieces of CHUNK bytes in sum."""
    pieces: list[Array] = []
    room = CHUNK
    for part in memory:
        start = 0
        while start < len(part):
            piece = part[start : start + room]
            pieces.append(piece)
            start += len(piece)
            room -= len(piece)
            if not room:
                yield pieces
                pieces, room = [], CHUNK
    if pieces:
        yield pieces


@contextlib.contextmanager
def _open_transfer(participants: Participants) -> Iterator[_Transfer]:
    if len(participants.receivers) == runtime.size() - 1:
        yield _LaneTransfer(participants.source)
        return
    ranks = sorted({participants.source, *participants.receivers})
    # Use separate links, because in the eager lane all ranks would have to take part.
    try:
        with runtime.private_communicator(ranks) as communicator:
            yield _LinkTransfer(communicator, ranks.index(participants.source))
    except _native.StatusError as error:
        raise errors.from_status(error) from error


class _LaneTransfer:
    """Sends to all ranks by named operations, a few chunks at a time.

    `move` sends pieces of memory, or receives into these pieces, without waiting for
    the end. `finish` waits until all pieces have arrived.
    """

    def __init__(self, source: int) -> None:
        self._source = source
        self._count = 0
        self._handles: list[handle.Handle] = []

    def move(self, pieces: Sequence[Array]) -> None:
        tensors = [(piece.ctypes.data, _BYTE, piece.shape) for piece in pieces]
        self._handles.append(
            lane.submit(
                "broadcast",
                f"elastic.state.{self._count}",
                tensors,
                [address for address, _, _ in tensors],
                finish=lambda _: None,
                keep=list(pieces),
                root=self._source,
            )
        )
        self._count += 1
        if len(self._handles) > _MAX_IN_FLIGHT:
            self._handles.pop(0).wait()

    def finish(self) -> None:
        while self._handles:
            self._handles.pop(0).wait()


class _LinkTransfer:
    """Sends to some ranks over a communicator that only these ranks have."""

    def __init__(self, communicator: _native.Communicator, root: int) -> None:
        self._communicator = communicator
        self._root = root

    def move(self, pieces: Sequence[Array]) -> None:
        buffers = [_writable(piece) for piece in pieces]
        self._communicator.execute(
            *_BROADCAST, buffers, buffers, root=self._root, name="elastic state"
        )

    def finish(self) -> None:
        pass  # `move` returns after its pieces have arrived


_Transfer: TypeAlias = _LaneTransfer | _LinkTransfer


def _writable(piece: Array) -> Array:
    """Returns a writable view, because the native core accepts only writable memory.

    At the source, which only reads, `piece` may be the memory of a JAX array, which
    numpy marks as read-only.
    """
    if piece.flags.writeable:
        return piece
    memory = (ctypes.c_ubyte * len(piece)).from_address(piece.ctypes.data)
    alias: Array = np.ctypeslib.as_array(memory)
    return alias
