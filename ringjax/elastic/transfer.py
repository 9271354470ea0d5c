"""The state of one rank, copied to others: a description first, then bare memory.

To everybody it goes over the eager lane; to some newcomers over links of their own, so
that the others need not take part. Arrays are sent from where they are and arrive where
they stay, in pieces. Nothing is pickled unless the caller asks for it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringjax import _native, errors, failpoints, runtime
from ringjax.control import objects
from ringjax.eager import dtypes, handle, lane
from ringjax.elastic import leaves
from ringjax.elastic.description import Described, restored
from ringjax.elastic.leaves import Array

CHUNK = 8 << 20
_UNDER_WAY = 4  # chunks that have been submitted to the lane and not waited for
_BYTE = dtypes.NUMBERS["uint8"]
_BROADCAST = (_native.COLLECTIVES["broadcast"], _native.REDUCE_OPS["Sum"])


class Participants(NamedTuple):
    """Who sends and who listens, as ranks of the world."""

    source: int
    receivers: tuple[int, ...]


_participants: ContextVar[Participants | None] = ContextVar(
    "participants", default=None
)


@contextlib.contextmanager
def between(participants: Participants) -> Iterator[None]:
    """Within it `share` is between these ranks; otherwise from rank 0 to everybody.

    In a job of groups: from the first group, to each rank what lies at its place.
    """
    token = _participants.set(participants)
    try:
        yield
    finally:
        _participants.reset(token)


def broadcast_state(values: dict[str, Any], *, allow_pickle: bool = False) -> Any:
    """Gives the source's values to the receivers; every rank calls it.

    Args:
        values: what this rank has. On receivers it says what is not sent: how objects
            of JAX's registered types are made from their parts.
        allow_pickle: on all ranks: send objects of unknown types as pickles.

    Returns:
        The source's values on the receivers; None on all others.

    Raises:
        TypeError, ValueError: the source has something that cannot be sent, or the
            receivers' values are made in another way; on both ends.
        PeerLost: a rank is gone.
    """
    if not values:
        return None
    world = runtime.size()
    participants = _participants.get()
    if participants is None:
        first, *others = runtime.replica_set().ranks
        participants = Participants(first, tuple(others))
    rank = runtime.rank()
    if rank not in participants.receivers and rank != participants.source:
        return None
    if not participants.receivers:
        return None
    with _open_transfer(
        participants, everybody=len(participants.receivers) == world - 1
    ) as carrier:
        if rank == participants.source:
            _send(values, carrier, rank, allow_pickle)
            return None
        return _receive(values, carrier, participants.source, allow_pickle)


def preallocate(values: dict[str, Any], *, allow_pickle: bool = False) -> None:
    """Takes the memory for what `share` will bring, if that is like `values`."""
    leaves.make_room(Described.of(values, allow_pickle=allow_pickle).leaves)


class _Transfer(Protocol):
    def move(self, pieces: Sequence[Array]) -> None:
        """The source's bytes into the same pieces of the others, not at once."""

    def finish(self) -> None:
        """Returns when all of them have arrived."""


def _send(
    values: dict[str, Any], carrier: _Transfer, rank: int, allow_pickle: bool
) -> None:
    try:
        described = Described.of(values, allow_pickle=allow_pickle)
    except Exception as error:  # the others wait for it
        text = f"the state of rank {rank} cannot be sent: {error}"
        _announce({"error": text}, carrier, rank, is_source=True)
        raise type(error)(text) if type(error) in _ARGUMENTS else error from error
    plan = {"state": described.structure, "leaves": [*map(list, described.leaves)]}
    _announce(plan, carrier, rank, is_source=True)
    failpoints.passing("state.described")
    for pieces in _pieces(described.memory):
        carrier.move(pieces)
        failpoints.passing("state.chunk")
    carrier.finish()


_ARGUMENTS = (TypeError, ValueError)


def _receive(
    values: dict[str, Any], carrier: _Transfer, source: int, allow_pickle: bool
) -> Any:
    plan = _announce(None, carrier, source, is_source=False)
    if "error" in plan:
        raise ValueError(plan["error"])
    state = restored(plan["state"], plan["leaves"], values, allow_pickle=allow_pickle)
    failpoints.passing("state.described")
    for pieces in _pieces(state.memory):
        carrier.move(pieces)
        failpoints.passing("state.chunk")
    carrier.finish()
    leaves.forget_room()
    return state.values()


def _announce(plan: Any, carrier: _Transfer, source: int, *, is_source: bool) -> Any:
    def move(array: Array, _: str) -> Array:
        carrier.move([array.view(np.uint8).reshape(-1)])
        carrier.finish()
        return array

    return objects.broadcast(
        *("elastic", plan, move, objects.length),
        is_root=is_source,
        root_rank=source,
        secret=runtime.current("elastic").secret,
        allow_pickle=False,
    )


def _pieces(memory: Sequence[Array]) -> Iterator[list[Array]]:
    """All bytes in order, as lists of pieces of at most CHUNK bytes together."""
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
def _open_transfer(
    participants: Participants, *, everybody: bool
) -> Iterator[_Transfer]:
    if everybody:
        yield _LaneTransfer(participants.source)
        return
    ranks = sorted({participants.source, *participants.receivers})
    try:
        with runtime.private_communicator(ranks) as communicator:
            yield _LinkTransfer(communicator, ranks.index(participants.source))
    except _native.StatusError as error:
        raise errors.from_status(error) from error


class _LaneTransfer:
    """To all ranks, by named operations; some chunks are on their way at a time."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._count = 0
        self._handles: list[handle.Handle] = []

    def move(self, pieces: Sequence[Array]) -> None:
        """Returns before the last few have arrived."""
        places = [(piece.ctypes.data, _BYTE, piece.shape) for piece in pieces]
        self._handles.append(
            lane.submit(
                *("broadcast", f"elastic.state.{self._count}"),
                *(places, [place[0] for place in places]),
                finish=lambda _: None,
                keep=list(pieces),
                root=self._source,
            )
        )
        self._count += 1
        if len(self._handles) > _UNDER_WAY:
            self._handles.pop(0).wait()

    def finish(self) -> None:
        """Waits for all of them."""
        while self._handles:
            self._handles.pop(0).wait()


class _LinkTransfer:
    """To some ranks, over a communicator that only they have."""

    def __init__(self, communicator: _native.Communicator, root: int) -> None:
        self._communicator = communicator
        self._root = root

    def move(self, pieces: Sequence[Array]) -> None:
        """Returns when they have arrived."""
        places = [_writable(piece) for piece in pieces]
        self._communicator.execute(
            *(*_BROADCAST, places, places), root=self._root, name="elastic state"
        )

    def finish(self) -> None:
        """They have."""


def _writable(piece: Array) -> Array:
    """The same memory. At the source it is an array of JAX's, but is only read."""
    if piece.flags.writeable:
        return piece
    memory = (ctypes.c_ubyte * len(piece)).from_address(piece.ctypes.data)
    alias: Array = np.ctypeslib.as_array(memory)
    return alias
