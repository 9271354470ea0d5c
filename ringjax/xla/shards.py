"""A call in a program over several devices of this process, which is one call still.

Every device calls with its shard of each tensor, they meet natively, and all shards go
to the other ranks together (`engine/communicator/meeting.h`). Here is said which device
has which shard. In `jit`, XLA decides how tensors are cut long after the lowering: it
asks for it through JAX's custom_partitioning, by a rule that lets every sharding pass.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ringjax.xla import jax_private, ties

_TARGET, _CHECK = "ringjax_meet", "ringjax_check_shards"


class Shards(NamedTuple):
    """Where the shards of a call's tensors lie.

    Attributes:
      devices: the local ones, as XLA numbers them, in an order that they share.
      names: the same devices in words, alike on ranks with the same ones.
      of: for each tensor, for each device, the number of the shard that it has.
      parts: for each tensor, the place of each shard in it, such as "[0:4,2:8]".
    """

    devices: tuple[int, ...]
    names: str
    of: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[str, ...], ...]

    def select(self, kept: Sequence[int]) -> Shards:
        """Those of the tensors `kept`."""
        return self._replace(
            of=tuple(self.of[i] for i in kept), parts=tuple(self.parts[i] for i in kept)
        )

    def attributes(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes of the devices' calls; `whole` are those of undivided tensors.

        What there is for each tensor becomes one for each shard.
        """
        count = [len(parts) for parts in self.parts]
        names = whole["names"].split("\n") if whole["names"] else [""] * len(count)
        rows = np.array(whole.get("counts", ()), np.int64)
        if count:
            rows = rows.reshape(len(count), -1)
        cut = "\n".join(" ".join(parts) for parts in self.parts)
        digest = hashlib.sha256(cut.encode()).hexdigest()
        # Only what the handler reads may be there.
        rest = {"counts": np.repeat(rows, count, axis=0)} if "counts" in whole else {}
        return {
            **whole,
            **{k: tuple(int(n) for n in v.flat) for k, v in rest.items()},
            "names": "\n".join(
                name + part
                for name, parts in zip(names, self.parts, strict=True)
                for part in parts
            ),
            "devices": self.devices,
            "shards": tuple(itertools.chain(*self.of)),
            "partition": f"{self.names}\n{digest}",
        }


def _name(devices: Sequence[Any]) -> str:
    numbers = ", ".join(str(n) for n in sorted(d.local_hardware_id for d in devices))
    return f"{len(devices)} devices ({numbers})"


def of_shardings(
    devices: Sequence[Any], shapes: Sequence[Any], shardings: Sequence[Any]
) -> Shards:
    """The shards of tensors of these shapes, numbered by their places in the tensor."""
    of, parts = [], []
    for shape, sharding in zip(shapes, shardings, strict=True):
        places = sharding.devices_indices_map(tuple(shape))
        bounds = [
            tuple(s.indices(n)[:2] for s, n in zip(places[d], shape, strict=True))
            for d in devices
        ]
        distinct = sorted(set(bounds))
        of.append(tuple(distinct.index(place) for place in bounds))
        parts.append(
            tuple(
                "[" + ",".join(f"{a}:{b}" for a, b in place) + "]" for place in distinct
            )
            if len(distinct) > 1
            else ("",)
        )
    return Shards(tuple(d.id for d in devices), _name(devices), tuple(of), tuple(parts))


def of_mesh(mesh: Any, varying: Sequence[frozenset[str] | None]) -> Shards:
    """The shards of values inside of a shard_map over all of `mesh`.

    Args:
      mesh: its local devices take part; a value's shard is named by its place in it.
      varying: for each value the axes over which it differs; None: perhaps over all.
    """
    here = [
        (place, device)
        for place, device in np.ndenumerate(mesh.devices)
        if device.process_index == jax.process_index()
    ]
    of, parts = [], []
    for axes in varying:
        differs = [axes is None or name in axes for name in mesh.axis_names]
        keys = [
            tuple(p for p, d in zip(place, differs, strict=True) if d)
            for place, _ in here
        ]
        distinct = sorted(set(keys))
        of.append(tuple(distinct.index(key) for key in keys))
        named = [n for n, d in zip(mesh.axis_names, differs, strict=True) if d]
        parts.append(
            tuple(
                "@" + ",".join(f"{n}={i}" for n, i in zip(named, key, strict=True))
                for key in distinct
            )
            if len(distinct) > 1
            else ("",)
        )
    devices = [device for _, device in here]
    return Shards(tuple(d.id for d in devices), _name(devices), tuple(of), tuple(parts))


# -- lowering --------------------------------------------------------------------------

# Its operands, its attributes if the tensors were undivided, and the handler.
Call = tuple[tuple[int, ...], Mapping[str, Any], str]
Calls = Sequence[Call]


def call(cut: tuple[int, ...], whole: Mapping[str, Any], kind: str = "run") -> Call:
    """A call of a chain: a "run", or the "start" or the "done" of one."""
    return cut, whole, _TARGET if kind == "run" else f"{_TARGET}_{kind}"


def lower_chain(
    ctx: Any, program: Any, operands: Sequence[Any], calls: Calls
) -> list[Any]:
    """Lowers calls in one chain; the last operand and result is its order value."""
    if program.mesh is not None:
        own = _cut(of_mesh(program.mesh, _varying(ctx.avals_in[:-1])), calls)
        return _emit(ctx, operands, ctx.avals_in, own, kept=())
    last = ties.last_values(ctx)
    out = _split(ctx, program, operands, ctx.avals_in, calls, last)
    ties.note_value(ctx, out[-1], ctx.avals_in[-1])
    return out


def lower_check(
    ctx: Any, program: Any, operands: Sequence[Any], whole: Mapping[str, Any]
) -> Any:
    """Lowers a call that only reads; `operands` as for a chain, results its order."""
    # The order value comes first in the primitive, and last in all calls.
    avals = [*ctx.avals_in[1:], ctx.avals_in[0]]
    calls = [(tuple(range(len(avals) - 1)), whole, _CHECK)]
    if program.mesh is not None:
        own = _cut(of_mesh(program.mesh, _varying(avals[:-1])), calls)
        return _emit(ctx, operands, avals, own, kept=(), reads=True)[-1]
    last = ties.last_values(ctx)
    (order,) = _split(ctx, program, operands, avals, calls, last, reads=True)
    ties.note_value(ctx, order, avals[-1])
    return order


def lower_ordered(
    ctx: Any, program: Any, operands: Sequence[Any], calls: Calls, *, in_place: bool
) -> list[Any]:
    """Lowers calls that JAX's token of the ordered effect goes through."""
    if program.mesh is not None:
        own = _cut(of_mesh(program.mesh, _varying(ctx.avals_in)), calls)
        plain = [(cut, attributes) for cut, attributes, _ in own]
        return jax_private.emit_ordered(
            ctx, _TARGET, operands, plain, in_place=in_place
        )
    # What XLA cuts has no tokens, so a number has to stand for it meanwhile.
    order, aval = ties.order_of_token(ctx)
    avals = [*ctx.avals_in, aval]
    *out, order = _split(ctx, program, [*operands, order], avals, calls, [])
    ties.token_of_order(ctx, order, aval)
    return out


def _cut(shards: Shards, calls: Calls) -> Calls:
    return [(cut, shards.select(cut).attributes(w), target) for cut, w, target in calls]


def _count(calls: Calls) -> int:
    """The number of tensors of calls."""
    return len({i for cut, _, _ in calls for i in cut})


def _varying(avals: Sequence[Any]) -> list[frozenset[str] | None]:
    """Over which axes values differ, where JAX knows it (check_vma).

    It does if it says so of any; else they may differ over all.
    """
    known = [jax_private.varying(aval) for aval in avals]
    return list(known) if any(known) else [None] * len(avals)


def _emit(
    ctx: Any,
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


def _split(
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
    kept = jax_private.kept_of(operands[:-1])
    here = [d for d in program.devices if d.process_index == jax.process_index()]
    mesh = jax.sharding.Mesh(np.array(program.devices), ("devices",))
    nowhere = NamedSharding(mesh, PartitionSpec())

    # On a thread of XLA's, whose Python state ends with it: nothing may stay there.
    def partition(_mesh: Any, args: Any, results: Any) -> Any:
        shapes = [aval.shape for aval in avals[:count]]
        chosen = [
            r.sharding if _is_even(r.sharding, shape) else nowhere
            for r, shape in zip(args if reads else results, shapes, strict=False)
        ]
        own = _cut(of_shardings(here, shapes, chosen), calls)
        frozen = tuple(
            (cut, tuple(named.items()), target) for cut, named, target in own
        )

        def lower(*values: Any) -> Any:
            out = _part_p.bind(*values[:-1], calls=frozen, kept=kept, reads=reads)
            return tuple(out)

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
    del program
    count = 1 + _count(calls)
    out = _emit(
        ctx,
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
    count = 1 + _count(calls)
    out = [aval.update(weak_type=False) for aval in avals[:count]]
    return out[-1:] if reads else out


jax_private.set_shape_rule(_part_p, _part_shapes, ordered=False)
jax_private.register_lowering(_part_p, None, _lower_part)
