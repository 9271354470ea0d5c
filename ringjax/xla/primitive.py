"""From a declaration to a JAX primitive: shapes, batching, derivatives, order.

A collective takes any number of operands and is one native call. What it means is said
in `collectives/<op>.py`; what JAX calls things in `jax_private.py`. Also here: the
chained allreduce of gradients, whose order is an array instead of an effect. No input
checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ringjax import _native, runtime
from ringjax.ops import ReduceOp as ReduceOp
from ringjax.xla import buckets, jax_private
from ringjax.xla.backward import Backward

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


def collective(
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

    def lower(ctx: Any, platform: str, *operands: Any, **params: Any) -> list[Any]:
        if platform == "cuda" and name in ("allreduce", "reducescatter"):
            _check_nccl(name, ctx.avals_in, params)
        whole = platform == "cuda" or runtime.elastic()
        cuts = buckets.pieces(
            len(operands), len(operands) or 1 if whole else buckets.MOST
        )
        return jax_private.emit_ordered(
            ctx,
            "ringjax_run",
            operands,
            [(cut, attributes(name, select(params, cut))) for cut in cuts],
            in_place=in_place,
        )

    jax_private.register_lowering(primitive, lower)
    _primitives[name] = primitive
    return primitive


def bind(collective: str, operands: Sequence[Any], /, **params: Any) -> list[Any]:
    """Binds a collective; parameters that are not given have their defaults.

    By name, because the derivatives of collectives lead to each other in circles.
    """
    primitive, params = _primitives[collective], {**DEFAULTS, **params}
    cuts = _programs(operands)
    if len(cuts) == 1:
        return list(primitive.bind(*operands, **params))
    return [
        y
        for cut in cuts
        for y in primitive.bind(*(operands[i] for i in cut), **select(params, cut))
    ]


def _programs(operands: Sequence[Any]) -> buckets.Cuts:
    """What is compiled together: outside of jit, what would be one native call in it.

    Time to compile grows faster than a program. In an elastic job the loss of a rank
    must not come between the parts of an operation.
    """
    count = len(operands)
    many = count > buckets.MOST and not runtime.elastic()
    cut = many and jax_private.is_eager(operands)
    return buckets.pieces(count, buckets.MOST if cut else count or 1)


def attributes(op: str, params: dict[str, Any], **extra: int) -> dict[str, Any]:
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


def _check_nccl(what: str, avals: Sequence[Any], params: dict[str, Any]) -> None:
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


def select(params: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """The parameters of the same call with only the operands `kept`."""
    per_operand = ("counts", "names")
    chosen = {k: tuple(params[k][i] for i in kept) for k in per_operand if params[k]}
    return {**params, **chosen}


# -- rules that several collectives share ----------------------------------------------


def same_shape(avals: Sequence[Any], **params: Any) -> list[Any]:
    """Every result looks like its operand."""
    return [a.update(weak_type=False) for a in avals]


def scaled(x: Any, factor: float) -> Any:
    """``factor * x`` in the dtype of x, and no operation for 1."""
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


def refuse_adasum(what: str, op: int, lacks: str) -> None:
    """Adasum weighs whole tensors by their own values: no rule of the others holds."""
    if op == ReduceOp.Adasum:
        raise TypeError(f"ringjax.{what}: op=Adasum has {lacks}")


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
        values = tangents(*chosen, select(params, live))
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
                [cts[i] for i in live], [xs[i].aval for i in live], select(params, live)
            )
            for i, value in zip(live, values, strict=True):
                out[i] = value
        return out

    return transpose


# -- the gradient path: order is an array ----------------------------------------------

_chained_p = jax_private.new_primitive("allreduce_chained")


def bucketed_allreduce(
    leaves: Sequence[Any],
    seq: Any,
    *,
    op: int,
    wire: int,
    prescale: float,
    postscale: float,
    process_set: runtime.ProcessSet,
    cuts: tuple[tuple[int, ...], ...],
    overlapped: bool,
    overlapped_on_device: bool | None = None,
    name: str,
    names: tuple[str, ...],
) -> tuple[list[Any], Any]:
    """Allreduces all `leaves` in one chain that starts and ends in a sequence number.

    No JAX effect: the call keeps JAX's fast dispatch, and a failure poisons nothing.

    Args:
      leaves: arrays of any shapes and dtypes.
      seq: uint32[1], the result of the previous call of the same chain.
      op: a `ReduceOp`.
      wire: the number of the dtype on the wire, -1 for none.
      prescale: multiplies each rank's leaves.
      postscale: multiplies the results.
      process_set: who takes part.
      cuts: the indices of the leaves of each bucket, in the order of readiness.
      overlapped: False: one call that works in place. True: one START per bucket as
        soon as its leaves exist, and its DONE as late as possible: after the last
        START, or, on CPUs, when the gradients on their way are RINGJAX_OVERLAP_MEMORY
        bytes. CPUs also cut buckets for that; ranks with other settings get an error
        that says which of them sent what. In an elastic job all of them are on their
        way, and there is one call if RINGJAX_ELASTIC_OVERLAP_MEMORY is not enough.
      overlapped_on_device: the same where the program is compiled for a CUDA device,
        which is known only later. None: as `overlapped`.
      name: stands for the call in error messages.
      names: one for each leaf, for error messages, or none.

    Returns:
      The reduced leaves and ``seq + 1``.
    """
    if sorted(i for cut in cuts for i in cut) != list(range(len(leaves))):
        raise ValueError(
            f"cuts must hold every index below {len(leaves)} once, got {cuts}"
        )
    if not leaves:
        return [], seq
    seq = jnp.asarray(seq)
    if seq.shape != (1,) or seq.dtype != jnp.uint32:
        raise ValueError(
            f"ringjax.allreduce_grads: the state's `seq` must be uint32[1], got "
            f"{seq.dtype}{list(seq.shape)}; was the optimizer state cast or mapped?"
        )
    on_device = overlapped if overlapped_on_device is None else overlapped_on_device
    params = {
        **DEFAULTS,
        "overlapped": bool(overlapped),
        "overlapped_on_device": bool(on_device),
        "memory": runtime.config().overlap_memory,
        "comm": runtime.communicator(process_set, "allreduce_grads").id,
        "timeout": process_set.limit(),
        "reduce_op": int(op),
        "wire": int(wire),
        "prescale": float(prescale),
        "postscale": float(postscale),
        "name": name,
        "names": tuple(names),
    }
    if overlapped or len(_programs([*leaves, seq])) == 1:
        *out, seq = _chained_p.bind(*leaves, seq, cuts=cuts, **params)
        return list(out), seq
    out, before = [], seq
    for cut in buckets.pieces(len(leaves)):
        alone = {**select(params, cut), "cuts": (tuple(range(len(cut))),)}
        *ys, seq = _chained_p.bind(*(leaves[i] for i in cut), before, **alone)
        out, before = (
            [*out, *ys],
            seq - jnp.uint32(1),
        )  # one step, however many programs
    return out, seq


def _chained_lower(
    ctx: Any,
    platform: str,
    *operands: Any,
    cuts: Any,
    overlapped: bool,
    overlapped_on_device: bool,
    memory: int,
    **params: Any,
) -> list[Any]:
    *leaves, seq = operands
    *avals, seq_aval = ctx.avals_in
    sizes = [math.prod(aval.shape) * aval.dtype.itemsize for aval in avals]
    if on_device := platform == "cuda":
        _check_nccl("allreduce_grads", avals, params)
        overlapped = overlapped_on_device
    # There all buckets of a step can run again if a rank is lost, so all are on their
    # way at once, each as it is and as a sum; or there is one call.
    whole = runtime.elastic() and not on_device
    if whole:
        twice = 2 * buckets.packed(sizes)
        overlapped &= twice <= runtime.config().elastic_overlap_memory
    cuts, calls, in_flight = buckets.timetable(
        sizes,
        cuts,
        math.inf if on_device else memory,
        overlapped=overlapped,
        whole=whole,
    )
    chain = jax_private.chain_number(ctx) if overlapped else 0

    def call(kind: str, site: int, seq: Any) -> Any:
        cut = cuts[site]
        types = [*(avals[i] for i in cut), seq_aval]
        begins = kind != "done" and site == 0
        *out, seq = jax_private.emit(
            ctx,
            f"ringjax_{kind}",
            [*(leaves[i] for i in cut), seq],
            types,
            types,
            aliases={i: i for i in range(len(types))},
            attributes=attributes(
                "allreduce",
                select(params, cut),
                site=site | chain << 16 if overlapped else 0,
                first=int(begins and overlapped),
                last=int((kind, site) == calls[-1]),
                in_flight=in_flight,
            ),
            # The others hang on the first one by seq.
            tie=begins,
        )
        for i, value in zip(cut, out, strict=True):
            leaves[i] = value
        return seq

    ties = [seq, *jax_private.last_value(ctx)]
    backward = Backward(leaves, ties) if on_device and overlapped else None
    for kind, site in calls:
        if kind == "start" and backward:
            with backward.behind([leaves[i] for i in cuts[site]]):
                seq = call(kind, site, seq)
                if site + 1 < len(cuts):
                    seq = backward.hold(seq, [leaves[i] for i in cuts[site + 1]])
        else:
            seq = call(kind, site, seq)
    # The handlers of a device cannot read seq: there it only orders, and is counted up
    # by the program.
    return [*leaves, jax_private.plus_one(seq, seq_aval) if on_device else seq]


def _chained_batch(args: Any, dims: Any, **params: Any) -> Any:
    """An ensemble: all members carry the same seq, and one call moves them all."""
    refuse_adasum("allreduce_grads", params["reduce_op"], NO_VMAP)
    *leaves, seq = args
    *leaf_dims, seq_dim = dims
    if seq_dim is not None:
        seq = jax.lax.index_in_dim(seq, 0, seq_dim, keepdims=False)
    return _chained_p.bind(*leaves, seq, **params), [*leaf_dims, None]


def _chained_jvp(args: Any, ts: Any, **params: Any) -> Any:
    """Tangents travel by the stand-alone allreduce, which has all derivative rules."""

    def tangents(_xs: Any, live: Any, _ys: Any, kw: Any) -> Any:
        kept = {k: v for k, v in kw.items() if k in DEFAULTS}
        op = ReduceOp(kept["reduce_op"])
        if op not in LINEAR:
            raise TypeError(
                f"ringjax.allreduce_grads: op={op.name} has no derivative here; use "
                "Average or Sum, or reduce by ringjax.allreduce"
            )
        return bind("allreduce", live, **kept)

    # seq is an integer: its tangent is a symbolic zero, so it never is live.
    float0 = [
        t if _is_live(t) else jax_private.zero_tangent(x)
        for x, t in zip(args, ts, strict=True)
    ]
    return sparse_jvp(_chained_p, args, float0, params, tangents)


def _is_live(tangent: Any) -> bool:
    return type(tangent) is not jax_private.Zero and tangent.dtype != jax.dtypes.float0


jax_private.set_shape_rule(
    _chained_p, lambda *a, **kw: same_shape(a, **kw), ordered=False
)
jax_private.set_rules(
    _chained_p, batch=_chained_batch, jvp=_chained_jvp, transpose=None
)
jax_private.register_lowering(_chained_p, _chained_lower)
