"""A call in a program over several devices of this process, which is one call still.

Every device calls with its shard of each tensor, on CUDA with a share of what it has
alike with others (`shares.py`). In `jit`, XLA decides how tensors are cut long after
the lowering: it asks for it through JAX's custom_partitioning, by a rule that lets
every sharding pass. Inside of shard_map they are cut already. Which device has which
shard is in `shards.py`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ringjax.xla import call_order, jax_private, lowering, shards, shares
from ringjax.xla.program import Program

_AXIS = "devices"  # of the mesh of a program that is cut
_NO_MESH = AbstractMesh((), ())

# Its operands, its attributes if the tensors were undivided, and what it is: a "run",
# or the "start" or the "done" of one, or a "check".
Call = tuple[tuple[int, ...], Mapping[str, Any], str]
Calls = Sequence[Call]
# On CPUs; on CUDA devices they are those of one device.
_TARGETS = {
    "run": "ringjax_meet",
    "start": "ringjax_meet_start",
    "done": "ringjax_meet_done",
    "check": "ringjax_check_shards",
}


def lower_chain(
    ctx: Any, program: Any, operands: Sequence[Any], calls: Calls
) -> list[Any]:
    """Lowers calls in one chain; the last operand and result is its order value."""
    if program.mesh is not None:
        return _emit_manual(ctx, program, operands, calls)
    last = call_order.previous_value(ctx)
    out = _lower_partitioned(ctx, program, operands, ctx.avals_in, calls, last)
    call_order.set_previous_value(ctx, out[-1], ctx.avals_in[-1])
    return out


def lower_check(
    ctx: Any, program: Any, operands: Sequence[Any], whole: Mapping[str, Any]
) -> Any:
    """Lowers a call that only reads; `operands` as for a chain, results its order."""
    # The order value comes first in the primitive, and last in all calls.
    avals = [*ctx.avals_in[1:], ctx.avals_in[0]]
    calls = [(tuple(range(len(avals) - 1)), whole, "check")]
    if program.mesh is not None:
        own = _shard_calls(
            program, shards.of_mesh(program, shares.varying_axes(avals[:-1])), calls
        )
        return _emit(ctx, program, operands, avals, own, kept=(), reads=True)[-1]
    last = call_order.previous_value(ctx)
    (order,) = _lower_partitioned(
        ctx, program, operands, avals, calls, last, reads=True
    )
    call_order.set_previous_value(ctx, order, avals[-1])
    return order


def lower_ordered(
    ctx: Any,
    program: Any,
    operands: Sequence[Any],
    wholes: Sequence[tuple[tuple[int, ...], Mapping[str, Any]]],
    *,
    in_place: bool,
) -> list[Any]:
    """Lowers calls that JAX's token of the ordered effect goes through."""
    calls = [(cut, whole, "run") for cut, whole in wholes]
    if program.mesh is not None:
        return _emit_ordered_manual(ctx, program, operands, calls, in_place=in_place)
    # What XLA cuts has no tokens, so a number has to stand for it meanwhile.
    order, aval = call_order.order_of_token(ctx)
    avals = [*ctx.avals_in, aval]
    *out, order = _lower_partitioned(ctx, program, [*operands, order], avals, calls, [])
    call_order.token_of_order(ctx, order, aval)
    return out


def _target(program: Program, kind: str) -> str:
    return f"ringjax_{kind}" if program.platform == "cuda" else _TARGETS[kind]


def _shard_calls(program: Program, which: shards.Shards, calls: Calls) -> Calls:
    """With the attributes and the handlers of the devices' calls."""
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
    """The number of tensors of calls."""
    return len({i for cut, _, _ in calls for i in cut})


def _emit_manual(
    ctx: Any, program: Program, operands: Sequence[Any], calls: Calls
) -> list[Any]:
    """A chain inside of a shard_map."""
    *avals, order = ctx.avals_in
    inside = shares.ManualShares(ctx, program, avals)
    own = _shard_calls(program, shards.of_mesh(program, inside.varying), calls)
    sent = inside.slice_values(operands[:-1])
    operands, avals = [*sent, operands[-1]], [*inside.avals, order]
    *out, last = _emit(ctx, program, operands, avals, own, kept=())
    return [*inside.gather_values(out), last]


def _emit_ordered_manual(
    ctx: Any,
    program: Program,
    operands: Sequence[Any],
    calls: Calls,
    *,
    in_place: bool,
) -> list[Any]:
    """The same with JAX's token; what changes shapes goes as it is."""
    inside = shares.ManualShares(ctx, program, ctx.avals_in if in_place else [])
    varying = inside.varying if in_place else shares.varying_axes(ctx.avals_in)
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
    ctx: Any,
    program: Program,
    operands: Sequence[Any],
    avals: Sequence[Any],
    calls: Calls,
    *,
    kept: Sequence[int],
    behind: Sequence[Any] = (),
    inside: bool = False,
    reads: bool = False,
) -> list[Any]:
    """One device's calls, each with the order value of the one before.

    `reads`: they have no other result, and their tensors are returned as they are.
    """
    *values, order = operands
    for number, (cut, attributes, target) in enumerate(calls):
        types = [*(avals[i] for i in cut), avals[len(values)]]
        more = behind if number == 0 else ()
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
    ctx: Any,
    program: Any,
    operands: Sequence[Any],
    avals: Sequence[Any],
    calls: Calls,
    behind: Sequence[tuple[Any, Any]],
    *,
    reads: bool = False,
) -> list[Any]:
    """The calls in a program that XLA is still to cut: it asks how when it does.

    `reads`: only the order value is returned, and tensors lie as they did.

    XLA's programs are kept by their text, which says nothing about the calls: so their
    digest is one more operand.
    """
    count = len(operands) - 1  # of tensors
    first = count if reads else 0  # of the values that are results
    kept = jax_private.unaliasable(program, operands[:-1])
    mesh = jax.sharding.Mesh(np.array(program.devices), (_AXIS,))
    nowhere = NamedSharding(mesh, PartitionSpec())

    # Perhaps on a thread of XLA's, whose Python state ends with it: nothing may stay
    # there.
    def partition(_mesh: Any, args: Any, results: Any) -> Any:
        shapes = [aval.shape for aval in avals[:count]]
        chosen = [
            r.sharding if _is_even(r.sharding, shape) else nowhere
            for r, shape in zip(args if reads else results, shapes, strict=False)
        ]
        cut: list[shares.Replicas | None] = [None] * count
        if shares.splits_replicas(program.platform) and not reads:
            chosen, cut = shares.assign_shares(program.devices, avals[:count], chosen)
        own = _shard_calls(
            program, shards.of_shardings(program, shapes, chosen, cut), calls
        )
        frozen = tuple((i, tuple(named.items()), target) for i, named, target in own)

        def lower(*values: Any) -> Any:
            return _device_part(values[:-1], cut, calls=frozen, kept=kept, reads=reads)

        placed = (*chosen, nowhere)
        return (
            mesh,
            lower,
            placed[first:],
            (*placed, *(nowhere for _ in behind), nowhere),
        )

    # XLA asks for what becomes of the results; every dimension of every tensor may be
    # cut, and results are cut as the tensors are.
    def rule(_mesh: Any, operands: Any, _results: Any) -> str:
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
        [*operands, *(value for value, _ in behind)],
        [*avals, *(aval for _, aval in behind)],
        avals[first:],
    )


def _device_part(
    values: Sequence[Any], cut: Sequence[shares.Replicas | None], **parameters: Any
) -> tuple[Any, ...]:
    """One device's part, with its shares of the tensors that are `cut`.

    XLA asks for it while it compiles, with jax 0.12 on the thread that compiles, where
    `jax.set_mesh` holds. That mesh is not for this part: with explicit axes JAX would
    write shardings into what lies on one device already, behind all passes of XLA that
    take them out again.
    """
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        place = jax.lax.axis_index(_AXIS)
        out = _part_p.bind(*shares.slice_all(values, cut, place), **parameters)
        return tuple(shares.gather_all(out, values, cut, _AXIS))


def _is_even(sharding: Any, shape: Sequence[int]) -> bool:
    """Whether all shards are alike, so that none has to be filled up."""
    if sharding is None:
        return False
    try:
        sharding.shard_shape(tuple(shape))
    except ValueError:
        return False
    return True


# The part of one device, where XLA has asked for it.
_part_p = jax_private.new_primitive("part")


def _lower_part(
    ctx: Any, program: Any, *operands: Any, calls: Any, kept: Any, reads: bool
) -> list[Any]:
    count = 1 + _tensor_count(calls)
    out = _emit(
        ctx,
        program,
        operands[:count],
        ctx.avals_in,
        [(cut, dict(attributes), target) for cut, attributes, target in calls],
        kept=kept,
        behind=operands[count:],
        inside=True,
        reads=reads,
    )
    return out[-1:] if reads else out


def _part_shapes(*avals: Any, calls: Any, kept: Any, reads: bool) -> list[Any]:
    del kept
    count = 1 + _tensor_count(calls)
    out = [aval.update(weak_type=False) for aval in avals[:count]]
    return out[-1:] if reads else out


jax_private.set_shape_rule(_part_p, _part_shapes, ordered=False)
lowering.register(_part_p, _lower_part)
