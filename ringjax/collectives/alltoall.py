"""alltoall: each rank sends some of its rows to every rank.

The argument `splits` says how many rows each rank receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax import runtime
from ringjax.collectives import arguments
from ringjax.collectives.allgather import exchange_rows
from ringjax.xla import jax_private, primitive

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import PyTree, Shaped

    from ringjax._native import Communicator
    from ringjax.xla.jax_types import Aval, Params, Traced, Tree

    Splits = Sequence[int] | ArrayLike | None

_UNKNOWN = 2**62  # sent in place of `received_splits` that the program has not passed


def alltoall(
    tensor: PyTree[Shaped[ArrayLike, "?rows *?row"], Tree],
    splits: Splits = None,
    *,
    received_splits: Splits = None,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
) -> PyTree[Array]:
    """Sends the first rows of `tensor` to rank 0, the next to rank 1, and so on.

    Args:
        tensor: an array or a tree of arrays with at least one dimension. All dimensions
            except the first must be equal on all ranks.
        splits: the number of rows for each rank: integers that are known while tracing,
            whose sum is the number of rows of each array in `tensor`. With None, all
            ranks receive equally many rows.
        received_splits: the number of rows from each rank. While tracing (jit, vmap,
            scan), pass `received_splits` with `splits`, because a result must have a
            known shape. Outside of a trace, the ranks exchange their splits.
        process_set: the ranks that take part; this rank must be among them.
        name: names the operation in error messages.

    Returns:
        The received rows, in the order of the ranks. With `splits`, a pair: the rows,
        and the received splits as an int32 array.

    Raises:
        NotInitialized: before ringjax.init().
        TypeError, ValueError: an argument is wrong; nothing was sent.
        jax.errors.JaxRuntimeError, ValueError: the ranks' calls differ, or a rank is
            lost. Raised when the result is used. `errors.translated` raises a
            RingjaxError instead.

    Example:
        >>> import jax.numpy as jnp, ringjax
        >>> ringjax.init()
        >>> ringjax.alltoall(jnp.arange(ringjax.size())).shape == (ringjax.size(),)
        True

    Derivatives: an alltoall permutes the rows of all ranks. So the tangent is the
    alltoall of the tangents, and the cotangent is an alltoall with both splits swapped.
    """
    return _alltoall("alltoall", tensor, splits, received_splits, process_set, name)


def grouped_alltoall(
    tensors: PyTree[Shaped[ArrayLike, "?rows *?row"], Tree],
    splits: Splits = None,
    *,
    received_splits: Splits = None,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
) -> PyTree[Array]:
    """Runs `alltoall` on any tree as one operation, with one `splits` for all arrays.

    Returns:
        A tree of the received rows. With `splits`, a pair: the tree, and the received
        splits.
    """
    return _alltoall(
        "grouped_alltoall", tensors, splits, received_splits, process_set, name
    )


@arguments.outside_mesh
def _alltoall(
    what: str,
    tree: PyTree,
    splits: Splits,
    received_splits: Splits,
    process_set: runtime.ProcessSet,
    name: str | None,
) -> PyTree:
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
        # Allow this transfer to the device, even if the program forbids transfers.
        with jax.transfer_guard("allow"):
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


def _equal_part(what: str, array: Traced, size: int) -> int:
    rows = int(array.shape[0])
    if rows % size:
        raise ValueError(
            f"ringjax.{what}: `tensor` has {rows} rows (shape {tuple(array.shape)}), "
            f"which {size} ranks cannot share equally; pass `splits`"
        )
    return rows // size


def _splits(
    what: str,
    arrays: Sequence[Traced],
    splits: Splits,
    received_splits: Splits,
    communicator: Communicator,
    eager: bool,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Checks both splits. Returns () as received splits if the ranks exchange them."""
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
    communicator: Communicator,
    call: dict[str, Any],
) -> tuple[int, ...]:
    """Exchanges the splits of all ranks, and returns this rank's received splits.

    Each rank also sends the `received_splits` that its program has passed, so that all
    ranks raise an error if these are wrong on one rank.
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


def _shape(
    avals: Sequence[Aval], *, counts: Sequence[Sequence[int]], **params: Any
) -> list[Aval]:
    return [
        jax_private.with_rows(aval, sum(rows[len(rows) // 2 :]))
        for aval, rows in zip(avals, counts, strict=True)
    ]


def _transpose(cts: list[Traced], avals: list[Aval], params: Params) -> list[Traced]:
    """Swaps the splits, because the transpose of a permutation is its inverse."""
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
