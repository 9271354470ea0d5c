"""reducescatter: each rank receives some rows of the reduction of all ranks' tensors.

A reducescatter followed by an allgather is an allreduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ringjax import runtime
from ringjax.collectives import arguments
from ringjax.compression import Compression, WireDtype
from ringjax.ops import ReduceOp
from ringjax.xla import jax_private, primitive

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import PyTree, Shaped

    from ringjax.xla.jax_types import (
        Aval,
        Jvp,
        Params,
        Primitive,
        Tangent,
        Traced,
        Tree,
    )


def reducescatter(
    tensor: PyTree[Shaped[ArrayLike, "?rows *?row"], Tree],
    op: ReduceOp | int = ReduceOp.Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
    compression: WireDtype = Compression.none,
) -> PyTree[Shaped[Array, "?own_rows *?row"], Tree]:
    """Reduces `tensor` over all ranks; each rank receives some rows of the result.

    The rows (dimension 0) are divided as evenly as possible. If they cannot be divided
    evenly, the first ranks receive one row more, so shapes differ between ranks.

    Args:
        tensor: an array or a tree of arrays with at least one dimension; equal shapes
            on all ranks.
        op: Average, Sum, Min, Max or Product, as in `allreduce`.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part; this rank must be among them.
        name: names the operation in error messages.
        compression: as in `allreduce`.

    Returns:
        This rank's rows of the reduced tensor or tree.

    Raises:
        NotInitialized: before ringjax.init().
        TypeError, ValueError: an argument is wrong; nothing was sent.
        jax.errors.JaxRuntimeError, ValueError: the ranks' calls differ, or a rank is
            lost. Raised when the result is used. `errors.translated` raises a
            RingjaxError instead.

    Example:
        >>> import jax.numpy as jnp, ringjax
        >>> ringjax.init()
        >>> own = ringjax.reducescatter(jnp.ones((ringjax.size(), 3)))
        >>> own.shape
        (1, 3)

    Derivatives: Average and Sum are linear. The tangent is the reducescatter of the
    tangents. Each rank's tensor contributes to all results, so the cotangent is the
    allgather of the cotangents, divided by P for Average. The derivatives of Min, Max
    and Product are those of `allreduce`.
    """
    return _reducescatter(
        "reducescatter",
        tensor,
        op,
        prescale_factor,
        postscale_factor,
        process_set=process_set,
        name=name,
        compression=compression,
    )


def grouped_reducescatter(
    tensors: PyTree[Shaped[ArrayLike, "?rows *?row"], Tree],
    op: ReduceOp | int = ReduceOp.Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
    compression: WireDtype = Compression.none,
) -> PyTree[Shaped[Array, "?own_rows *?row"], Tree]:
    """Runs `reducescatter` on a list, tuple, dict or other tree as one operation."""
    return _reducescatter(
        "grouped_reducescatter",
        tensors,
        op,
        prescale_factor,
        postscale_factor,
        process_set=process_set,
        name=name,
        compression=compression,
    )


@arguments.outside_mesh
def _reducescatter(
    what: str,
    tree: PyTree,
    op: ReduceOp | int,
    prescale: float,
    postscale: float,
    *,
    process_set: runtime.ProcessSet,
    name: str | None,
    compression: WireDtype,
) -> PyTree:
    communicator = runtime.communicator(process_set, what)
    leaves = arguments.require_rows(what, arguments.flatten(what, tree))
    size = communicator.size
    counts = tuple(split_rows(array.shape[0], size) for array in leaves.arrays)
    params = {
        "comm": communicator.id,
        "timeout": process_set.limit(),
        **arguments.reduction(
            what, leaves, op, prescale, postscale, compression=compression, name=name
        ),
        "size": size,
        "counts": counts,
        "rows": tuple(rows[communicator.rank] for rows in counts),
    }
    if not leaves.arrays:
        return tree
    return leaves.rebuild(primitive.bind("reducescatter", leaves.arrays, **params))


def split_rows(rows: int, size: int) -> tuple[int, ...]:
    """Returns the row count of each rank; the first ranks have one row more."""
    each, rest = divmod(rows, size)
    return tuple(each + (rank < rest) for rank in range(size))


# -- shape and derivatives -------------------------------------------------------------


def _shape(avals: Sequence[Aval], *, rows: Sequence[int], **params: Any) -> list[Aval]:
    return [
        jax_private.with_rows(aval, own) for aval, own in zip(avals, rows, strict=True)
    ]


def _jvp(
    p: Primitive, xs: Sequence[Traced], ts: Sequence[Tangent], **params: Any
) -> Jvp:
    """Returns ``dy_r = Σ_s (dx_s)_r`` for Sum, ``Σ_s (dx_s)_r / P`` for Average."""
    op = ReduceOp(params["reduce_op"])
    if op in primitive.LINEAR:
        return primitive.linear_jvp(p, xs, ts, **params)
    rule = _product_tangents if op is ReduceOp.Product else _extreme_tangents
    return primitive.sparse_jvp(p, xs, ts, params, rule)


def _extreme_tangents(
    xs: list[Traced], ts: list[Traced], ys: list[Traced], params: Params
) -> list[Traced]:
    """Returns the tangents of Min and Max, after an allgather of all extreme elements.

    ``dy_r = (Σ_s m_s dx_s / k)_r``. m_s is 1 for the elements of rank s that are
    extreme, and k = Σ_s m_s. The formula is a reducescatter with Sum, so JAX derives
    the transpose.
    """
    before, after = params["prescale"], params["postscale"]
    exact = {**params, "prescale": 1.0, "postscale": 1.0, "wire": -1}
    if (before, after, params["wire"]) != (1.0, 1.0, -1):
        xs = [primitive.scale(x, before) for x in xs]
        ys = primitive.bind("reducescatter", xs, **exact)
    total = {**exact, "reduce_op": int(ReduceOp.Sum)}
    everywhere = primitive.bind("allgather", ys, **_without_rows(total))
    masks = [(x == y).astype(x.dtype) for x, y in zip(xs, everywhere, strict=True)]
    holders = primitive.bind("allreduce", masks, **_without_rows(total, counts=False))
    shares = [
        m / k * primitive.scale(t, before)
        for m, k, t in zip(masks, holders, ts, strict=True)
    ]
    tangents = primitive.bind("reducescatter", shares, **total)
    return [primitive.scale(t, after) for t in tangents]


def _product_tangents(
    xs: list[Traced], ts: list[Traced], ys: list[Traced], params: Params
) -> list[Traced]:
    """Returns ``dy_r = Σ_s (dx_s)_r Π_{u≠s} (x_u)_r`` for Product.

    An alltoall sends each rank the factors of its rows. The formula is correct at zeros
    and for derivatives of any order.
    """
    del ys
    size, rows = params["size"], params["rows"]
    before, after = params["prescale"], params["postscale"]
    exchange = {
        **{k: params[k] for k in ("comm", "timeout", "name", "names", "size")},
        "counts": tuple(
            (*sent, *(own,) * size)
            for sent, own in zip(params["counts"], rows, strict=True)
        ),
    }

    def factors_of(values: list[Traced]) -> list[Traced]:
        scaled = [primitive.scale(v, before) for v in values]
        return [
            v.reshape(size, own, *v.shape[1:])
            for v, own in zip(
                primitive.bind("alltoall", scaled, **exchange), rows, strict=True
            )
        ]

    return primitive.product_tangents(factors_of(xs), factors_of(ts), after)


def _transpose(cts: list[Traced], avals: list[Aval], params: Params) -> list[Traced]:
    """Returns ``ct_x_r = (ct_y_1, .., ct_y_P)``, because ``y_s = Σ_r (x_r)_s``."""
    del avals
    factor = params["prescale"] * params["postscale"]
    if params["reduce_op"] == ReduceOp.Average:
        factor /= params["size"]
    gathered = primitive.bind("allgather", cts, **_without_rows(params))
    return [primitive.scale(ct, factor) for ct in gathered]


def _without_rows(params: Params, *, counts: bool = True) -> Params:
    """Returns the parameters for an allgather (`counts`) or allreduce of these rows."""
    kept: tuple[str, ...] = ("comm", "timeout", "name", "names")
    kept += ("size", "counts") if counts else ()
    return {k: params[k] for k in kept}


primitive.define_collective(
    "reducescatter",
    shape=_shape,
    in_place=False,
    batch=primitive.batch_rows,
    jvp=_jvp,
    transpose=_transpose,
)
