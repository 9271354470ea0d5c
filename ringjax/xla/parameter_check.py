"""Now and then, a look whether all ranks have the same parameters: a native call.

It stands before the gradients' call in the chain of `seq`, and ends at once in most
steps. When it is due, how it compares and what it says is native (`ffi/check.cc`). On
CUDA devices there is none, since handlers there never wait for the device: what the
program itself shows is a warning when it is lowered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ringjax import stderr
from ringjax.eager import dtypes
from ringjax.xla import buckets, jax_private, lowering, multi_device

_check_p = jax_private.new_primitive("check_alike")


def check(
    seq: Any,
    params: Sequence[Any],
    names: Sequence[str],
    *,
    comm: int,
    every: int,
    name: str,
    timeout: float,
    first: int = -1,
    own: Sequence[str] = (),
) -> Any:
    """Returns `seq`; parameters that differ between ranks are a warning, no error.

    Args:
      seq: uint32[1], the number of the step.
      params: whatever are no arrays of numbers is left out.
      names: their names, for the warning.
      comm: who takes part.
      every: at how manieth steps they are compared.
      name: stands for the call in error messages.
      timeout: of waiting for other ranks.
      first: from 0: `seq` has no number of the step, so calls are counted, and
        this is the first one to look at. In elastic jobs, none is.
      own: those of `names` that this rank computes without a collective. They may be
        alike all the same; if nobody compares them, they are a warning.
    """
    chosen = [
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


def _lower(ctx: Any, program: Any, *operands: Any, **params: Any) -> list[Any]:
    seq, *leaves = operands
    if program.platform == "cuda":
        _warn(**params)
        return [seq]
    whole = _attributes(**params)
    if program.devices:
        # Each shard is compared by itself, with that of its place on the other ranks.
        return [multi_device.lower_check(ctx, program, [*leaves, seq], whole)]
    return jax_private.emit(
        *(ctx, program, "ringjax_check", operands, ctx.avals_in, ctx.avals_out),
        aliases={},  # a call that is repeated needs its `seq` still, which is small
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


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    """An ensemble: the parameters of all members at once, and one seq for all."""
    seq, *leaves = args
    if dims[0] is not None:
        seq = seq[(slice(None),) * dims[0] + (0,)]
    return _check_p.bind(seq, *leaves, **params), [None]


def _jvp(args: Any, ts: Any, **params: Any) -> Any:
    out = _check_p.bind(*args, **params)
    return out, [jax_private.zero_tangent(x) for x in out]


jax_private.set_shape_rule(_check_p, lambda seq, *_, **__: [seq], ordered=False)
jax_private.set_rules(_check_p, batch=_batch, jvp=_jvp, transpose=None)
lowering.register(_check_p, _lower)
