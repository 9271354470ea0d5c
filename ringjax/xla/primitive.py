"""From a declaration to a JAX primitive: shapes, batching, derivatives, order.

A collective takes any number of operands and is one native call. What it means is said
in `collectives/<op>.py`; what JAX calls things in `jax_private.py`. The allreduce of
gradients is in `chained.py`. No input checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax import _native, errors, runtime
from ringjax.ops import ReduceOp as ReduceOp
from ringjax.xla import buckets, jax_private, lowering, multi_device

LINEAR = (ReduceOp.Average, ReduceOp.Sum)

# Every collective has the same parameters, so that one lowering serves all of them.
# counts and names have one entry per operand; counts are rows (dimension 0) per rank.
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

ShapeRule = Callable[..., list[Any]]
TransposeRule = Callable[[list[Any], list[Any], dict[str, Any]], Sequence[Any]]

_primitives: dict[str, Any] = {}


def define_collective(
    name: str,
    *,
    shape: ShapeRule,
    in_place: bool,
    batch: Callable[..., Any] | None,
    jvp: Callable[..., Any] | None,
    transpose: TransposeRule | None,
) -> Any:
    """Declares a collective and returns its primitive.

    Args:
      name: a key of `_native.COLLECTIVES`.
      shape: ``(avals, **params) -> avals`` of the results.
      in_place: results have the shapes of the operands and may reuse their memory.
      batch: JAX's batching rule, with the primitive as an extra first argument.
      jvp: the same for JAX's rule of forward derivatives. None: not differentiable.
      transpose: ``(cotangents, operands, params) -> cotangents of the operands``; sees
        only the operands whose cotangent is not zero. None: not linear.
    """
    primitive = jax_private.new_primitive(name)
    jax_private.set_shape_rule(primitive, lambda *a, **kw: shape(a, **kw), ordered=True)
    jax_private.set_rules(
        primitive,
        batch=batch and (lambda *a, **kw: batch(primitive, *a, **kw)),
        jvp=jvp and (lambda *a, **kw: jvp(primitive, *a, **kw)),
        transpose=transpose and _sparse_transpose(transpose),
    )

    def lower(ctx: Any, program: Any, *operands: Any, **params: Any) -> list[Any]:
        if program.devices:
            refuse_adasum(name, params["reduce_op"], NO_SHARDS)
        if program.platform == "cuda" and name in ("allreduce", "reducescatter"):
            check_nccl(name, ctx.avals_in, params)
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


def bind(collective: str, operands: Sequence[Any], /, **params: Any) -> list[Any]:
    """Binds a collective; parameters that are not given have their defaults.

    By name, because the derivatives of collectives lead to each other in circles.
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
        # What JAX's C++ makes of a failure while it calls a program, here one of ours.
        if "RINGJAX[" in str(error):
            raise jax.errors.JaxRuntimeError(str(error)) from None
        raise


def read_result(result: Any) -> np.ndarray[Any, Any]:
    """The result of a collective outside of jit, for the host to act on.

    On a CUDA device a call is enqueued before it is known whether all ranks made the
    same one, and if they did not, a result of as many bytes looks like any other.

    Raises:
      jax.errors.JaxRuntimeError: the ranks made different calls, or a rank is lost.
    """
    array = np.asarray(result)
    confirm()
    return array


def confirm() -> None:
    """Waits until the ranks are known to have made the same calls on their devices.

    Raises:
      jax.errors.JaxRuntimeError: as if the call itself had failed.
    """
    try:
        runtime.confirm()
    except errors.RingjaxError as error:
        code = getattr(error.__cause__, "code", "UNKNOWN")
        raise jax.errors.JaxRuntimeError(f"{code}: {error}") from None


def split_programs(operands: Sequence[Any], elastic: bool) -> buckets.Cuts:
    """What is compiled together: outside of jit, what would be one native call in it.

    Time to compile grows faster than a program. In an elastic job the loss of a rank
    must not come between the parts of an operation.
    """
    count = len(operands)
    many = count > buckets.MAX_TENSORS and not elastic
    cut = many and jax_private.is_eager(operands)
    return buckets.split_evenly(count, buckets.MAX_TENSORS if cut else count or 1)


def call_attributes(op: str, params: dict[str, Any], **extra: int) -> dict[str, Any]:
    """The attributes of a native call: no rank and no size unless a shape needs it.

    Always the same ones, but for the timeout, which is there only if the call has one
    of its own: the core counts them to know.
    """
    out = {k: v for k, v in params.items() if k in DEFAULTS}
    if out["timeout"] < 0:
        del out["timeout"]
    out["op"] = _native.COLLECTIVES[op]
    out["counts"] = tuple(int(n) for rows in params["counts"] for n in rows)
    out["names"] = "\n".join(n.replace("\n", " ") for n in params["names"])
    return {**out, "site": 0, "first": 0, "last": 0, "in_flight": 0, **extra}


def check_nccl(what: str, avals: Sequence[Any], params: dict[str, Any]) -> None:
    """Refuses what only the CPU engine can reduce, before anything is compiled."""
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


def select_operands(params: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """The parameters of the same call with only the operands `kept`."""
    per_operand = ("counts", "names")
    chosen = {k: tuple(params[k][i] for i in kept) for k in per_operand if params[k]}
    return {**params, **chosen}


# -- rules that several collectives share ----------------------------------------------


def same_shape(avals: Sequence[Any], **params: Any) -> list[Any]:
    """Every result looks like its operand."""
    return [a.update(weak_type=False) for a in avals]


def scale(x: Any, factor: float) -> Any:
    """``factor * x`` in the dtype of x, and no operation for 1."""
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


def refuse_adasum(what: str, op: int, lacks: str) -> None:
    """Adasum weighs whole tensors by their own values: no rule of the others holds."""
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


def batch_elementwise(p: Any, xs: Any, dims: Any, **params: Any) -> Any:
    """Every element is treated alike: the batch dimension may stay where it is."""
    return p.bind(*xs, **params), list(dims)


def batch_rows(p: Any, xs: Any, dims: Any, **params: Any) -> Any:
    """Dimension 0 is cut by rank, so the batch dimension goes to place 1."""
    xs = [
        x if d is None else jnp.moveaxis(x, d, 1) for x, d in zip(xs, dims, strict=True)
    ]
    return p.bind(*xs, **params), [None if d is None else 1 for d in dims]


def linear_jvp(p: Any, xs: Any, ts: Any, **params: Any) -> Any:
    """A linear map is its own derivative; symbolic zeros are not sent."""
    return sparse_jvp(p, xs, ts, params, lambda _x, live, _y, kw: p.bind(*live, **kw))


def sparse_jvp(p: Any, xs: Any, ts: Any, params: Any, tangents: Any) -> Any:
    """Results and tangents, where ``tangents(xs, ts, ys, params)`` sees live ones only.

    Which tangents are symbolic zeros is part of the program, hence equal on all ranks.
    """
    ys = p.bind(*xs, **params)
    out = [jax_private.zero_tangent(y) for y in ys]
    live = [i for i, t in enumerate(ts) if type(t) is not jax_private.Zero]
    if live:
        chosen = ([values[i] for i in live] for values in (xs, ts, ys))
        values = tangents(*chosen, select_operands(params, live))
        for i, value in zip(live, values, strict=True):
            out[i] = value
    return ys, out


def _sparse_transpose(rule: TransposeRule) -> Any:
    def transpose(cts: Any, *xs: Any, **params: Any) -> list[Any]:
        out = [
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
