"""allreduce: each rank receives the elementwise reduction of all ranks' tensors.

`allreduce_grads` does not use this module, but `xla/gradient_allreduce.py`.

The derivatives of allreduce and of all other collectives are defined as follows. P
programs compute ``y_r = f_r(x_1, …, x_P)``. Each rank has its own loss, and the total
loss is the sum of the losses of all ranks. A cotangent is the derivative of the total
loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from ringjax import _native, runtime
from ringjax.collectives import arguments
from ringjax.compression import Compression, WireDtype
from ringjax.ops import ReduceOp
from ringjax.xla import primitive

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import PyTree, Shaped

    from ringjax.xla.jax_types import (
        Aval,
        Batched,
        Jvp,
        Params,
        Primitive,
        Tangent,
        Traced,
        Tree,
    )

_WIRES = {"f16": jnp.float16, "bf16": jnp.bfloat16}


def allreduce(
    tensor: PyTree[Shaped[ArrayLike, "*?shape"], Tree],
    op: ReduceOp | int = ReduceOp.Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
    compression: WireDtype = Compression.none,
) -> PyTree[Shaped[Array, "*?shape"], Tree]:
    """Reduces `tensor` over all ranks; all ranks receive the same result, bit for bit.

    Works eagerly and inside jit, grad, vmap, scan, cond, while_loop and checkpoint. A
    whole tree is one operation.

    Args:
        tensor: an array, a number, or a tree of these; equal shapes on all ranks.
        op: Average, Sum, Min, Max, Product or Adasum. Average of integers truncates
            toward zero. For bool, Sum and Max mean "or", Min and Product mean "and".
            Sums of integers wrap around in their dtype, as in NumPy, even if Average
            divides the sums afterwards: convert `tensor` to a wider dtype if sums may
            not fit. Adasum needs floats, CPUs and 2**n ranks; see below.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part; this rank must be among them.
        name: names the operation in error messages.
        compression: with `Compression.fp16` or `Compression.bf16`, float32 and float64
            tensors are sent in this dtype, and sums are computed in float32. Adasum
            does not support compression.

    Returns:
        The reduced tensor or tree, with the shapes and dtypes of `tensor`.

    Raises:
        NotInitialized: before ringjax.init().
        TypeError, ValueError: an argument is wrong; nothing was sent.
        jax.errors.JaxRuntimeError, ValueError: the ranks' calls differ, or a rank is
            lost. Raised when the result is used. `errors.translated` raises a
            RingjaxError instead.

    Example:
        >>> import jax, jax.numpy as jnp, ringjax
        >>> ringjax.init()
        >>> mean = jax.jit(lambda x: ringjax.allreduce(x))(jnp.arange(3.0))
        >>> mean.shape
        (3,)

    Derivatives: Average and Sum are linear and symmetric, so the tangent is the
    allreduce of the tangents, and the cotangent is the allreduce of the cotangents. Min
    and Max pass tangents and cotangents to the rank that holds the extreme element; if
    several ranks hold the extreme element, they receive equal shares. Product
    follows the product rule, also if elements are zero. Adasum has neither derivative
    nor vmap: `grad` and `vmap` raise a TypeError.

    Adasum adds orthogonal gradients and averages parallel gradients. Adasum combines
    the tensors a and b of two ranks into ``(1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b``,
    then combines the results of two pairs of ranks in the same way, and so on. Each
    tensor (leaf) has its own dot products, which are summed in double precision. If
    ``|a|²`` is 0, or underflows, the factor of a is 1.

    References:
        P. Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of
        workstations, J. Parallel Distrib. Comput. 69 (2009) (ring).

        S. Maleki et al., Scaling distributed training with adaptive summation, MLSys
        2021, arXiv:2006.02924 (Adasum).
    """
    return _allreduce(
        "allreduce",
        tensor,
        op,
        prescale_factor,
        postscale_factor,
        process_set=process_set,
        name=name,
        compression=compression,
    )


def grouped_allreduce(
    tensors: PyTree[Shaped[ArrayLike, "*?shape"], Tree],
    op: ReduceOp | int = ReduceOp.Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
    compression: WireDtype = Compression.none,
) -> PyTree[Shaped[Array, "*?shape"], Tree]:
    """Reduces a list, tuple, dict or any other tree as one operation; see `allreduce`.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> total, count = ringjax.grouped_allreduce((1.0, 2.0), op=ringjax.Sum)
        >>> sorted(ringjax.grouped_allreduce({"loss": 1.0, "error": 2.0}))
        ['error', 'loss']
    """
    return _allreduce(
        "grouped_allreduce",
        tensors,
        op,
        prescale_factor,
        postscale_factor,
        process_set=process_set,
        name=name,
        compression=compression,
    )


def _allreduce(
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
    leaves = arguments.flatten(what, tree, elementwise=True)
    params: dict[str, Any] = {
        "comm": communicator.id,
        "timeout": process_set.limit(),
        **arguments.reduction(
            what,
            leaves,
            op,
            prescale,
            postscale,
            compression=compression,
            name=name,
            adasum_ranks=communicator.size,
        ),
    }
    if not leaves.arrays:
        return tree
    # A shape in the derivative of Product depends on the number of ranks.
    if params["reduce_op"] == ReduceOp.Product:
        params["ranks"] = communicator.size
    return leaves.rebuild(primitive.bind("allreduce", leaves.arrays, **params))


# -- batching and derivatives ----------------------------------------------------------


def _batch(
    p: Primitive, xs: Sequence[Traced], dims: Sequence[int | None], **params: Any
) -> Batched:
    primitive.refuse_adasum("allreduce", params["reduce_op"], primitive.NO_VMAP)
    return primitive.batch_elementwise(p, xs, dims, **params)


def _jvp(
    p: Primitive, xs: Sequence[Traced], ts: Sequence[Tangent], **params: Any
) -> Jvp:
    """Returns ``dy``: ``Σ_s dx_s`` for Sum, ``Σ_s dx_s / P`` for Average."""
    op = ReduceOp(params["reduce_op"])
    primitive.refuse_adasum("allreduce", op, "no derivative: it is not linear")
    if op in primitive.LINEAR:
        return primitive.linear_jvp(p, xs, ts, **params)
    rule = _product_tangents if op is ReduceOp.Product else _extreme_tangents
    return primitive.sparse_jvp(p, xs, ts, params, rule)


def _extreme_tangents(
    xs: list[Traced], ts: list[Traced], ys: list[Traced], params: Params
) -> list[Traced]:
    """Returns ``dy = Σ_s m_s dx_s / k`` for Min and Max.

    m_s is 1 for the elements of rank s that are extreme, and k = Σ_s m_s. m_s and k are
    constant almost everywhere. The formula is a Sum, so JAX derives the transpose: rank
    r's cotangent is ``m_r / k · Σ_s ct_s``.
    """
    before, after = params["prescale"], params["postscale"]
    exact = {**params, "prescale": 1.0, "postscale": 1.0, "wire": -1}
    if (before, after, params["wire"]) != (1.0, 1.0, -1):
        xs = [_as_sent(primitive.scale(x, before), params["wire"]) for x in xs]
        ys = primitive.bind("allreduce", xs, **exact)
    total = {**exact, "reduce_op": int(ReduceOp.Sum)}
    masks = [(x == y).astype(x.dtype) for x, y in zip(xs, ys, strict=True)]
    holders = primitive.bind("allreduce", masks, **total)
    shares = [
        m / k * primitive.scale(t, before)
        for m, k, t in zip(masks, holders, ts, strict=True)
    ]
    tangents = primitive.bind("allreduce", shares, **total)
    return [primitive.scale(t, after) for t in tangents]


def _as_sent(x: Traced, wire: int) -> Traced:
    """Returns x as other ranks receive it: rounded to the wire dtype."""
    for name, dtype in _WIRES.items():
        if wire == _native.DTYPES[name] and x.dtype in (jnp.float32, jnp.float64):
            return x.astype(dtype).astype(x.dtype)
    return x


def _product_tangents(
    xs: list[Traced], ts: list[Traced], ys: list[Traced], params: Params
) -> list[Traced]:
    """Returns ``dy = Σ_s dx_s Π_{u≠s} x_u`` for Product, from the factors of all ranks.

    Dividing the product by a factor would fail at zeros. The allgather of all factors
    needs P times the memory, but is correct at zeros and for derivatives of any order.
    """
    del ys
    size = params["ranks"]
    before, after = params["prescale"], params["postscale"]
    gather = {
        **{k: params[k] for k in ("comm", "timeout", "name", "names")},
        "size": size,
        "counts": ((1,) * size,) * len(xs),
    }
    fs, ds = (
        primitive.bind(
            "allgather", [primitive.scale(v, before)[None] for v in values], **gather
        )
        for values in (xs, ts)
    )
    return primitive.product_tangents(fs, ds, after)


def _transpose(cts: list[Traced], avals: list[Aval], params: Params) -> list[Traced]:
    """Returns ``ct_x = allreduce(ct_y)``, because Sum and Average are symmetric."""
    del avals
    primitive.refuse_adasum(
        "allreduce", params["reduce_op"], "no transpose: it is not linear"
    )
    return primitive.bind("allreduce", cts, **params)


primitive.define_collective(
    "allreduce",
    shape=primitive.same_shape,
    in_place=True,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
)
