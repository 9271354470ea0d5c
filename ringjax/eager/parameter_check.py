"""Now and then, a look whether all ranks have the same parameters; if not, a warning.

For optimizers that run line by line, and for graphs of TensorFlow; of steps that XLA
compiles it is `ringjax.xla.parameter_check`. The native core compares in both cases.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ringjax import _native, runtime, stderr
from ringjax.eager import lane, reductions
from ringjax.ops import ReduceOp

AFTER_FIRST_STEP = 1
"""The first step to look at where Horovod's programs broadcast after step 0."""

_warned: set[tuple[int | None, str]] = set()
runtime.on_init(_warned.clear)
_numbers: dict[int, int] = {}
_fresh = itertools.count()


def check(
    title: str,
    memory: Callable[[], Iterable[tuple[str, int, int]]],
    process_set: runtime.ProcessSet,
    *,
    whose: str = "",
    first: int = 0,
) -> None:
    """To be called in every step, by all ranks; mostly it only counts.

    Args:
        title: of whose parameters, alike on all ranks.
        memory: gives name, address and bytes of each, in an order that all ranks have;
            each lives until the next one is asked for.
        process_set: the ranks that take part; this rank must be one of them.
        whose: what steps are counted by, of this rank alone, see `identity_key`; else
            it is the title.
        first: the first step to look at.

    Raises:
        PeerLost, Stalled: as everywhere. Not if the parameters differ.
    """
    whose = whose or title
    step = due_step(whose, process_set, first)
    if step < 0:
        return
    names, hashes = [], []
    for name, address, size in memory():
        names.append(name)
        hashes += _native.hash_memory([(address, size)])
    compare(title, step, names, hashes, process_set, whose)


def due_step(whose: str, process_set: runtime.ProcessSet, first: int) -> int:
    """Counts a step, and returns its number if it is one to look at, else -1.

    Args: as `check`.
    """
    every = runtime.config().check_parameters
    if not every:
        return -1
    step = lane.next_number(f"check {whose}", process_set) - 1
    wanted = step >= first and _native.compares_at(step - first, every)
    return step if wanted and process_set.size() > 1 else -1


def compare(
    title: str,
    step: int,
    names: Sequence[str],
    hashes: Sequence[int],
    process_set: runtime.ProcessSet,
    whose: str,
) -> None:
    """Compares hashes with those of the other ranks; the first of them warns.

    Args:
        step: for the warning, as are the names.
        names: of what was hashed.
        hashes: as many.

    Other arguments, Raises: as `check`.
    """

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
    lines = "\n".join(name.replace("\n", " ") for name in names)
    found = _native.difference(hashes, lines, ranks, place, greatest)
    key = process_set.process_set_id, whose
    # Said once, until they have been alike again.
    if found and place == 0 and key not in _warned:
        stderr.line(
            f"[ringjax {ranks[0]}/{len(ranks)}] warning: the ranks' parameters differ "
            f"at step {step} of the optimizer: {found}"
        )
    (_warned.add if found else _warned.discard)(key)


def identity_key(objects: Iterable[Any]) -> str:
    """A text for these very objects, in this order; it does not keep them alive.

    For programs that make their tapes anew in every step, and for optimizers and models
    that have the same name, each of which has steps of its own.

    Example:
        >>> one, other = {1}, {1}
        >>> identity_key([one]) == identity_key([one])
        True
        >>> identity_key([one]) == identity_key([other])
        False
    """
    numbers = []
    for each in objects:
        where = id(each)
        if where not in _numbers:
            _numbers[where] = next(_fresh)
            weakref.finalize(each, _numbers.pop, where, None).atexit = False
        numbers.append(_numbers[where])
    return f"{hash(tuple(numbers)):x}"
