"""Now and then, a look whether all ranks have the same parameters; if not, a warning.

For optimizers that run line by line; of compiled steps it is `ringjax.xla.alike`. What
is compared and said is the same, and native.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ringjax import _native, runtime, stderr
from ringjax.eager import lane, reductions
from ringjax.ops import ReduceOp

_warned: set[tuple[int | None, str]] = set()
runtime.on_init(_warned.clear)


def check(
    title: str,
    memory: Callable[[], Iterable[tuple[str, int, int]]],
    process_set: runtime.ProcessSet,
) -> None:
    """To be called in every step, by all ranks; mostly it only counts.

    Args:
        title: of whose parameters, alike on all ranks.
        memory: gives name, address and bytes of each, in an order that all ranks have;
            each lives until the next one is asked for.
        process_set: the ranks that take part; this rank must be one of them.

    Raises:
        PeerLost, Stalled: as everywhere. Not if the parameters differ.
    """
    every = runtime.config().check_parameters
    if not every:
        return
    step = lane.next_number(f"check {title}", process_set) - 1
    if step % every:
        return
    names, hashes = [], []
    for name, address, size in memory():
        names.append(name.replace("\n", " "))
        hashes += _native.hash_memory([(address, size)])

    def greatest(numbers: list[int]) -> list[int]:
        found: list[int] = reductions.allreduce(
            np.array(numbers, np.uint64),
            ReduceOp.Max,
            name=f"the check of the parameters of {title}",
            process_set=process_set,
        ).tolist()
        return found

    ranks = process_set.ranks
    place = ranks.index(runtime.rank())
    found = _native.difference(hashes, "\n".join(names), ranks, place, greatest)
    key = process_set.process_set_id, title
    # Said once, until they have been alike again.
    if found and place == 0 and key not in _warned:
        stderr.line(
            f"[ringjax {ranks[0]}/{len(ranks)}] warning: the ranks' parameters differ "
            f"at step {step} of the optimizer: {found}"
        )
    (_warned.add if found else _warned.discard)(key)
