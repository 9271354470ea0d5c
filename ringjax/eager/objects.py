"""Sends Python objects between ranks over the eager lane.

`ringjax.control.objects` encodes objects without pickle. `ringjax.sync` has functions
with equal names and meanings, which use the jit lane.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringjax import runtime
from ringjax.control import object_messages
from ringjax.eager import lane
from ringjax.eager.movement import allgather, broadcast

_global = runtime.global_process_set


def broadcast_object(
    obj: object,
    root_rank: int = 0,
    name: str | None = None,
    process_set: runtime.ProcessSet = _global,
    *,
    allow_pickle: bool = False,
) -> Any:
    """Returns a copy of the root's object on every rank.

    Args:
        obj: None, a number, a string, bytes, a numpy array, or lists, tuples, dicts and
            sets of these, nested to any depth. Ranks other than the root may pass any
            object.
        root_rank: the sender's rank in the world.
        name: the name of the operation, equal on all ranks.
        process_set: the ranks that take part; this rank must be among them.
        allow_pickle: whether objects of other types are sent as pickles; equal on all
            ranks. Loading a pickle runs code that the sender has chosen.

    Raises:
        NotInitialized: before ringjax.init().
        PeerLost: a rank is lost.
        TypeError: the root's object cannot be sent. All ranks raise this error.
        ValueError: the root has sent a pickle, but this rank has not set
            `allow_pickle`.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> ringjax.eager.broadcast_object({"lr": 1e-3, "layers": [64, 64]})
        {'lr': 0.001, 'layers': [64, 64]}
    """
    function = "broadcast_object"
    native = runtime.lane(process_set, function)
    root = lane.root_in_set(function, root_rank, process_set)

    def move(array: np.ndarray[Any, Any], part: str) -> Any:
        step = f"{name or function}.{part}"
        return broadcast(array, root_rank, name=step, process_set=process_set)

    return object_messages.broadcast(
        function,
        obj,
        move,
        object_messages.exact_size,
        is_root=native.rank == root,
        root_rank=root_rank,
        secret=runtime.current(function).secret,
        allow_pickle=allow_pickle,
    )


def broadcast_pickled(
    obj: object, root_rank: int, name: str | None, process_set: runtime.ProcessSet
) -> Any:
    """Broadcasts any object by pickle, as in Horovod. The root returns `obj` itself."""
    sent = broadcast_object(obj, root_rank, name, process_set, allow_pickle=True)
    return obj if runtime.rank() == root_rank else sent


def allgather_object(
    obj: object,
    name: str | None = None,
    process_set: runtime.ProcessSet = _global,
    *,
    allow_pickle: bool = False,
) -> list[Any]:
    """Returns the objects of all ranks, in the order of the ranks.

    Args, Raises: as `broadcast_object`.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> ringjax.eager.allgather_object("ready") == ["ready"] * ringjax.size()
        True
    """
    function = "allgather_object"

    def move(array: np.ndarray[Any, Any], part: str) -> Any:
        return allgather(
            array, name=f"{name or function}.{part}", process_set=process_set
        )

    return object_messages.allgather(
        function,
        obj,
        move,
        object_messages.exact_size,
        ranks=process_set.ranks,
        secret=runtime.current(function).secret,
        allow_pickle=allow_pickle,
    )
