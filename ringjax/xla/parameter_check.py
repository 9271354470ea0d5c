"""Compares model parameters between ranks in some compiled steps.

The comparison is a native call, before the allreduce of the gradients, and the sequence
number `seq` orders both. In most steps the call returns immediately. The handler
(`ffi/check.cc`) decides when a comparison is due, compares hashes, and prints the
warning. Programs for CUDA devices contain no comparison, because their handlers must
not wait for the device. For these programs, the lowering only warns about parameters
that the program visibly computes without a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ringjax import stderr
from ringjax.eager import dtypes
from ringjax.xla import buckets, jax_private, lowering, multi_device
from ringjax.xla.jax_types import Batched, Context, IrValue, Jvp, Tangent, Traced
from ringjax.xla.program import Program

_check_p = jax_private.new_primitive("check_alike")


def check(
    seq: Traced,
    params: Sequence[object],
    names: Sequence[str],
    *,
    comm: int,
    every: int,
    name: str,
    timeout: float,
    first: int = -1,
    own: Sequence[str] = (),
) -> Traced:
    """Adds a comparison of parameters to a program.

    Returns a copy of `seq` that depends on the comparison. If parameters differ between
    ranks, the first rank prints a warning.

    Args:
        seq: uint32[1], the index of the step.
        params: the parameters. Values that are not arrays of numbers are ignored.
        every: the number of steps from one comparison to the next.
        name: names the call in error messages.
        timeout: seconds to wait for other ranks.
        first: -1 if `seq` is the index of the step. Otherwise the handler counts its
            calls, and `first`, from 0 on, is the index of the first call that
            compares. In elastic jobs no call compares unless `first` is -1.
        own: the names of the parameters that this rank computes without a collective.
            Such parameters may still be equal on all ranks, so on CPUs they are
            compared like the others. On CUDA devices each of them causes a warning.
    """
    chosen: list[tuple[Any, str]] = [
        (x, n)
        for x, n in zip(params, names, strict=True)
        if getattr(getattr(x, "dtype", None), "name", None) in dtypes.NUMBERS
    ]
    for cut in buckets.split_evenly(len(chosen)) if chosen else ():
        (seq,) = _check_p.bind(
            jnp.asarray(seq),
            *(chosen[i][0] for i in cut),
            comm=comm,
            every=every,
            first=first,
            name=name,
            names=tuple(chosen[i][1] for i in cut),
            timeout=timeout,
            own=tuple(chosen[i][1] for i in cut if chosen[i][1] in own),
        )
    return seq


def _lower(
    ctx: Context, program: Program, *operands: IrValue, **params: Any
) -> list[IrValue]:
    seq, *leaves = operands
    if program.platform == "cuda":
        _warn(**params)
        return [seq]
    whole = _attributes(**params)
    if program.devices:
        # Each shard is compared with the shard at the same position on other ranks. The
        # order value, here `seq`, must be the last operand of a call.
        seq_aval, *avals = jax_private.avals_in(ctx)
        return multi_device.lower_chain(
            ctx,
            program,
            [*leaves, seq],
            [(tuple(range(len(leaves))), whole, "check")],
            [*avals, seq_aval],
            reads=True,
        )
    return jax_private.emit(
        ctx,
        program,
        "ringjax_check",
        operands,
        ctx.avals_in,
        ctx.avals_out,
        aliases={},  # `seq` is small, and a call that is repeated needs it again
        attributes=whole,
    )


def _warn(*, own: tuple[str, ...], name: str, **_: Any) -> None:
    for found in own:
        stderr.line(
            f"[ringjax] warning: {name}: {found}: this rank computes it without a "
            "collective, and on CUDA devices the ranks do not compare it; if their "
            "data differ, they part"
        )


def _attributes(
    *, names: tuple[str, ...], timeout: float, own: tuple[str, ...], **params: Any
) -> dict[str, Any]:
    del own
    return {
        **params,
        "count": len(names),
        "names": "\n".join(n.replace("\n", " ") for n in names),
        "timeout": float(timeout),
    }


def _batch(
    args: Sequence[Traced], dims: Sequence[int | None], **params: Any
) -> Batched:
    """Batches over an ensemble of models: one call with one `seq` compares all."""
    seq, *leaves = args
    if dims[0] is not None:
        seq = seq[(slice(None),) * dims[0] + (0,)]
    results: list[Traced] = _check_p.bind(seq, *leaves, **params)
    return results, [None]


def _jvp(args: Sequence[Traced], ts: Sequence[Tangent], **params: Any) -> Jvp:
    out: list[Traced] = _check_p.bind(*args, **params)
    return out, [jax_private.zero_tangent(x) for x in out]


jax_private.set_shape_rule(_check_p, lambda seq, *_, **__: [seq], ordered=False)
jax_private.set_rules(_check_p, batch=_batch, jvp=_jvp, transpose=None)
lowering.register(_check_p, _lower)
