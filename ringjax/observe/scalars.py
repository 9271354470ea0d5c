"""Writes statistics of this rank as scalars to TensorBoard and similar tools."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ringjax import _native, runtime
from ringjax.monitor import sample
from ringjax.monitor.aggregator import CallTotals

_WriteScalar = Callable[[str, float, int], object]
_WriteScalars = Callable[[dict[str, float], int], object]


class _ScalarTotals(NamedTuple):
    recorder: _native.Recorder
    when: float
    totals: CallTotals
    bytes: int


_last: _ScalarTotals | None = None


def write_scalars(
    writer: object, step: int, prefix: str = "ringjax/"
) -> dict[str, float]:
    """Writes how this rank has spent its time since the previous call, as scalars.

    Call this function every hundred steps or so, on rank 0 or on all ranks that have a
    writer. A call takes some microseconds and needs no communication.

    Args:
        writer: an object with `add_scalar(tag, value, step)` (PyTorch's SummaryWriter,
            tensorboardX), `scalar(tag, value, step)` (flax) or `write_scalars(step,
            scalars)` (clu), or a function of tag, value and step (`tf.summary.scalar`).
        step: the index of the training step, which is passed to `writer`.
        prefix: a text in front of all tags.

    Returns:
        The scalars without the prefix: ``wait`` and ``move``, the shares of the time in
        which at least one call waited for other ranks and moved data; ``calls`` and
        ``bytes`` per second; ``busbw`` in bytes per second while data moved. The first
        call writes nothing and returns an empty dict, because there is no previous
        call.

    Raises:
        NotInitialized: before `init`.
        TypeError: `writer` is none of the objects above.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> tags = []
        >>> def write(tag, value, step):
        ...     tags.append(tag)
        >>> scalars = ringjax.write_scalars(write, step=0)
        >>> x = ringjax.eager.allreduce(np.ones(4, "f4"), name="x")
        >>> scalars = ringjax.write_scalars(write, step=100)
        >>> tags[-1]
        'ringjax/busbw'
        >>> sorted(scalars)
        ['busbw', 'bytes', 'calls', 'move', 'wait']
    """
    global _last
    write = _write_function(writer)
    now = _read()
    before, _last = _last, now
    if before is None or before.recorder is not now.recorder:
        return {}
    seconds = max(now.when - before.when, 1e-9)
    spent = now.totals.since(before.totals)
    scalars = {
        "wait": spent.waiting / seconds,
        "move": spent.moving / seconds,
        "calls": spent.calls / seconds,
        "bytes": (now.bytes - before.bytes) / seconds,
        "busbw": spent.busbw,
    }
    write({f"{prefix}{name}": value for name, value in scalars.items()}, step)
    return scalars


def _read() -> _ScalarTotals:
    world = runtime.observed("write_scalars")
    recorder, when = world.recorder, time.monotonic()
    sums = sample.sums(recorder.totals())
    waiting, moving = recorder.busy()
    seen = sample.Sample(
        world.rank_info.rank,
        world.rank_info.size,
        calls=recorder.count,
        waiting=waiting,
        moving=moving,
        sums=sums,
    )
    size = sum(collective.bytes for collective in sums.values())
    return _ScalarTotals(recorder, when, CallTotals.of(seen), size)


def _write_function(writer: object) -> _WriteScalars:
    if (write := getattr(writer, "write_scalars", None)) is not None:
        return lambda scalars, step: write(step, scalars)
    for name in ("add_scalar", "scalar"):
        if hasattr(writer, name):
            return _one_by_one(getattr(writer, name))
    if callable(writer):
        return _one_by_one(writer)
    raise TypeError(
        f"ringjax.write_scalars: {type(writer).__name__} has no add_scalar, scalar or "
        "write_scalars, and cannot be called"
    )


def _one_by_one(write: _WriteScalar) -> _WriteScalars:
    def write_all(scalars: dict[str, float], step: int) -> None:
        for tag, value in scalars.items():
            write(tag, value, step)

    return write_all
