"""even_steps: yields equally many batches of one shape on all ranks.

Missing rows are filled with copies of other rows, and a mask shows which rows count.
Pass the number of rows that count to `allreduce_grads` as its `weight`. The ranks
communicate over the eager lane, so they do not wait for a compiled step.
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
    """Yields batches until *no* rank has more, with masks for the rows that count.

    Short batches are filled with copies of their own rows. A rank without further
    batches continues with copies of its first batch, of which no row counts. A rank
    without any data uses a batch of another rank. So a compiled step receives only one
    shape. If the batches of all ranks have a length, the ranks compute the number of
    steps once, at the start. Otherwise, and in elastic jobs, they exchange a few bytes
    before every step to find out whether any rank has another batch.

    Args:
      batches: the batches of this rank: trees of arrays whose first dimension are the
        rows. If a rank has no data, batches must consist of dicts, lists and tuples.
      batch_size: the number of rows of every batch; by default the rows of the first
        batch.
      process_set: the ranks that call this, including this rank.

    Yields:
      The batch, with numpy arrays for all arrays that are not JAX's, and the mask, an
      array bool[batch_size].

    Raises:
      ValueError: the arrays of a batch differ in rows, a batch has more rows than
        `batch_size`, or there are more batches than their length.
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
    own = iter(batches)
    batch = next(own, _NOTHING)
    has_any = batch is not _NOTHING
    length = _length(batches)
    members = process_set.ranks
    # For a rank outside of `process_set`, the allreduce below raises an error.
    position = members.index(runtime.rank()) if runtime.rank() in members else 0
    # In an elastic job, the rank with the most batches may be lost, so the number of
    # steps is unknown. `first_here` is largest on the first rank that has a batch.
    unknown_here = length < 0 or runtime.elastic()
    first_here = has_any and len(members) - position
    numbers = (length, unknown_here, first_here, not has_any)
    steps, unknown, first, lacking = _maxima(*numbers, process_set=process_set)
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
            _maxima(has_any, process_set=process_set)[0] if unknown else done < steps
        )
        if not goes_on:
            return
        yield _filled(_arrays(batch) if has_any else None, example, rows)
        done += 1
        # Read the next batch only after the program has used the previous batch.
        batch = next(own, _NOTHING)


def _maxima(*numbers: int, process_set: runtime.ProcessSet) -> list[int]:
    """Returns the maximum over all ranks for each of `numbers`."""
    maxima: list[int] = eager.allreduce(
        np.array(numbers, np.int64), ReduceOp.Max, name=_NAME, process_set=process_set
    ).tolist()
    return maxima


def _length(batches: Iterable[Any]) -> int:
    """Returns the length of `batches`, or -1 if the length is unknown."""
    try:
        return len(batches) if isinstance(batches, Sized) else -1
    except TypeError:
        return -1


def _arrays(batch: Any) -> Any:
    return jax.tree.map(
        lambda x: x if isinstance(x, jax.Array) else np.asarray(x), batch
    )


def _rows(batch: Any) -> int:
    """Returns the number of rows, which must be equal in all arrays of a batch."""
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
    """Returns a batch filled to `rows` rows, and a mask of the rows that count."""
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
