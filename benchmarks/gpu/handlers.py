"""Host time of ringjax's FFI handler for allreduce in one step, in each fusion mode.

The handler counts the seconds that it runs. The benchmark waits for every step; the
increase of that counter over a step is one sample. On a CPU a call takes at most
`buckets.MAX_TENSORS` buffers, and a step with more buffers makes several calls: their
seconds are added up. There is one rank, so NCCL has nearly no work on the device.
"""

from __future__ import annotations

import argparse
import os

from benchmarks.gpu.models import SETS
from benchmarks.gpu.section import (
    Report,
    Spread,
    allreduce_stats,
    attempt,
    on_gpu,
    require_device_path,
    section,
)

MODES = ("hybrid", "pack", "group")
TARGETS = {"ResNet-50": -20.0, "transformer": -100.0}  # most µs of the handler
WARM_UP = 3


def measure(report: Report, mode: str, name: str, steps: int, scale: int) -> None:
    """Measures a compiled program whose only work is the allreduce of a set."""
    import jax
    import jax.numpy as jnp

    import ringjax
    from ringjax.xla import buckets

    shapes = SETS[name]
    if scale > 1:  # a dry run needs the number of buffers, not their size
        shapes = [tuple(max(1, n // scale) for n in shape) for shape in shapes]
    tx = ringjax.allreduce_grads(overlap=False)
    state = tx.init(None)
    step = jax.jit(lambda g, s: tx.update(g, s), donate_argnums=(0, 1))
    grads = jax.jit(lambda: [jnp.ones(shape) for shape in shapes])()
    samples: list[float] = []
    calls, launches, ops = 0.0, 0.0, 0.0
    for number in range(steps + WARM_UP):
        before = allreduce_stats()
        grads, state = step(grads, state)
        jax.block_until_ready((grads, state))
        after = allreduce_stats()
        grown = {k: v - before.get(k, 0) for k, v in after.items()}
        if number >= WARM_UP:
            calls = grown["calls"]
            samples.append(grown["seconds"] * 1e6)
            launches, ops = grown.get("launches", 0), grown.get("nccl_ops", 0)
    spread = Spread.of(samples)
    what = f"{len(shapes)} buffers, {mode}"
    target = ""
    if on_gpu():
        target = report.compare_with_target(
            f"handler, {what}", spread.median, TARGETS[name], " µs"
        )
    expected = 1 if on_gpu() else len(buckets.split_evenly(len(shapes)))
    if calls != expected:
        report.fail(f"{what}: {calls:g} calls a step instead of {expected}")
    numbers = [f"{n:g}" for n in (calls, launches, ops)]
    report.row(name, len(shapes), mode, spread.show(), *numbers, target)
    report.value(f"handler_us/{what}", samples)


def world(report: Report, mode: str, options: argparse.Namespace) -> None:
    """Measures one mode in a world of its own. The mode is a setting of the world."""
    import ringjax

    os.environ["RINGJAX_FUSION"] = mode
    ringjax.init()
    try:
        for name in TARGETS:
            words = (report, mode, name, options.steps, options.scale)
            attempt(report, f"{mode}, {name}", measure, *words)
        require_device_path(report)
    finally:
        ringjax.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--scale", type=int, default=1, help="divides every dimension")
    options = parser.parse_args()
    with section() as report:
        report.table(
            "Host time of the handler in a step, one rank",
            *("tensors", "buffers", "fusion", "µs"),
            *("calls", "launches", "NCCL ops", "target"),
        )
        report.note(f"median (p10–p90) of {options.steps} steps, each waited for")
        report.note("alone in the world, hybrid packs nothing; pack fills the tables")
        for mode in MODES:
            attempt(report, mode, world, report, mode, options)


if __name__ == "__main__":
    main()
