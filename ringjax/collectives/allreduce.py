"""allreduce: every rank gets the reduction of all ranks' tensors, element by element.

Optimizers do not use this module: `gradient_allreduce.bucketed_allreduce` reduces
gradients. The reductions themselves are native.

The mathematics of the derivatives, here and in the other collectives: P programs run
``y_r = f_r(x_1 .. x_P)``; a rank's loss is its own, and the world's loss is the sum of
all ranks' losses. A cotangent is the derivative of that sum.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ringjax import _native, runtime
from ringjax.collectives import arguments
from ringjax.compression import Compression, WireDtype
from ringjax.ops import ReduceOp
from ringjax.xla import primitive

_WIRES = {"f16": jnp.float16, "bf16": jnp.bfloat16}


def allreduce(
    tensor: Any,
    op: int = ReduceOp.Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
    compression: WireDtype = Compression.none,
) -> Any:
    """Reduces `tensor` over all ranks; every rank gets the same result, bit for bit.

    Works eagerly and inside jit, grad, vmap, scan, cond, while_loop and checkpoint. A
    whole tree travels as one operation.

    Args:
      tensor: an array, a number, or a tree of them; the same shapes on all ranks.
      op: Average, Sum, Min, Max, Product or Adasum. Average of integers truncates
        toward zero; for bool, Sum and Max are "or", Min and Product are "and". Sums of
        integers wrap around in their own dtype, as in NumPy, also those that Average
        then divides: widen what may not fit. Adasum is for floats, a power of two of
        ranks and CPUs; see below.
      prescale_factor: multiplies each rank's tensor before the reduction.
      postscale_factor: multiplies the result.
      process_set: the ranks that take part; this rank must be one of them.
      name: stands for the operation in error messages.
      compression: ringjax.Compression.fp16 or .bf16: float32 and float64 tensors travel
        in that type, sums are formed in float32. Not with Adasum.

    Returns:
      The reduced tensor or tree, with the shapes and dtypes of `tensor`.

    Raises:
      NotInitialized: before ringjax.init().
      TypeError, ValueError: a bad argument; nothing was sent.
      jax.errors.JaxRuntimeError, ValueError: when the result is used, if the ranks
        disagree or one is lost; `errors.translated` raises a RingjaxError instead.

    Example:
      >>> import jax, jax.numpy as jnp, ringjax
      >>> ringjax.init()
      >>> mean = jax.jit(lambda x: ringjax.allreduce(x))(jnp.arange(3.0))

    Derivatives: Average and Sum are linear and symmetric, so the tangent is the
    allreduce of the tangents and the cotangent the allreduce of the cotangents. Min and
    Max pass both to the rank that holds the extreme element; ranks that tie share them
    equally. Product follows the product rule exactly, also where elements are zero.
    Adasum has no derivative and no vmap: both are a TypeError.

    Adasum adds gradients that are orthogonal and averages those that are parallel, pair
    by pair: ``(1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b`` of two ranks, the same of
    their results, and so on. Every tensor (leaf) is weighed by itself. Products are
    summed in double; where ``|a|²`` is 0, or underflows, its factor is 1.

    References:
      P. Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of
      workstations, J. Parallel Distrib. Comput. 69 (2009).
      S. Maleki et al., Scaling distributed training with adaptive summation, MLSys
      2021, arXiv:2006.02924.
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
    tensors: Any,
    op: int = ReduceOp.Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
    compression: WireDtype = Compression.none,
) -> Any:
    """`allreduce` of a list, tuple, dict or any tree as one operation; returns such.

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
    tree: Any,
    op: int,
    prescale: float,
    postscale: float,
    *,
    process_set: runtime.ProcessSet,
    name: str | None,
    compression: WireDtype,
) -> Any:
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
    if params["reduce_op"] == ReduceOp.Product:  # its derivative needs it, for a shape
        params["ranks"] = communicator.size
    return leaves.rebuild(primitive.bind("allreduce", leaves.arrays, **params))


# -- batching and derivatives ----------------------------------------------------------


def _batch(p: Any, xs: Any, dims: Any, **params: Any) -> Any:
    primitive.refuse_adasum("allreduce", params["reduce_op"], primitive.NO_VMAP)
    return primitive.batch_elementwise(p, xs, dims, **params)


def _jvp(p: Any, xs: Any, ts: Any, **params: Any) -> Any:
    """Sum: ``dy = Σ_s dx_s``; Average: the same over P; the others see below."""
    op = ReduceOp(params["reduce_op"])
    primitive.refuse_adasum("allreduce", op, "no derivative: it is not linear")
    if op in primitive.LINEAR:
        return primitive.linear_jvp(p, xs, ts, **params)
    rule = _product_tangents if op is ReduceOp.Product else _extreme_tangents
    return primitive.sparse_jvp(p, xs, ts, params, rule)


def _extreme_tangents(
    xs: list[Any], ts: list[Any], ys: list[Any], params: dict[str, Any]
) -> list[Any]:
    """Min, Max: ``dy = Σ_s m_s dx_s / k``.

    m_s is 1 where rank s holds the extreme element, and k = Σ_s m_s. Both are constants
    almost everywhere, and the rest is a Sum, which transposes by itself: rank r's
    cotangent is ``m_r / k · Σ_s ct_s``.
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


def _as_sent(x: Any, wire: int) -> Any:
    """What the other ranks see of x if it is compressed on the way."""
    for name, dtype in _WIRES.items():
        if wire == _native.DTYPES[name] and x.dtype in (jnp.float32, jnp.float64):
            return x.astype(dtype).astype(x.dtype)
    return x


def _product_tangents(
    xs: list[Any], ts: list[Any], ys: list[Any], params: dict[str, Any]
) -> list[Any]:
    """Product: ``dy = Σ_s dx_s Π_{u≠s} x_u``, on the factors of all ranks.

    Dividing the product by one factor would be wrong at zeros; gathering costs P times
    the memory and is right for every order of derivative.
    """
    del ys
    size = params["ranks"]
    before, after = params["prescale"], params["postscale"]
    gather = {
        **{k: params[k] for k in ("comm", "timeout", "name", "names")},
        "size": size,
        "counts": ((1,) * size,) * len(xs),
    }
    fs = primitive.bind(
        "allgather", [primitive.scale(x, before)[None] for x in xs], **gather
    )
    ds = primitive.bind(
        "allgather", [primitive.scale(t, before)[None] for t in ts], **gather
    )
    return [
        primitive.scale(jax.jvp(lambda g: jnp.prod(g, axis=0), (f,), (d,))[1], after)
        for f, d in zip(fs, ds, strict=True)
    ]


def _transpose(cts: list[Any], avals: list[Any], params: dict[str, Any]) -> list[Any]:
    """Sum and Average are symmetric maps of the world: ``ct_x = allreduce(ct_y)``."""
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
