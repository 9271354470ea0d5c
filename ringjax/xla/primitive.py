"""Defines collectives as JAX primitives: shapes, batching, derivatives, native calls.

A collective takes any number of operands and is usually one native call. Each
`collectives/<op>.py` defines a collective with the functions of this module, and
`collectives/arguments.py` checks arguments. The allreduce of gradients is in
`gradient_allreduce.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ringjax import _native, errors, runtime
from ringjax.ops import ReduceOp
from ringjax.xla import buckets, compile_time, jax_private, lowering, multi_device
from ringjax.xla.jax_types import (
    Aval,
    Batched,
    Context,
    IrValue,
    Jvp,
    Params,
    Primitive,
    Tangent,
    Traced,
)
from ringjax.xla.program import Program

ShapeRule = Callable[..., list[Aval]]
# ``(cotangents, avals of the operands, params) -> cotangents of the operands``
TransposeRule = Callable[[list[Traced], list[Aval], Params], Sequence[Traced]]
# ``(operands, tangents, results, params) -> tangents of the results``
TangentRule = Callable[
    [list[Traced], list[Traced], list[Traced], Params], Sequence[Traced]
]

LINEAR = (ReduceOp.Average, ReduceOp.Sum)

# The parameters of all collectives, so that one lowering rule serves all collectives.
# `counts` and `names` have one entry for each operand: the row counts (dimension 0) of
# all ranks, and the name of the operand in errors.
DEFAULTS: dict[str, Any] = {
    "comm": 0,
    "reduce_op": int(ReduceOp.Sum),
    "wire": -1,
    "prescale": 1.0,
    "postscale": 1.0,
    "root": 0,
    "size": 0,
    "counts": (),
    "name": "",
    "names": (),
    "timeout": -1.0,
}

_primitives: dict[str, Primitive] = {}
compile_time.watch()  # if JAX was imported after `ringjax.init`


def define_collective(
    name: str,
    *,
    shape: ShapeRule,
    in_place: bool,
    batch: Callable[..., Batched] | None,
    jvp: Callable[..., Jvp] | None,
    transpose: TransposeRule | None,
) -> Primitive:
    """Defines the primitive of a collective.

    Args:
        name: a key of `_native.COLLECTIVES`.
        shape: the shape rule, ``(avals, **params) -> avals of the results``.
        in_place: True if results have the shapes of the operands. Results may then use
            the memory of the operands.
        batch: JAX's batching rule, with the primitive as an additional first argument.
        jvp: JAX's rule of forward derivatives, with the primitive as an additional
            first argument. Pass None for a collective without derivatives.
        transpose: ``(cotangents, avals, params) -> cotangents of the operands``, called
            only for operands whose cotangent is not zero. Pass None for a collective
            that is not linear.
    """
    primitive = jax_private.new_primitive(name)
    jax_private.set_shape_rule(primitive, lambda *a, **kw: shape(a, **kw), ordered=True)
    jax_private.set_rules(
        primitive,
        batch=batch and (lambda *a, **kw: batch(primitive, *a, **kw)),
        jvp=jvp and (lambda *a, **kw: jvp(primitive, *a, **kw)),
        transpose=transpose and _sparse_transpose(transpose),
    )

    def lower(
        ctx: Context, program: Program, *operands: IrValue, **params: Any
    ) -> list[IrValue]:
        if program.devices:
            refuse_adasum(name, params["reduce_op"], NO_SHARDS)
        if program.platform == "cuda" and name in ("allreduce", "reducescatter"):
            check_nccl(name, jax_private.avals_in(ctx), params)
        if name == "exchange" and (program.devices or program.platform == "cuda"):
            raise ValueError(
                "ringjax.exchange: the native exchange of exact sums runs on one CPU "
                "device; put the sums on one CPU device, or add them up as digits by "
                "ringjax.allreduce"
            )
        # Do not split in an elastic job, which repeats an operation as one call, and on
        # CUDA, where compile time does not grow with the number of tensors.
        whole = program.elastic or program.platform == "cuda"
        count = len(operands)
        pieces = buckets.split_evenly(
            count, count or 1 if whole else buckets.MAX_TENSORS
        )
        calls = [
            (cut, call_attributes(name, select_operands(params, cut))) for cut in pieces
        ]
        if not program.devices:
            return jax_private.emit_ordered(
                ctx, program, "ringjax_run", operands, calls, in_place=in_place
            )
        if program.mesh is None and operands and not in_place:
            raise ValueError(
                f"ringjax.{name}: `tensor` is in a program over {len(program.devices)} "
                "devices, and its shape changes: call it inside of jax.shard_map, "
                "where each device does it with its own part"
            )
        return multi_device.lower_ordered(
            ctx, program, operands, calls, in_place=in_place
        )

    lowering.register(primitive, lower)
    _primitives[name] = primitive
    return primitive


def bind(
    collective: str, operands: Sequence[ArrayLike], /, **params: Any
) -> list[Traced]:
    """Binds a collective, with `DEFAULTS` for parameters that are not given.

    `collective` is a name and not a primitive, because collectives use each other in
    their derivatives.
    """
    elastic = runtime.elastic()
    primitive = _primitives[collective]
    params = {**DEFAULTS, **params, "elastic": elastic}
    cuts = split_programs(operands, elastic)
    try:
        if len(cuts) == 1:
            return list(primitive.bind(*operands, **params))
        return [
            y
            for cut in cuts
            for y in primitive.bind(
                *(operands[i] for i in cut), **select_operands(params, cut)
            )
        ]
    except ValueError as error:
        # JAX raises ValueError if a call fails while C++ dispatches its program.
        if "RINGJAX[" in str(error):
            raise jax.errors.JaxRuntimeError(str(error)) from None
        raise


def read_result(result: Traced) -> np.ndarray[Any, Any]:
    """Returns the result of a collective outside of jit as a numpy array.

    On a CUDA device, a call is enqueued before the ranks have compared their calls. If
    the calls differ, the result is wrong. So this function waits for the comparison.
    """
    array = np.asarray(result)
    confirm()
    return array


def confirm() -> None:
    """Waits until all ranks have compared their device calls. Raises on a mismatch."""
    try:
        runtime.confirm()
    except errors.RingjaxError as error:
        code = getattr(error.__cause__, "code", "UNKNOWN")
        raise jax.errors.JaxRuntimeError(f"{code}: {error}") from None


def split_programs(operands: Sequence[ArrayLike], elastic: bool) -> buckets.Cuts:
    """Splits the operands of an operation into programs; returns operand positions.

    Outside of jit, an operation on many tensors is several programs, because compile
    time grows faster than the number of tensors. In an elastic job, the operation is
    one program, so that no rank can be lost in the middle of the operation.
    """
    count = len(operands)
    many = count > buckets.MAX_TENSORS and not elastic
    cut = many and jax_private.is_eager(operands)
    return buckets.split_evenly(count, buckets.MAX_TENSORS if cut else count or 1)


def call_attributes(op: str, params: Params, **extra: int) -> dict[str, Any]:
    """Returns the attributes of a native call.

    Rank and size are attributes only if a shape depends on them, because this process
    may have another rank after an elastic restart but use the same compiled program.
    All calls have equally many attributes, and one more attribute if a timeout is
    given: the native core counts the attributes to detect a timeout.
    """
    out = {k: v for k, v in params.items() if k in DEFAULTS}
    if out["timeout"] < 0:
        del out["timeout"]
    out["op"] = _native.COLLECTIVES[op]
    out["counts"] = tuple(int(n) for rows in params["counts"] for n in rows)
    out["names"] = "\n".join(n.replace("\n", " ") for n in params["names"])
    return {**out, "site": 0, "first": 0, "last": 0, "in_flight": 0, **extra}


def check_nccl(what: str, avals: Sequence[Aval], params: Params) -> None:
    """Refuses reductions that NCCL does not support, before JAX compiles."""
    op = ReduceOp(params["reduce_op"])
    if op is ReduceOp.Adasum:
        raise ValueError(
            f"ringjax.{what}: op=Adasum is not supported on CUDA devices; move the "
            "tensors to a CPU device, or use op=Average (or Sum with a scaled learning "
            "rate)"
        )
    names = params["names"] or [""] * len(avals)
    for name, aval in zip(names, avals, strict=True):
        short = jnp.issubdtype(aval.dtype, jnp.integer) and aval.dtype.itemsize == 2
        paired = jnp.issubdtype(aval.dtype, jnp.complexfloating)
        if short or (paired and op is ReduceOp.Product):
            label = f"`tensor` {name!r}" if name else "`tensor`"
            raise TypeError(
                f"ringjax.{what}: {label} is {aval.str_short()} on a CUDA device, "
                f"and NCCL cannot reduce it with op={op.name}; cast it, or move it "
                "to a CPU device"
            )


def select_operands(params: Params, kept: Sequence[int]) -> dict[str, Any]:
    per_operand = ("counts", "names")
    chosen = {k: tuple(params[k][i] for i in kept) for k in per_operand if params[k]}
    return {**params, **chosen}


# -- rules that several collectives share ----------------------------------------------


def same_shape(avals: Sequence[Aval], **params: Any) -> list[Aval]:
    """Returns the shapes of the operands, which are the shapes of the results."""
    return [a.update(weak_type=False) for a in avals]


def scale(x: Traced, factor: float) -> Traced:
    """Returns ``factor * x`` in the dtype of x, or x itself if the factor is 1."""
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


def product_tangents(
    factors: Sequence[Traced], tangents: Sequence[Traced], scaling: float
) -> list[Traced]:
    """Returns the tangents of the products over dimension 0, times `scaling`."""
    return [
        scale(jax.jvp(lambda g: jnp.prod(g, axis=0), (f,), (t,))[1], scaling)
        for f, t in zip(factors, tangents, strict=True)
    ]


def refuse_adasum(what: str, op: int, lacks: str) -> None:
    """Raises TypeError for Adasum, in rules that hold only for elementwise reductions.

    Adasum is not elementwise: it weights tensors by the dot products of whole tensors.
    """
    if op == ReduceOp.Adasum:
        raise TypeError(f"ringjax.{what}: op=Adasum has {lacks}")


NO_SHARDS = (
    "no meaning in a program over several devices: its weights are those of whole "
    "tensors, and these are in pieces"
)
NO_VMAP = (
    "no vmap: its weights are those of whole tensors, and a batch would become one; "
    "use a loop or jax.lax.map"
)


def batch_elementwise(
    p: Primitive, xs: Sequence[Traced], dims: Sequence[int | None], **params: Any
) -> Batched:
    """Batches an elementwise collective. Batch dimensions keep their positions."""
    return p.bind(*xs, **params), list(dims)


def batch_rows(
    p: Primitive, xs: Sequence[Traced], dims: Sequence[int | None], **params: Any
) -> Batched:
    """Batches a collective that divides dimension 0 between the ranks.

    So the batch dimension moves to position 1.
    """
    xs = [
        x if d is None else jnp.moveaxis(x, d, 1) for x, d in zip(xs, dims, strict=True)
    ]
    return p.bind(*xs, **params), [None if d is None else 1 for d in dims]


def linear_jvp(
    p: Primitive, xs: Sequence[Traced], ts: Sequence[Tangent], **params: Any
) -> Jvp:
    """Differentiates a linear collective, by running the collective on the tangents."""
    return sparse_jvp(p, xs, ts, params, lambda _x, live, _y, kw: p.bind(*live, **kw))


def sparse_jvp(
    p: Primitive,
    xs: Sequence[Traced],
    ts: Sequence[Tangent],
    params: Params,
    tangents: TangentRule,
) -> Jvp:
    """Returns results and tangents. Does not send tangents that are symbolic zeros.

    Which tangents are symbolic zeros depends only on the program, which is equal on all
    ranks. `tangents` computes all other tangents of results from their operands,
    tangents and results.
    """
    ys: list[Any] = p.bind(*xs, **params)
    out: list[Any] = [jax_private.zero_tangent(y) for y in ys]
    live = [i for i, t in enumerate(ts) if type(t) is not jax_private.Zero]
    if live:
        chosen: list[list[Any]] = [[v[i] for i in live] for v in (xs, ts, ys)]
        live_xs, live_ts, live_ys = chosen
        values = tangents(live_xs, live_ts, live_ys, select_operands(params, live))
        for i, value in zip(live, values, strict=True):
            out[i] = value
    return ys, out


def _sparse_transpose(
    rule: TransposeRule,
) -> Callable[..., list[Tangent | None]]:
    def transpose(cts: Sequence[Any], *xs: Any, **params: Any) -> list[Tangent | None]:
        out: list[Tangent | None] = [
            jax_private.zero_cotangent(x) if jax_private.is_linear(x) else None
            for x in xs
        ]
        live = [
            i
            for i, (ct, x) in enumerate(zip(cts, xs, strict=True))
            if type(ct) is not jax_private.Zero and jax_private.is_linear(x)
        ]
        if live:
            values = rule(
                [cts[i] for i in live],
                [xs[i].aval for i in live],
                select_operands(params, live),
            )
            for i, value in zip(live, values, strict=True):
                out[i] = value
        return out

    return transpose
