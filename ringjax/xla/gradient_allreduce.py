"""The gradients' allreduce: one primitive whose order is an array instead of an effect.

What all collectives share is in `primitive.py`; which gradients travel when was decided
in `optim.py` and is a plan of `buckets.py`. No input checks.
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

_chained_p = jax_private.new_primitive("allreduce")


def bucketed_allreduce(
    leaves: Sequence[Any],
    seq: Any,
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
      comm: who takes part.
      timeout: of waiting for other ranks.
      cuts: the indices of the leaves of each bucket, in the order of readiness.
      overlapped: False: one call that works in place. True: one START per bucket as
        soon as its leaves exist, and its DONE as late as possible: after the last
        START, or, on CPUs, when the gradients on their way are `memory` bytes. CPUs
        also cut buckets for that; ranks with other settings get an error that says
        which of them sent what. In an elastic job all of them are on their way, and
        there is one call if `elastic_memory` is not enough.
      overlapped_on_device: the same where the program is compiled for a CUDA device,
        which is known only later. None: as `overlapped`.
      memory: as RINGJAX_OVERLAP_MEMORY.
      elastic_memory: as RINGJAX_ELASTIC_OVERLAP_MEMORY; None: the job is not elastic.
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
        *out, seq = _chained_p.bind(*leaves, seq, cuts=cuts, **params)
        return list(out), seq
    out, before = [], seq
    for cut in buckets.split_evenly(len(leaves)):
        alone = {
            **primitive.select_operands(params, cut),
            "cuts": (tuple(range(len(cut))),),
        }
        *ys, seq = _chained_p.bind(*(leaves[i] for i in cut), before, **alone)
        out, before = (
            [*out, *ys],
            seq - jnp.uint32(1),
        )  # one step, however many programs
    return out, seq


def _chained_lower(
    ctx: Any,
    program: Any,
    *operands: Any,
    cuts: Any,
    overlapped: bool,
    overlapped_on_device: bool,
    memory: float,
    elastic_memory: int | None,
    **params: Any,
) -> list[Any]:
    *avals, seq_aval = ctx.avals_in
    what, devices = "allreduce_grads", len(program.devices)
    if devices:
        primitive.refuse_adasum(what, params["reduce_op"], primitive.NO_SHARDS)
    if on_device := program.platform == "cuda":
        primitive.check_nccl(what, avals, params)
        # XLA has sums over several devices at the end of the backward pass, and would
        # start nothing before.
        overlapped, memory = overlapped_on_device and not devices, math.inf
    # Inside of a shard_map a leaf is what one device has. Shards are rounded up, too.
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
    # The handlers of a device cannot read seq: there it only orders, and is counted up
    # by the program.
    return [*out, jax_private.increment(seq, seq_aval) if on_device else seq]


def _emit_chain(
    ctx: Any, program: Any, operands: Sequence[Any], calls: multi_device.Calls
) -> list[Any]:
    """As `multi_device.lower_chain`, for one device."""
    *leaves, seq = operands
    *avals, seq_aval = ctx.avals_in

    def call(number: int, seq: Any) -> Any:
        cut, attributes, kind = calls[number]
        types = [*(avals[i] for i in cut), seq_aval]
        *out, seq = jax_private.emit(
            *(ctx, program, f"ringjax_{kind}"),
            *([*(leaves[i] for i in cut), seq], types, types),
            aliases={i: i for i in range(len(types))},
            attributes=attributes,
            # The others hang on the first one by seq.
            tie=number == 0,
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


def _chained_batch(args: Any, dims: Any, **params: Any) -> Any:
    """An ensemble: all members carry the same seq, and one call moves them all."""
    primitive.refuse_adasum("allreduce_grads", params["reduce_op"], primitive.NO_VMAP)
    *leaves, seq = args
    *leaf_dims, seq_dim = dims
    if seq_dim is not None:
        seq = jax.lax.index_in_dim(seq, 0, seq_dim, keepdims=False)
    return _chained_p.bind(*leaves, seq, **params), [*leaf_dims, None]


def _chained_jvp(args: Any, ts: Any, **params: Any) -> Any:
    """Tangents travel by the stand-alone allreduce, which has all derivative rules."""

    def tangents(_xs: Any, live: Any, _ys: Any, kw: Any) -> Any:
        kept = {k: v for k, v in kw.items() if k in primitive.DEFAULTS}
        op = ReduceOp(kept["reduce_op"])
        if op not in primitive.LINEAR:
            raise TypeError(
                f"ringjax.allreduce_grads: op={op.name} has no derivative here; use "
                "Average or Sum, or reduce by ringjax.allreduce"
            )
        return primitive.bind("allreduce", live, **kept)

    # seq is an integer: its tangent is a symbolic zero, so it never is live.
    float0 = [
        t if _is_live(t) else jax_private.zero_tangent(x)
        for x, t in zip(args, ts, strict=True)
    ]
    return primitive.sparse_jvp(_chained_p, args, float0, params, tangents)


def _is_live(tangent: Any) -> bool:
    return type(tangent) is not jax_private.Zero and tangent.dtype != jax.dtypes.float0


jax_private.set_shape_rule(
    _chained_p, lambda *a, **kw: primitive.same_shape(a, **kw), ordered=False
)
jax_private.set_rules(
    _chained_p, batch=_chained_batch, jvp=_chained_jvp, transpose=None
)
lowering.register(_chained_p, _chained_lower)
