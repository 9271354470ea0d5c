"""alltoall: every rank sends a part of its rows to every rank.

Not a reduction; the parts may have different sizes (`splits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax import runtime
from ringjax.collectives import arguments
from ringjax.collectives.allgather import exchange_rows
from ringjax.xla import jax_private, primitive

_UNKNOWN = 2**62


def alltoall(
    tensor: Any,
    splits: Any = None,
    *,
    received_splits: Any = None,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
) -> Any:
    """Sends the first rows of `tensor` to rank 0, the next to rank 1, and so on.

    Args:
      tensor: an array or a tree of arrays with at least one dimension. All but the
        first dimension must be alike on all ranks.
      splits: how many rows go to each rank; integers that are known while tracing and
        add up to the rows of every array in `tensor`. None: equal parts.
      received_splits: how many rows come from each rank. Needed with `splits` while
        tracing (jit, vmap, scan), where a result must have a known shape; outside, the
        ranks tell each other.
      process_set: the ranks that take part; this rank must be one of them.
      name: stands for the operation in error messages.

    Returns:
      The received rows in the order of the ranks; with `splits` the pair of them and of
      the received splits, an int32 array.

    Raises:
      NotInitialized: before ringjax.init().
      TypeError, ValueError: a bad argument; nothing was sent.
      jax.errors.JaxRuntimeError, ValueError: when the result is used, if the ranks
        disagree or one is lost; `errors.translated` raises a RingjaxError instead.

    Example:
      >>> import jax.numpy as jnp, ringjax
      >>> ringjax.init()
      >>> ringjax.alltoall(jnp.arange(ringjax.size())).shape == (ringjax.size(),)
      True

    Derivatives: a permutation of the world's rows, so the tangent takes the same way
    and the cotangent the way back: an alltoall with both splits swapped.
    """
    return _alltoall("alltoall", tensor, splits, received_splits, process_set, name)


def grouped_alltoall(
    tensors: Any,
    splits: Any = None,
    *,
    received_splits: Any = None,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
) -> Any:
    """`alltoall` of any tree as one operation, with the same splits for all members.

    Returns:
      Such a tree; with `splits` the pair of it and the received splits.
    """
    return _alltoall(
        "grouped_alltoall", tensors, splits, received_splits, process_set, name
    )


@arguments.outside_mesh
def _alltoall(
    what: str,
    tree: Any,
    splits: Any,
    received_splits: Any,
    process_set: runtime.ProcessSet,
    name: str | None,
) -> Any:
    communicator = runtime.communicator(process_set, what)
    leaves = arguments.require_rows(what, arguments.flatten(what, tree, moves=True))
    call = {
        "comm": communicator.id,
        "timeout": process_set.limit(),
        "name": name or "",
    }
    if splits is None:
        if received_splits is not None:
            raise ValueError(
                f"ringjax.{what}: `received_splits` is {received_splits!r}, but "
                "`splits` is not given"
            )
        counts = tuple(
            (_equal_part(what, array, communicator.size),) * (2 * communicator.size)
            for array in leaves.arrays
        )
        received = None
    else:
        eager = jax_private.is_eager(leaves.arrays)
        sent, rows = _splits(
            what, leaves.arrays, splits, received_splits, communicator, eager
        )
        if eager:
            rows = _received(what, sent, rows, communicator, call)
        counts = (sent + rows,) * len(leaves.arrays)
        with jax.transfer_guard("allow"):  # it is ours
            received = jnp.asarray(np.array(rows, np.int32))
    out = tree
    if leaves.arrays:
        out = leaves.rebuild(
            primitive.bind(
                "alltoall",
                leaves.arrays,
                **call,
                names=leaves.names,
                size=communicator.size,
                counts=counts,
            )
        )
    return out if received is None else (out, received)


def _equal_part(what: str, array: Any, size: int) -> int:
    rows = int(array.shape[0])
    if rows % size:
        raise ValueError(
            f"ringjax.{what}: `tensor` has {rows} rows (shape {tuple(array.shape)}), "
            f"which {size} ranks cannot share equally; pass `splits`"
        )
    return rows // size


def _splits(
    what: str,
    arrays: Sequence[Any],
    splits: Any,
    received_splits: Any,
    communicator: Any,
    eager: bool,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both splits, checked; the second is empty if the ranks must still say."""
    sent = arguments.splits(what, "splits", splits, communicator.size)
    for array in arrays:
        if array.shape[0] != sum(sent):
            raise ValueError(
                f"ringjax.{what}: `splits` is {list(sent)}, together {sum(sent)}, "
                f"but `tensor` has {array.shape[0]} rows (shape {tuple(array.shape)})"
            )
    if received_splits is not None:
        given = arguments.splits(
            what, "received_splits", received_splits, communicator.size
        )
        if given[communicator.rank] != sent[communicator.rank]:
            raise ValueError(
                f"ringjax.{what}: `received_splits` is {list(given)} and `splits` is "
                f"{list(sent)}: they disagree on what rank {communicator.rank} sends "
                "to itself"
            )
        return sent, given
    if not eager:
        raise ValueError(
            f"ringjax.{what}: `received_splits` is missing; while tracing (jit, vmap, "
            "scan) the result needs a known shape, so pass beside `splits` how many "
            "rows come from each rank"
        )
    return sent, ()


def _received(
    what: str,
    sent: tuple[int, ...],
    given: tuple[int, ...],
    communicator: Any,
    call: Any,
) -> tuple[int, ...]:
    """What all ranks send to this one, from the table of everyone's splits.

    The table also holds what everyone expects, so that all ranks find the same mistake.
    """
    size = communicator.size
    if size == 1:
        return sent
    expected = given or (_UNKNOWN,) * size
    table = exchange_rows(sent + expected, size, call)
    for rank in range(size):
        sends = table[rank]
        expects = tuple(table[size + peer][rank] for peer in range(size))
        if _UNKNOWN not in expects and expects != sends:
            raise ValueError(
                f"ringjax.{what}: rank {rank} passes `received_splits` "
                f"{list(expects)}, but the ranks send it {list(sends)} rows"
            )
    return table[communicator.rank]


# -- shape and derivatives -------------------------------------------------------------


def _shape(avals: Sequence[Any], *, counts: Any, **params: Any) -> list[Any]:
    return [
        jax_private.with_rows(aval, sum(rows[len(rows) // 2 :]))
        for aval, rows in zip(avals, counts, strict=True)
    ]


def _transpose(cts: list[Any], avals: list[Any], params: dict[str, Any]) -> list[Any]:
    """A permutation matrix of the world's rows: its transpose is its inverse."""
    del avals
    swapped = tuple(
        rows[len(rows) // 2 :] + rows[: len(rows) // 2] for rows in params["counts"]
    )
    return primitive.bind("alltoall", cts, **{**params, "counts": swapped})


primitive.define_collective(
    "alltoall",
    shape=_shape,
    in_place=False,
    batch=primitive.batch_rows,
    jvp=primitive.linear_jvp,
    transpose=_transpose,
)
