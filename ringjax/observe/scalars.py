"""What this rank does, as scalars for TensorBoard and whatever is like it."""

from __future__ import annotations

import time
from typing import Any

from ringjax import _native, runtime
from ringjax.ops import bus_factor

# Of the last call: the recorder, when, calls, seconds of waiting and moving, bytes.
_last: tuple[_native.Recorder, float, tuple[float, ...]] | None = None


def write_scalars(writer: Any, step: int, prefix: str = "ringjax/") -> dict[str, float]:
    """Writes how this rank's time and calls were since the last time, as scalars.

    Call it every hundred steps or so, on rank 0 or on all that have a writer; it costs
    some microseconds, and no communication.

    Args:
        writer: what has `add_scalar(tag, value, step)` (PyTorch's SummaryWriter,
            tensorboardX), `scalar(tag, value, step)` (flax), `write_scalars(step,
            scalars)` (clu), or is called with tag, value and step
            (`tf.summary.scalar`, or a function of yours).
        step: of the program.
        prefix: of the tags.

    Returns:
        What was written, without the prefix: ``wait`` and ``move``, the shares of the
        time in which some call waited for other ranks and moved data, ``calls`` and
        ``bytes`` a second, and ``busbw`` in bytes a second while data moved. The first
        time there is nothing to compare with, and nothing is written.

    Raises:
        NotInitialized: before `init`.
        TypeError: nobody can write with this.

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
    write = _writing(writer)
    world = runtime.current("write_scalars")
    recorder, now = world.recorder, time.monotonic()
    sums = _sums(recorder, world.rank_info.size)
    before, _last = _last, (recorder, now, sums)
    if before is None or before[0] is not recorder:
        return {}
    seconds = max(now - before[1], 1e-9)
    calls, waited, moved, size, over = (
        new - old for new, old in zip(sums, before[2], strict=True)
    )
    scalars = {
        "wait": waited / seconds,
        "move": moved / seconds,
        "calls": calls / seconds,
        "bytes": size / seconds,
        "busbw": over / moved if moved > 0 else 0.0,
    }
    write({f"{prefix}{name}": value for name, value in scalars.items()}, step)
    return scalars


def _sums(recorder: _native.Recorder, ranks: int) -> tuple[float, ...]:
    totals = recorder.totals()
    size = sum(one["bytes"] for one in totals)
    over = sum(
        one["bytes"]
        * bus_factor(one["op"], ranks)
        * (ranks if one["op"] == "allgather" else 1)
        for one in totals
        if one["set"] == 0
    )
    return (float(recorder.count), *recorder.busy(), float(size), over)


def _writing(writer: Any) -> Any:
    if hasattr(writer, "write_scalars"):
        return lambda scalars, step: writer.write_scalars(step, scalars)
    for name in ("add_scalar", "scalar"):
        if hasattr(writer, name):
            return _each(getattr(writer, name))
    if callable(writer):
        return _each(writer)
    raise TypeError(
        f"ringjax.write_scalars: {type(writer).__name__} has no add_scalar, scalar or "
        "write_scalars, and cannot be called"
    )


def _each(one: Any) -> Any:
    def write(scalars: dict[str, float], step: int) -> None:
        for tag, value in scalars.items():
            one(tag, value, step)

    return write
