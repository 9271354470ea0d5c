"""even_steps: equally many batches on all ranks, of one shape, whatever data they have.

What a rank lacks is filled up with copies of rows, and a mask says which rows count;
`allreduce_grads` takes the number of those as its `weight`. The ranks talk over the
eager lane, so nothing waits for a compiled step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import jax
import numpy as np

from ringjax import eager, runtime
from ringjax.ops import ReduceOp

_NAME = "even_steps"
_NOTHING = object()
Mask = np.ndarray[Any, np.dtype[np.bool_]]


def even_steps(
    batches: Iterable[Any],
    *,
    batch_size: int | None = None,
    process_set: runtime.ProcessSet = runtime.global_process_set,
) -> Iterator[tuple[Any, Mask]]:
    """Batches until *all* ranks have had theirs, each with a mask of rows that count.

    Short batches are filled up with copies of their own rows. A rank that has no more
    goes on with copies of its first batch, of which no row counts; one without any data
    gets another rank's. So a compiled step sees one shape only. If all ranks' batches
    have a length, they agree once, at the start, how many steps there are. If one has
    not, and in elastic jobs, a few bytes tell before every step whether anybody goes
    on.

    Args:
      batches: of this rank: trees of arrays whose first dimension are the rows. A rank
        without data needs to know nothing about them if they are made of dicts, lists
        and tuples.
      batch_size: the rows of every batch; None: as many as the first one has.
      process_set: the ranks that take part; this rank must be one of them.

    Yields:
      The batch (of numpy arrays where it has no JAX arrays), and bool[batch_size].

    Raises:
      ValueError: the arrays of a batch differ in rows, or there are more than
        `batch_size`; or more batches come than their length says.
      NotInitialized, PeerLost: as everywhere.

    Example:
      >>> import numpy as np, ringjax
      >>> ringjax.init()
      >>> rows = np.arange(5.0)
      >>> for batch, mask in ringjax.data.even_steps([rows[:3], rows[3:]]):
      ...     print(batch, mask)
      [0. 1. 2.] [ True  True  True]
      [3. 4. 3.] [ True  True False]
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"{_NAME}: batch_size is {batch_size}, expected at least 1")
    mine = iter(batches)
    batch = next(mine, _NOTHING)
    has_any = batch is not _NOTHING
    length = _length(batches)
    members = process_set.ranks
    place = members.index(runtime.rank()) if runtime.rank() in members else 0
    # The most steps, whether that is unknown (whoever has most may be lost), who is the
    # first that has data, and whether anybody has none.
    steps, unknown, first, lacking = _most(
        *(
            length,
            length < 0 or runtime.elastic(),
            has_any and len(members) - place,
            not has_any,
        ),
        process_set=process_set,
    )
    if not first:
        return
    example = _arrays(batch) if has_any else None
    if lacking:
        root = members[len(members) - first]
        sent = eager.broadcast_object(example, root, _NAME, process_set)
        example = sent if example is None else example
    rows = batch_size or _rows(example)
    done = 0
    while True:
        has_any = batch is not _NOTHING
        if done >= steps and has_any and not unknown:
            raise ValueError(f"{_NAME}: more batches than their length, {length}")
        goes_on = (
            _most(has_any, process_set=process_set)[0] if unknown else done < steps
        )
        if not goes_on:
            return
        yield _filled(_arrays(batch) if has_any else None, example, rows)
        done += 1
        batch = next(mine, _NOTHING)


def _most(*numbers: int, process_set: runtime.ProcessSet) -> list[int]:
    """The greatest number in each place over all ranks."""
    most: list[int] = eager.allreduce(
        np.array(numbers, np.int64), ReduceOp.Max, name=_NAME, process_set=process_set
    ).tolist()
    return most


def _length(batches: Iterable[Any]) -> int:
    """-1 if it is not known; some have a `__len__` only to say so."""
    try:
        return len(batches) if isinstance(batches, Sized) else -1
    except TypeError:
        return -1


def _arrays(batch: Any) -> Any:
    return jax.tree.map(
        lambda x: x if isinstance(x, jax.Array) else np.asarray(x), batch
    )


def _rows(batch: Any) -> int:
    """How many all arrays of a batch have."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(batch)
    found = {x.shape[:1] for _, x in pairs}
    if len(found) != 1 or () in found:
        shapes = {
            jax.tree_util.keystr(path, simple=True, separator="/"): list(x.shape)
            for path, x in pairs
        }
        raise ValueError(
            f"{_NAME}: the arrays of a batch must have equally many rows, got {shapes}"
        )
    count: int = found.pop()[0]
    return count


def _filled(batch: Any, example: Any, rows: int) -> tuple[Any, Mask]:
    """A batch of so many rows, and which of them are its own."""
    count = 0 if batch is None else _rows(batch)
    if count > rows:
        raise ValueError(
            f"{_NAME}: a batch has {count} rows, more than batch_size, which is {rows}"
        )
    mask = np.arange(rows) < count
    if count == rows:
        return batch, mask

    def fill(array: Any) -> Any:
        filled = np.resize(np.asarray(array), (rows, *array.shape[1:]))
        on_device = isinstance(array, jax.Array)
        return jax.device_put(filled, array.sharding) if on_device else filled

    return jax.tree.map(fill, batch if count else example), mask
