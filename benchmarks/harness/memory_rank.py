"""One rank of `python -m benchmarks.memory`: memory of a step beyond the gradients.

Each case has a process of its own, because compilers and allocators seldom return
memory. memory.py prints the results.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.jobs import report
from benchmarks.harness.shapes import SETS, count

WARM = 20  # steps until the memory is stable
SAMPLES = 100
# Name -> allreduce_grads(overlap=…), whether the gradients are donated. None: no
# allreduce, which shows what jax and malloc take for the same arrays.
VARIANTS: dict[str, tuple[bool | None, bool]] = {
    "nothing, donated": (None, True),
    "nothing, not donated": (None, False),
    "in place, donated": (False, True),
    "overlapped, donated": (True, True),
    "not donated": (False, False),
}


def resident() -> dict[str, int]:
    """Measures the bytes of this process, after free memory was returned to the kernel.

    `private` are resident bytes that only this process maps, `shared` are resident
    bytes of shared memory, and `file` are those of programs and libraries. `mapped` is
    the shared memory in the address space, resident or not.
    """
    # Ignore a C library that is not glibc.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    known = _status()
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, _, _, inode, *_ = line.split()
        if mode.endswith("s") and inode != "0":
            first, last = (int(end, 16) for end in span.split("-"))
            mapped += last - first
    kinds = {"private": "RssAnon", "shared": "RssShmem", "file": "RssFile"}
    return {kind: known[name] for kind, name in kinds.items()} | {"mapped": mapped}


def _status() -> dict[str, int]:
    """Returns the fields of /proc/self/status that are amounts of memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = (line.split(":", 1) for line in lines)
    return {name: int(v.split()[0]) << 10 for name, v in fields if v.endswith(" kB")}


def forget_peak() -> bool:
    """Resets the kernel's highest resident size; returns false if this fails."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def counts() -> dict[str, int]:
    """Returns numbers that must not grow: bytes, descriptors, threads, mappings."""
    known = _status()
    return {
        "bytes": known["VmRSS"],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
    }


class Steps:
    """A training step that consists only of its allreduce."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        import jax

        self._jax = jax
        make = jax.jit(lambda: [jax.numpy.zeros(s, "float32") for s in shapes])
        self.gradients = jax.block_until_ready(make())

    def make(self, overlap: bool | None, donated: bool) -> Callable[[], None]:
        """Compiles a step; the function runs it once."""
        if overlap is None:

            def update(gradients: Any, state: Any) -> Any:
                return [x * 0.5 for x in gradients], state + 1

            state = self._jax.numpy.zeros(1, "uint32")
        else:
            import ringjax

            tx = ringjax.allreduce_grads(overlap=overlap)
            update, state = tx.update, tx.init(self.gradients)
        held: list[Any] = [state, None]
        step = self._jax.jit(update, donate_argnums=(0, 1) if donated else (1,))
        compiled = step.lower(self.gradients, state).compile()

        def once() -> None:
            held[1] = None  # a training loop has used the gradients by then
            out, held[0] = self._jax.block_until_ready(
                compiled(self.gradients, held[0])
            )
            if donated:
                self.gradients = out
            else:
                held[1] = out

        return once


def levels(steps: Steps, variant: str) -> tuple[dict[str, Any], Callable[[], None]]:
    """Returns resident bytes from before ringjax to a steady state, and the step."""
    overlap, donated = VARIANTS[variant]
    once = steps.make(None, True)
    for _ in range(3):
        once()  # jax has started everything that any step needs
    found: dict[str, Any] = {"before": resident()}
    if overlap is not None:
        import ringjax

        ringjax.init()
    found["world"] = resident()
    once = steps.make(overlap, donated)
    found["program"] = resident()
    known = forget_peak()
    for _ in range(WARM):
        once()
    found["peak"] = _status()["VmHWM"] if known else None
    found["steady"] = resident()
    return found, once


def main() -> None:
    """Measures one case and writes the result."""
    plan = json.loads(sys.argv[1])
    shapes = SETS[plan["set"]][1]()
    if shrink := plan["shrink"]:
        # Memory that a call forgets to free does not depend on the size of tensors.
        shapes = [(max(1, count([shape]) // shrink),) for shape in shapes]
    steps = Steps(shapes)
    found, once = levels(steps, plan["variant"])
    found["gradients"] = sum(x.nbytes for x in steps.gradients)
    if plan["steps"]:
        each = max(1, plan["steps"] // SAMPLES)
        series = []
        for number in range(plan["steps"]):
            if number % each == 0:
                series.append({"step": number, **counts()})
            once()
        found["series"] = [*series, {"step": plan["steps"], **counts()}]
    report(found)
    if VARIANTS[plan["variant"]][0] is not None:
        import ringjax

        ringjax.shutdown()


if __name__ == "__main__":
    main()
