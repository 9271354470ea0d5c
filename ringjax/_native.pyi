"""The native core, as xla_ext/module.cc binds it. Written by hand; a test compares."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

COLLECTIVES: dict[str, int]
REDUCE_OPS: dict[str, int]
DTYPES: dict[str, int]

class StatusError(RuntimeError):
    """A failed call of the core."""

    code: str
    """MISMATCH, UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED, FAILED_PRECONDITION,
    INVALID_ARGUMENT or INTERNAL."""
    rank: int
    """The world rank that caused it, or -1."""

class Communicator:
    def __init__(
        self,
        *,
        id: int,
        name: str,
        job: int,
        epoch: int,
        rank: int,
        hosts: Sequence[int],
        members: Sequence[int],
        links: Sequence[tuple[Any, ...]],
        doorbell: int,
        options: Mapping[str, float | str],
    ) -> None:
        """Takes ownership of every descriptor in `links` and of `doorbell`.

        Also if it raises, unless that is a TypeError: then it has taken nothing.
        Links are ("shm", peer, memfd, side, ring_bytes, peer_doorbell) or
        ("tcp", peer, [socket, ...]).
        """
    @property
    def id(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def hosts(self) -> list[int]: ...
    @property
    def aborted(self) -> bool: ...
    def execute(
        self,
        op: int,
        reduce_op: int,
        ins: Sequence[Any],
        outs: Sequence[Any],
        *,
        counts: Sequence[int] = ...,
        root: int = 0,
        wire: int = -1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        names: Sequence[str] = ...,
    ) -> None:
        """Runs one call on this thread without the GIL; raises StatusError."""
    def abort(self, message: str, rank: int = -1) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...

class Heartbeat:
    def __init__(
        self,
        rank: int,
        peers: Sequence[tuple[int, int]],
        *,
        interval: float,
        timeout: float,
    ) -> None: ...
    def watch(self, communicator: Communicator) -> None: ...
    def forget(self, communicator: Communicator) -> None: ...
    def fail(self, message: str) -> None: ...
    def leave(self) -> None: ...
    def lost(self) -> list[tuple[int, str]]: ...
    def close(self) -> None: ...

def local_world(
    hosts: Sequence[int], options: Mapping[str, float | str] = ...
) -> list[Communicator]: ...
def ffi_targets() -> dict[str, Any]: ...
def shm_bytes(ring_bytes: int) -> int: ...
def set_failure_hook(f: Callable[[], None] | None) -> None: ...
def version() -> str: ...
def algorithms() -> list[tuple[str, str]]: ...
def applies(op: str, algorithm: str, host: Sequence[int]) -> bool: ...
def schedule(
    op: str,
    algorithm: str,
    rank: int,
    counts: Sequence[Sequence[int]],
    host: Sequence[int],
    root: int = 0,
) -> list[dict[str, Any]]: ...
def verify(
    op: str,
    algorithm: str,
    counts: Sequence[Sequence[int]],
    host: Sequence[int],
    root: int = 0,
) -> dict[str, Any]: ...
def verify_schedules(
    op: str,
    schedules: Sequence[Sequence[dict[str, Any]]],
    counts: Sequence[Sequence[int]],
    host: Sequence[int],
    root: int = 0,
) -> dict[str, Any]: ...
