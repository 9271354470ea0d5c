"""Compares model parameters between ranks in some steps, outside of XLA's programs.

Optimizers that run eagerly and graphs of TensorFlow use this module; steps that XLA
compiles use `xla/parameter_check.py`. In both cases the native core decides when a
comparison is due, compares hashes and writes the text of the warning.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ringjax import _native, runtime, stderr
from ringjax.eager import lane, reductions
from ringjax.ops import ReduceOp

AFTER_FIRST_STEP = 1
"""The argument `first` for Horovod's programs, which broadcast after step 0."""

# The (process set, `whose`) keys whose last comparison has found a difference.
_differing: set[tuple[int | None, str]] = set()
runtime.on_init(_differing.clear)
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
    """Compares parameters between ranks if due, and prints a warning if they differ.

    All ranks call `check` in every step. Most calls only count the step.

    Args:
        title: names the parameters in the warning; equal on all ranks.
        memory: yields the name, the address and the bytes of each parameter, in an
            order that is equal on all ranks. The memory of a parameter is read before
            the next parameter is yielded.
        whose: identifies the step counter on this rank, see `identity_key`. Pass "" to
            identify the counter by the title.
        first: the index of the first step to compare.
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
    """Counts a step. Returns the index of the step if a comparison is due, else -1."""
    every = runtime.config().check_parameters
    if not every:
        return -1
    step = lane.next_number(f"check {whose}", process_set) - 1
    due = step >= first and _native.compares_at(step - first, every)
    return step if due and process_set.size() > 1 else -1


def compare(
    title: str,
    step: int,
    names: Sequence[str],
    hashes: Sequence[int],
    process_set: runtime.ProcessSet,
    whose: str,
) -> None:
    """Compares hashes between ranks. If any differ, the first rank prints a warning.

    `step` and the names of the parameters appear in the warning.
    """

    def maximum(numbers: list[int]) -> list[int]:
        found: list[int] = reductions.allreduce(
            np.array(numbers, np.uint64),
            ReduceOp.Max,
            name=f"the check of the parameters of {title}",
            process_set=process_set,
        ).tolist()
        return found

    ranks = process_set.ranks
    rank = ranks.index(runtime.rank())
    lines = "\n".join(name.replace("\n", " ") for name in names)
    found = _native.difference(hashes, lines, ranks, rank, maximum)
    key = process_set.process_set_id, whose
    # Warn only once until a later comparison finds equal parameters.
    if found and rank == 0 and key not in _differing:
        stderr.line(
            f"[ringjax {ranks[0]}/{len(ranks)}] warning: the ranks' parameters differ "
            f"at step {step} of the optimizer: {found}"
        )
    (_differing.add if found else _differing.discard)(key)


def identity_key(objects: Iterable[object]) -> str:
    """Returns a text that identifies these objects, in this order, in this process.

    A name could not identify a step counter, because several models may have one name.
    The objects are not kept alive.

    Example:
        >>> one, other = {1}, {1}
        >>> identity_key([one]) == identity_key([one])
        True
        >>> identity_key([one]) == identity_key([other])
        False
    """
    numbers = []
    for each in objects:
        # Python may reuse the id of a deleted object, so map each id to a counter value
        # that is never reused.
        address = id(each)
        if address not in _numbers:
            _numbers[address] = next(_fresh)
            weakref.finalize(each, _numbers.pop, address, None).atexit = False
        numbers.append(_numbers[address])
    return f"{hash(tuple(numbers)):x}"
