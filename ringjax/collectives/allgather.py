"""allgather: each rank receives the rows of all ranks, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ringjax import runtime
from ringjax.collectives import arguments
from ringjax.xla import jax_private, primitive

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import PyTree, Shaped

    from ringjax.xla.jax_types import Aval, Params, Traced, Tree


def allgather(
    tensor: PyTree[Shaped[ArrayLike, "?rows *?row"], Tree],
    *,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
) -> PyTree[Shaped[Array, "?total *?row"], Tree]:
    """Concatenates the tensors of all ranks along dimension 0.

    Outside of jit the number of rows may differ between ranks: the ranks first exchange
    their row counts, in a small allgather. A traced tensor (jit, vmap, scan) must have
    the same number of rows on all ranks; otherwise all ranks raise an error when the
    program runs.

    Args:
        tensor: an array, a number, or a tree of these. A 0-d array counts as one row.
            All dimensions except the first must be equal on all ranks.
        process_set: the ranks that take part; this rank must be among them.
        name: names the operation in error messages.

    Returns:
        An array or tree whose first dimension is the sum over the ranks.

    Raises:
        NotInitialized: before ringjax.init().
        TypeError, ValueError: an argument is wrong; nothing was sent.
        jax.errors.JaxRuntimeError, ValueError: the ranks' calls differ, or a rank is
            lost. Raised when the result is used. `errors.translated` raises a
            RingjaxError instead.

    Example:
        >>> import jax.numpy as jnp, ringjax
        >>> ringjax.init()
        >>> ringjax.allgather(jnp.ones((2, 3))).shape == (2 * ringjax.size(), 3)
        True

    Derivatives: the tangent is the allgather of the tangents. Every rank's result holds
    the rows of rank r. So the cotangent of rank r is the sum, over all ranks, of the
    cotangents of these rows: a reducescatter with Sum.

    References:
        R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication
        operations in MPICH, Int. J. High Perform. Comput. Appl. 19 (2005).
    """
    return _allgather("allgather", tensor, process_set, name)


def grouped_allgather(
    tensors: PyTree[Shaped[ArrayLike, "?rows *?row"], Tree],
    *,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
) -> PyTree[Shaped[Array, "?total *?row"], Tree]:
    """Gathers a list, tuple, dict or any other tree as one operation."""
    return _allgather("grouped_allgather", tensors, process_set, name)


@arguments.outside_mesh
def _allgather(
    what: str, tree: PyTree, process_set: runtime.ProcessSet, name: str | None
) -> PyTree:
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
    """Returns, for each row count of this rank in `own`, the row counts of all ranks.

    A count is sent as two 32-bit words, because JAX has no 64-bit arrays unless
    jax_enable_x64 is set.
    """
    words = np.array([[[n >> 32, n & 0xFFFFFFFF] for n in own]], np.uint32)
    # Allow this transfer to the device, even if the program has forbidden transfers.
    with jax.transfer_guard("allow"):
        (gathered,) = primitive.bind(
            "allgather",
            [words],
            **call,
            names=("sizes",),
            size=size,
            counts=((1,) * size,),
        )
        table = primitive.read_result(gathered).astype(np.int64)
    rows = (table[..., 0] << 32) + table[..., 1]
    return tuple(tuple(int(n) for n in column) for column in rows.T)


# -- shape and derivatives -------------------------------------------------------------


def _shape(
    avals: Sequence[Aval], *, counts: Sequence[Sequence[int]], **params: Any
) -> list[Aval]:
    return [
        jax_private.with_rows(aval, sum(rows))
        for aval, rows in zip(avals, counts, strict=True)
    ]


def _transpose(cts: list[Traced], avals: list[Aval], params: Params) -> list[Traced]:
    """Returns ``ct_x_r = Σ_s (ct_y_s)_r``, as ``y = (x_1, .., x_P)`` on every rank."""
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
