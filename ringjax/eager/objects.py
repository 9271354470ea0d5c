"""Python objects from rank to rank over the eager lane.

How they become bytes, and why not as pickles, is in `ringjax.control.objects`. The
functions of the same names in `ringjax.sync` mean the same and use JAX's lane.
"""

from __future__ import annotations

from typing import Any

from ringjax import runtime
from ringjax.control import objects
from ringjax.eager import lane
from ringjax.eager.movement import allgather, broadcast

_global = runtime.global_process_set


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: runtime.ProcessSet = _global,
    *,
    allow_pickle: bool = False,
) -> Any:
    """Returns a copy of the root's object on every rank.

    Args:
        obj: None, numbers, strings, bytes, lists, tuples, dicts, sets, numpy arrays,
            nested as you like. Only the root's is looked at.
        root_rank: the sender's rank in the world.
        name: what the operation is called on all ranks.
        process_set: the ranks that take part; this rank must be one of them.
        allow_pickle: on all ranks: send what else it is as a pickle. Reading a pickle
            runs code that the sender chose.

    Raises:
        NotInitialized, PeerLost: as everywhere.
        TypeError: the root's object cannot be sent; raised on every rank.
        ValueError: the root has sent a pickle, and this rank does not allow that.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> ringjax.eager.broadcast_object({"lr": 1e-3, "layers": [64, 64]})
        {'lr': 0.001, 'layers': [64, 64]}
    """
    what = "broadcast_object"
    native = runtime.lane(process_set, what)
    root = lane.root_in_set(what, root_rank, process_set)

    def move(array: Any, part: str) -> Any:
        called = f"{name or what}.{part}"
        return broadcast(array, root_rank, name=called, process_set=process_set)

    return objects.broadcast(
        *(what, obj, move, objects.length),
        is_root=native.rank == root,
        root_rank=root_rank,
        secret=runtime.current(what).secret,
        allow_pickle=allow_pickle,
    )


def broadcast_pickled(
    obj: Any, root_rank: int, name: str | None, process_set: runtime.ProcessSet
) -> Any:
    """Horovod's `broadcast_object`: any object, and the root keeps its own."""
    sent = broadcast_object(obj, root_rank, name, process_set, allow_pickle=True)
    return obj if runtime.rank() == root_rank else sent


def allgather_object(
    obj: Any,
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
    what = "allgather_object"

    def move(array: Any, part: str) -> Any:
        called = f"{name or what}.{part}"
        return allgather(array, name=called, process_set=process_set)

    return objects.allgather(
        *(what, obj, move, objects.length),
        ranks=process_set.ranks,
        secret=runtime.current(what).secret,
        allow_pickle=allow_pickle,
    )
