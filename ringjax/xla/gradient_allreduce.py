"""The allreduce of gradients, a primitive that is ordered by a sequence number.

`optim.py` decides which gradients are sent together and when, and `buckets.py` plans
the calls. `primitive.py` has the functions that all collectives share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ringjax.ops import ReduceOp
from ringjax.xla import (
    buckets,
    call_order,
    jax_private,
    lowering,
    multi_device,
    primitive,
)
from ringjax.xla.backward import BackwardPass
from ringjax.xla.jax_types import (
    Batched,
    Context,
    IrValue,
    Jvp,
    Params,
    Tangent,
    Traced,
)
from ringjax.xla.program import Program

_gradients_p = jax_private.new_primitive("allreduce")


def bucketed_allreduce(
    leaves: Sequence[Traced],
    seq: Traced,
    *,
    op: int,
    wire: int,
    prescale: float,
    postscale: float,
    comm: int,
    timeout: float,
    cuts: tuple[tuple[int, ...], ...],
    overlapped: bool,
    overlapped_on_device: bool | None = None,
    memory: int,
    elastic_memory: int | None,
    name: str,
    names: tuple[str, ...],
) -> tuple[list[Traced], Traced]:
    """Allreduces the gradients `leaves` by a chain of calls, which `seq` orders.

    Other collectives use a JAX effect for their order. The gradients need no effect, so
    programs keep JAX's fast dispatch, and a failure does not make later programs fail.

    Args:
        seq: uint32[1], the sequence number that the previous step has returned.
        wire: the native core's code of the wire dtype; -1 without compression.
        timeout: seconds to wait for other ranks.
        cuts: the indices of the leaves of each bucket, in the order of readiness.
        overlapped: if True, each bucket has one START as soon as its leaves are
            computed, and one DONE as late as possible, see `buckets.plan_calls`. If
            False, one call works in place. Must be equal on all ranks; otherwise all
            ranks raise an error that names their calls.
        overlapped_on_device: the value of `overlapped` for CUDA devices; only the
            lowering knows which device is used. None means `overlapped`.
        memory: RINGJAX_OVERLAP_MEMORY, in bytes.
        elastic_memory: RINGJAX_ELASTIC_OVERLAP_MEMORY, in bytes; None if the job is not
            elastic.
        name: names the call in error messages.
        names: names the leaves in error messages; may be empty.

    Returns:
        The reduced leaves, and ``seq + 1``.
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
        **primitive.DEFAULTS,
        "overlapped": bool(overlapped),
        "overlapped_on_device": bool(on_device),
        "memory": memory,
        "elastic_memory": elastic_memory,
        "elastic": elastic_memory is not None,
        "comm": comm,
        "timeout": timeout,
        "reduce_op": int(op),
        "wire": int(wire),
        "prescale": float(prescale),
        "postscale": float(postscale),
        "name": name,
        "names": tuple(names),
    }
    if (
        overlapped
        or len(primitive.split_programs([*leaves, seq], params["elastic"])) == 1
    ):
        *results, seq = _gradients_p.bind(*leaves, seq, cuts=cuts, **params)
        return results, seq
    out: list[Traced] = []
    before = seq
    for cut in buckets.split_evenly(len(leaves)):
        alone = {
            **primitive.select_operands(params, cut),
            "cuts": (tuple(range(len(cut))),),
        }
        *ys, seq = _gradients_p.bind(*(leaves[i] for i in cut), before, **alone)
        out += ys
        # Each program increments `seq`, but all programs together must add only 1.
        before = seq - jnp.uint32(1)
    return out, seq


def _gradients_lower(
    ctx: Context,
    program: Program,
    *operands: IrValue,
    cuts: buckets.Cuts,
    overlapped: bool,
    overlapped_on_device: bool,
    memory: float,
    elastic_memory: int | None,
    **params: Any,
) -> list[IrValue]:
    *avals, seq_aval = jax_private.avals_in(ctx)
    what, devices = "allreduce_grads", len(program.devices)
    if devices:
        primitive.refuse_adasum(what, params["reduce_op"], primitive.NO_SHARDS)
    if on_device := program.platform == "cuda":
        primitive.check_nccl(what, avals, params)
        # XLA puts sums over several devices at the end of the backward pass, so with
        # several devices no bucket could start earlier.
        overlapped, memory = overlapped_on_device and not devices, math.inf
    # In a shard_map, the aval of a leaf has the shape of one device's part. The native
    # core aligns each shard.
    sizes = [
        math.prod(aval.shape) * aval.dtype.itemsize * (devices if program.mesh else 1)
        + buckets.ALIGNMENT * devices
        for aval in avals
    ]
    plan = buckets.plan_calls(sizes, cuts, memory, elastic_memory, overlapped)
    cuts, order, in_flight, overlapped = plan
    chain = call_order.chain_number(ctx) if overlapped else 0
    calls = [
        (
            cuts[site],
            primitive.call_attributes(
                "allreduce",
                primitive.select_operands(params, cuts[site]),
                site=site | chain << 16 if overlapped else 0,
                first=int(number == 0 and overlapped),
                last=int(number == len(order) - 1),
                in_flight=in_flight,
            ),
            kind,
        )
        for number, (kind, site) in enumerate(order)
    ]
    emit = multi_device.lower_chain if devices else _emit_chain
    *out, seq = emit(ctx, program, operands, calls)
    # On CUDA devices, handlers cannot read `seq`, which only orders the calls. So the
    # program increments `seq`.
    return [*out, jax_private.increment(seq, seq_aval) if on_device else seq]


def _emit_chain(
    ctx: Context,
    program: Program,
    operands: Sequence[IrValue],
    calls: multi_device.Calls,
) -> list[IrValue]:
    """Emits the chain of calls of a program on one device."""
    *leaves, seq = operands
    *avals, seq_aval = jax_private.avals_in(ctx)

    def call(number: int, seq: IrValue) -> IrValue:
        cut, attributes, kind = calls[number]
        types = [*(avals[i] for i in cut), seq_aval]
        *out, seq = jax_private.emit(
            ctx,
            program,
            f"ringjax_{kind}",
            [*(leaves[i] for i in cut), seq],
            types,
            types,
            aliases={i: i for i in range(len(types))},
            attributes=attributes,
            tie=number == 0,  # `seq` orders all other calls behind the first call
        )
        for i, value in zip(cut, out, strict=True):
            leaves[i] = value
        return seq

    before = [seq, *(value for value, _ in call_order.previous_value(ctx))]
    starts = calls[0][2] == "start" and program.platform == "cuda"
    backward = BackwardPass(leaves, before) if starts else None
    for number, (cut, _, kind) in enumerate(calls):
        if kind == "start" and backward:
            with backward.insert_after([leaves[i] for i in cut]):
                seq = call(number, seq)
                after, _, following = calls[number + 1]
                if following == "start":
                    seq = backward.delay(seq, [leaves[i] for i in after])
        else:
            seq = call(number, seq)
    return [*leaves, seq]


def _gradients_batch(
    args: Sequence[Traced], dims: Sequence[int | None], **params: Any
) -> Batched:
    """Batches over an ensemble of models: one call sends all models, with one `seq`."""
    primitive.refuse_adasum("allreduce_grads", params["reduce_op"], primitive.NO_VMAP)
    *leaves, seq = args
    *leaf_dims, seq_dim = dims
    if seq_dim is not None:
        seq = jax.lax.index_in_dim(seq, 0, seq_dim, keepdims=False)
    return _gradients_p.bind(*leaves, seq, **params), [*leaf_dims, None]


def _gradients_jvp(args: Sequence[Traced], ts: Sequence[Tangent], **params: Any) -> Jvp:
    """Reduces tangents by `ringjax.allreduce`, which has all derivative rules."""

    def tangents(
        _xs: list[Traced], live: list[Traced], _ys: list[Traced], kw: Params
    ) -> list[Traced]:
        kept = {k: v for k, v in kw.items() if k in primitive.DEFAULTS}
        op = ReduceOp(kept["reduce_op"])
        if op not in primitive.LINEAR:
            raise TypeError(
                f"ringjax.allreduce_grads: op={op.name} has no derivative here; use "
                "Average or Sum, or reduce by ringjax.allreduce"
            )
        return primitive.bind("allreduce", live, **kept)

    # The tangent of the integer `seq` becomes a symbolic zero, which is not sent.
    symbolic = [
        t if _is_live(t) else jax_private.zero_tangent(x)
        for x, t in zip(args, ts, strict=True)
    ]
    return primitive.sparse_jvp(_gradients_p, args, symbolic, params, tangents)


def _is_live(tangent: Tangent) -> bool:
    return not (
        isinstance(tangent, jax_private.Zero) or tangent.dtype == jax.dtypes.float0
    )


jax_private.set_shape_rule(
    _gradients_p, lambda *a, **kw: primitive.same_shape(a, **kw), ordered=False
)
jax_private.set_rules(
    _gradients_p, batch=_gradients_batch, jvp=_gradients_jvp, transpose=None
)
lowering.register(_gradients_p, _gradients_lower)
