"""Lowers calls in a program over several devices of this process.

Each device makes a call with its shard of each tensor (`shards.py`), or, on CUDA, with
a share of a replicated tensor (`shares.py`). In `jit`, XLA decides long after the
lowering how tensors are sharded. Then XLA requests the call of one device through JAX's
custom_partitioning, with a rule that allows every sharding. Inside shard_map the
tensors are sharded already.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from ringjax.xla import call_order, jax_private, lowering, shards, shares
from ringjax.xla.call_order import OrderValue
from ringjax.xla.jax_types import Aval, Context, IrValue, Traced
from ringjax.xla.program import Program

_AXIS = "devices"  # the mesh axis of a program that XLA partitions
_NO_MESH = AbstractMesh((), ())

# A call: the positions of its operands, its attributes as if no tensor was sharded, and
# its kind, "run", "start", "done" or "check".
Call = tuple[tuple[int, ...], Mapping[str, Any], str]
Calls = Sequence[Call]
# The handlers on CPUs, which combine the calls of all devices. On CUDA, each device
# uses the handlers of programs on one device.
_TARGETS = {
    "run": "ringjax_meet",
    "start": "ringjax_meet_start",
    "done": "ringjax_meet_done",
    "check": "ringjax_check_shards",
}


def lower_chain(
    ctx: Context,
    program: Program,
    operands: Sequence[IrValue],
    calls: Calls,
    avals: Sequence[Aval] | None = None,
    *,
    reads: bool = False,
) -> list[IrValue]:
    """Lowers a chain of calls. The last operand and the last result are order values.

    If `reads` is true, the calls only read their tensors, and the only result is the
    order value. Pass the avals of the operands as `avals` if they are in another order
    than the operands of the primitive.
    """
    avals = avals or jax_private.avals_in(ctx)
    if program.mesh is not None:
        return _emit_manual(ctx, program, operands, avals, calls, reads=reads)
    previous = call_order.previous_value(ctx)
    out = _lower_partitioned(
        ctx, program, operands, avals, calls, previous, reads=reads
    )
    call_order.set_previous_value(ctx, out[-1], avals[-1])
    return out


def lower_ordered(
    ctx: Context,
    program: Program,
    operands: Sequence[IrValue],
    wholes: Sequence[tuple[tuple[int, ...], Mapping[str, Any]]],
    *,
    in_place: bool,
) -> list[IrValue]:
    """Lowers calls that JAX's token orders.

    Each of `wholes` is a pair: the positions of the operands of a call, and its
    attributes as if no tensor was sharded.
    """
    calls = [(cut, whole, "run") for cut, whole in wholes]
    if program.mesh is not None:
        return _emit_ordered_manual(ctx, program, operands, calls, in_place=in_place)
    # A function that XLA partitions cannot take a token, so pass an array instead.
    order, aval = call_order.order_of_token(ctx)
    avals = [*jax_private.avals_in(ctx), call_order.ORDER]
    *out, order = _lower_partitioned(ctx, program, [*operands, order], avals, calls, [])
    call_order.token_of_order(ctx, order, aval)
    return out


def _target(program: Program, kind: str) -> str:
    return f"ringjax_{kind}" if program.platform == "cuda" else _TARGETS[kind]


def _shard_calls(program: Program, which: shards.Shards, calls: Calls) -> Calls:
    """Returns the calls with the attributes and handlers of a sharded program."""
    out = []
    for cut, whole, kind in calls:
        own = which.select(cut)
        apart = program.platform == "cuda"
        attributes = (
            own.attributes_per_device(whole) if apart else own.merged_attributes(whole)
        )
        out.append((cut, attributes, _target(program, kind)))
    return out


def _tensor_count(calls: Calls) -> int:
    return len({i for cut, _, _ in calls for i in cut})


def _emit_manual(
    ctx: Context,
    program: Program,
    operands: Sequence[IrValue],
    avals: Sequence[Aval],
    calls: Calls,
    *,
    reads: bool,
) -> list[IrValue]:
    """Emits a chain inside a shard_map. If `reads` is true, sends values unsliced."""
    *tensors, order = avals
    inside = shares.ManualShares(ctx, program, [] if reads else tensors)
    varying = shares.varying_axes(tensors) if reads else inside.varying
    own = _shard_calls(program, shards.of_mesh(program, varying), calls)
    if reads:
        return _emit(ctx, program, operands, avals, own, kept=(), reads=True)[-1:]
    sent = inside.slice_values(operands[:-1])
    operands, avals = [*sent, operands[-1]], [*inside.avals, order]
    *out, last = _emit(ctx, program, operands, avals, own, kept=())
    return [*inside.gather_values(out), last]


def _emit_ordered_manual(
    ctx: Context,
    program: Program,
    operands: Sequence[IrValue],
    calls: Calls,
    *,
    in_place: bool,
) -> list[IrValue]:
    """Emits calls inside a shard_map, which JAX's token orders.

    A collective that changes shapes sends whole values, because results of shares of
    its operands would not be shares of its results.
    """
    avals = jax_private.avals_in(ctx)
    inside = shares.ManualShares(ctx, program, avals if in_place else [])
    varying = inside.varying if in_place else shares.varying_axes(avals)
    own = _shard_calls(program, shards.of_mesh(program, varying), calls)
    plain = [(cut, attributes) for cut, attributes, _ in own]
    target = _target(program, "run")
    if not in_place:
        return jax_private.emit_ordered(
            ctx, program, target, operands, plain, in_place=False
        )
    local = ctx.replace(avals_in=inside.avals, avals_out=inside.avals)
    sent = inside.slice_values(operands)
    out = jax_private.emit_ordered(local, program, target, sent, plain, in_place=True)
    ctx.set_tokens_out(local.tokens_out)
    return inside.gather_values(out)


def _emit(
    ctx: Context,
    program: Program,
    operands: Sequence[IrValue],
    avals: Sequence[Aval],
    calls: Calls,
    *,
    kept: Sequence[int],
    after: Sequence[IrValue] = (),
    inside: bool = False,
    reads: bool = False,
) -> list[IrValue]:
    """Emits the calls of one device; each takes the order value of the previous call.

    Args:
        kept: the positions of tensors whose memory no result may use.
        after: additional values on which the first call depends.
        inside: as for `jax_private.emit`.
        reads: True if the calls only read their tensors. The only result of such calls
            is the order value.

    Returns:
        The tensors after the calls, and the order value.
    """
    *values, order = operands
    for number, (cut, attributes, target) in enumerate(calls):
        types = [*(avals[i] for i in cut), avals[len(values)]]
        more = after if number == 0 else ()
        changed = () if reads else cut
        *out, order = jax_private.emit(
            ctx,
            program,
            target,
            [*(values[i] for i in cut), order, *more],
            [*types, *avals[len(avals) - len(more) :]],
            types[len(cut) - len(changed) :],
            aliases={k: k for k, i in enumerate(changed) if i not in kept},
            attributes=attributes,
            tie=number == 0,
            inside=inside,
        )
        for i, value in zip(changed, out, strict=True):
            values[i] = value
    return [*values, order]


def _lower_partitioned(
    ctx: Context,
    program: Program,
    operands: Sequence[IrValue],
    avals: Sequence[Aval],
    calls: Calls,
    after: Sequence[OrderValue],
    *,
    reads: bool = False,
) -> list[IrValue]:
    """Lowers calls in a program that XLA will partition; for `reads` see `_emit`.

    XLA requests the calls of one device when it partitions the program. XLA caches
    programs by their text, which does not contain the calls. So a digest of the calls
    is an additional operand. Tensors that calls only read keep their shardings.
    """
    # The number of tensors; the last operand is the order value.
    count = len(operands) - 1
    first = count if reads else 0  # the position of the first result in the operands
    kept = jax_private.unaliasable(program, operands[:-1])
    mesh = jax.sharding.Mesh(np.array(program.devices), (_AXIS,))
    replicated = NamedSharding(mesh, PartitionSpec())

    # XLA may call `partition` on a thread of XLA. So `partition` must not use a
    # threading.local, whose values in that thread are lost when the thread ends.
    def partition(
        _mesh: Mesh, args: Sequence[Any], results: Sequence[Any]
    ) -> tuple[Any, ...]:
        shapes = [aval.shape for aval in avals[:count]]
        chosen = [
            r.sharding if _is_even(r.sharding, shape) else replicated
            for r, shape in zip(args if reads else results, shapes, strict=False)
        ]
        cut: list[shares.Replicas | None] = [None] * count
        if shares.splits_replicas(program.platform) and not reads:
            chosen, cut = shares.assign_shares(program.devices, avals[:count], chosen)
        own = _shard_calls(
            program, shards.of_shardings(program, shapes, chosen, cut), calls
        )
        frozen = tuple((i, tuple(named.items()), target) for i, named, target in own)

        def lower(*values: Traced) -> Sequence[Traced]:
            return _device_part(values[:-1], cut, calls=frozen, kept=kept, reads=reads)

        placed = (*chosen, replicated)
        return (
            mesh,
            lower,
            placed[first:],
            (*placed, *(replicated for _ in after), replicated),
        )

    # The rule says that every dimension of every tensor may be sharded, and that a
    # result has the sharding of its operand.
    def rule(_mesh: Mesh, operands: Sequence[Any], _results: Sequence[Any]) -> str:
        numbers = itertools.count()
        sides = [" ".join(f"i{next(numbers)}" for _ in t.shape) for t in operands]
        return f"{', '.join(sides)} -> {', '.join(sides[first : count + 1])}"

    parted = custom_partitioning(lambda *values: values[first : count + 1])
    parted.def_partition(
        partition=partition, sharding_rule=rule, decode_shardings=False
    )
    text = repr([(cut, sorted(whole.items()), target) for cut, whole, target in calls])
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)
    return jax_private.lower_function(
        ctx,
        lambda *values: parted(*values, digest),
        [*operands, *(value for value, _ in after)],
        [*avals, *(aval for _, aval in after)],
        avals[first:],
    )


def _device_part(
    values: Sequence[Traced],
    cut: Sequence[shares.Replicas | None],
    **parameters: Any,
) -> tuple[Traced, ...]:
    """Binds the calls of one device, with its shares of the tensors in `cut`.

    XLA requests these calls while it compiles; with jax 0.12, on the thread where
    `jax.set_mesh` is in effect. This function hides that mesh, because with explicit
    axes JAX would add shardings to values that are on one device already, and the
    passes of XLA that remove shardings have already run.
    """
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        position = jax.lax.axis_index(_AXIS)
        out = _part_p.bind(*shares.slice_all(values, cut, position), **parameters)
        return tuple(shares.gather_all(out, values, cut, _AXIS))


def _is_even(sharding: Sharding | None, shape: Sequence[int]) -> bool:
    """Returns True if all shards have equal shapes, so that no shard is padded."""
    if sharding is None:
        return False
    try:
        sharding.shard_shape(tuple(shape))
    except ValueError:
        return False
    return True


# The calls of one device in a program that XLA partitions.
_part_p = jax_private.new_primitive("part")


def _lower_part(
    ctx: Context,
    program: Program,
    *operands: IrValue,
    calls: Sequence[tuple[Any, ...]],
    kept: Sequence[int],
    reads: bool,
) -> list[IrValue]:
    count = 1 + _tensor_count(calls)
    out = _emit(
        ctx,
        program,
        operands[:count],
        jax_private.avals_in(ctx),
        [(cut, dict(attributes), target) for cut, attributes, target in calls],
        kept=kept,
        after=operands[count:],
        inside=True,
        reads=reads,
    )
    return out[-1:] if reads else out


def _part_shapes(
    *avals: Aval, calls: Calls, kept: Sequence[int], reads: bool
) -> list[Aval]:
    del kept
    count = 1 + _tensor_count(calls)
    out = [aval.update(weak_type=False) for aval in avals[:count]]
    return out[-1:] if reads else out


jax_private.set_shape_rule(_part_p, _part_shapes, ordered=False)
lowering.register(_part_p, _lower_part)
