"""allgather: every rank gets the rows of all ranks, in the order of the ranks.

Not a reduction: nothing is added, every dtype is alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ringjax import runtime
from ringjax.collectives import arguments
from ringjax.xla import jax_private, primitive


def allgather(
    tensor: Any,
    *,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
) -> Any:
    """Concatenates the tensors of all ranks along dimension 0.

    Outside of jit the first dimensions may differ from rank to rank: the ranks exchange
    them first, in a small allgather. A traced tensor (jit, vmap, scan) is taken to have
    as many rows on every rank; if that is wrong, all ranks raise when it runs.

    Args:
      tensor: an array, a number, or a tree of them; a 0-d array counts as one row. All
        but the first dimension must be alike on all ranks.
      process_set: the ranks that take part; this rank must be one of them.
      name: stands for the operation in error messages.

    Returns:
      An array or tree; the first dimension is the sum over the ranks.

    Raises:
      NotInitialized: before ringjax.init().
      TypeError, ValueError: a bad argument; nothing was sent.
      jax.errors.JaxRuntimeError, ValueError: when the result is used, if the ranks
        disagree or one is lost; `errors.translated` raises a RingjaxError instead.

    Example:
      >>> import jax.numpy as jnp, ringjax
      >>> ringjax.init()
      >>> ringjax.allgather(jnp.ones((2, 3))).shape == (2 * ringjax.size(), 3)
      True

    Derivatives: the tangent is the allgather of the tangents. Every rank's result holds
    the rows of rank r, so the cotangent of rank r is the sum over the ranks of the
    cotangents of these rows: a reducescatter with Sum.

    References:
      R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication
      operations in MPICH, Int. J. High Perform. Comput. Appl. 19 (2005).
    """
    return _allgather("allgather", tensor, process_set, name)


def grouped_allgather(
    tensors: Any,
    *,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
) -> Any:
    """`allgather` of a list, tuple, dict or any tree as one operation; returns such."""
    return _allgather("grouped_allgather", tensors, process_set, name)


@arguments.outside_mesh
def _allgather(
    what: str, tree: Any, process_set: runtime.ProcessSet, name: str | None
) -> Any:
    communicator = runtime.communicator(process_set, what)
    leaves = arguments.flatten(what, tree, moves=True)
    leaves = arguments.require_rows(what, leaves, scalars=True)
    if not leaves.arrays:
        return tree
    own = [array.shape[0] for array in leaves.arrays]
    size = communicator.size
    call = {
        "comm": communicator.id,
        "timeout": process_set.limit(),
        "name": name or "",
    }
    if size > 1 and jax_private.is_eager(leaves.arrays):
        counts = exchange_rows(own, size, call)
    else:
        counts = tuple((rows,) * size for rows in own)
    return leaves.rebuild(
        primitive.bind(
            "allgather",
            leaves.arrays,
            **call,
            names=leaves.names,
            size=size,
            counts=counts,
        )
    )


def exchange_rows(
    own: Sequence[int], size: int, call: dict[str, Any]
) -> tuple[tuple[int, ...], ...]:
    """What every rank says in place of `own`: one tuple over the ranks for each entry.

    Two 32-bit words a number, because without jax_enable_x64 there is no 64-bit array.
    """
    words = np.array([[[n >> 32, n & 0xFFFFFFFF] for n in own]], np.uint32)
    with jax.transfer_guard("allow"):  # these arrays are ours, not the caller's
        (gathered,) = primitive.bind(
            *("allgather", [words]),
            **call,
            names=("sizes",),
            size=size,
            counts=((1,) * size,),
        )
        table = primitive.read_result(gathered).astype(np.int64)
    rows = (table[..., 0] << 32) + table[..., 1]
    return tuple(tuple(int(n) for n in column) for column in rows.T)


# -- shape and derivatives -------------------------------------------------------------


def _shape(avals: Sequence[Any], *, counts: Any, **params: Any) -> list[Any]:
    return [
        jax_private.with_rows(aval, sum(rows))
        for aval, rows in zip(avals, counts, strict=True)
    ]


def _transpose(cts: list[Any], avals: list[Any], params: dict[str, Any]) -> list[Any]:
    """``y = (x_1, .., x_P)`` on every rank, so ``ct_x_r = Σ_s (ct_y_s)_r``."""
    rows = tuple(aval.shape[0] for aval in avals)
    return primitive.bind("reducescatter", cts, **{**params, "rows": rows})


primitive.define_collective(
    "allgather",
    shape=_shape,
    in_place=False,
    batch=primitive.batch_rows,
    jvp=primitive.linear_jvp,
    transpose=_transpose,
)
