"""Adds leaves to an accumulator: natively on CPUs, by XLA on other devices.

The native handler (`xla_ext/ffi/exact.cc`) reads each leaf once and writes the sums in
place, where XLA makes several passes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from ringjax.exact import fixed_point
from ringjax.xla import jax_private, lowering
from ringjax.xla.jax_types import Context, IrValue, Traced
from ringjax.xla.program import Program

_PARTS = 4  # the operands of an accumulator
_add_p = jax_private.new_primitive("exact_add")


def add_leaves(
    parts: Sequence[Traced], units: Traced, leaves: Sequence[Traced], width: int
) -> list[Traced]:
    """Returns the parts after the addition, as `fixed_point.add_leaves` does."""
    operands = [*parts, units, *leaves]
    # A shard_map that tracks varying values can only do so inside of XLA's operations.
    if any(jax_private.varying_axes(jax.typeof(x)) for x in operands):
        return list(fixed_point.add_leaves(*operands, width=width))
    results: list[Traced] = _add_p.bind(*operands, width=width, name="")
    return results


def _native(*operands: Traced, width: int) -> Sequence[Traced]:
    parts = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:_PARTS]]
    call = jax.ffi.ffi_call(
        "ringjax_exact_add", parts, input_output_aliases={i: i for i in range(_PARTS)}
    )
    results: Sequence[Traced] = call(*operands, width=np.int64(width))
    return results


def _lower(
    ctx: Context, program: Program, *operands: IrValue, width: int, name: str
) -> list[IrValue]:
    del name
    # XLA can cut its own operations into shards, but not a native call.
    alone = program.platform == "cpu" and not program.devices
    add = functools.partial(_native if alone else fixed_point.add_leaves, width=width)
    avals = jax_private.avals_in(ctx)
    return jax_private.lower_function(ctx, add, operands, avals, ctx.avals_out)


jax_private.set_shape_rule(_add_p, lambda *avals, **_: avals[:_PARTS], ordered=False)
lowering.register(_add_p, _lower)
