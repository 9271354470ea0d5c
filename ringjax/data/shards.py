"""shard: the part of a dataset that this rank reads, every size-th element.

Datasets may have a method `shard` (tf.data) or elements by index (sequences, arrays,
grain), or may be iterables of unknown length.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Generic, Literal, TypeVar

from ringjax import runtime

_T = TypeVar("_T")
Uneven = Literal["keep", "drop", "repeat"]
_UNEVEN = ("keep", "drop", "repeat")


def shard(
    dataset: Any,
    num_shards: int | None = None,
    index: int | None = None,
    *,
    uneven: Uneven = "keep",
) -> Any:
    """Returns every `num_shards`-th element of a dataset, beginning at `index`.

    Args:
        dataset: one of these, of which the first that fits is used: an object with a
            method `shard` like that of `tf.data.Dataset` (whose elements have equal
            shapes, unless `uneven` is "keep"); a sequence or array; another object with
            a length and elements by index; an iterable.
        num_shards: the number of parts; by default the number of ranks.
        index: the part to return, from 0; by default the part of this rank.
        uneven: if the elements cannot be divided evenly: with "keep", the first ranks
            have one element more than the rest; "drop" drops the last elements, and
            "repeat" repeats the first elements at the end, so that all ranks make
            equally many steps.

    Returns:
        A dataset of `tf.data`; a slice of a sequence or array; or else an iterable. It
        has a length if the dataset has one, and can be iterated as often as the
        dataset.

    Raises:
        ValueError: a number is out of range, or `uneven` is another text.
        TypeError: `dataset` is a mapping, or cannot be iterated.
        NotInitialized: before `init`, if `num_shards` or `index` is None.

    Example:
        >>> shard(range(7), 3, 1)
        range(1, 7, 3)
        >>> [list(shard(iter("abcdefg"), 3, i, uneven="drop")) for i in range(3)]
        [['a', 'd'], ['b', 'e'], ['c', 'f']]
        >>> list(shard("abcdefg", 3, 2, uneven="repeat"))
        ['c', 'f', 'b']
    """
    count = runtime.size() if num_shards is None else num_shards
    index = runtime.rank() if index is None else index
    if count < 1:
        raise ValueError(f"shard: num_shards is {count}, expected at least 1")
    if not 0 <= index < count:
        raise ValueError(f"shard: index is {index}, expected 0 to {count - 1}")
    if uneven not in _UNEVEN:
        raise ValueError(f"shard: uneven is {uneven!r}, expected one of {_UNEVEN}")
    own = getattr(dataset, "shard", None)
    if callable(own) and uneven == "keep":
        return own(count, index)
    if callable(own) and hasattr(dataset, "cardinality"):
        return _shard_tf_data(dataset, count, index, uneven)
    if isinstance(dataset, Mapping):
        raise TypeError("shard: a mapping has no order; shard its values or its items")
    if isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"):
        return _shard_indexable(dataset, count, index, uneven)
    if not isinstance(dataset, Iterable):
        raise TypeError(
            f"shard: a {type(dataset).__name__} has no shard(), no elements at places, "
            "and cannot be iterated"
        )
    return _Shard(dataset, count, index, uneven)


def _shard_tf_data(dataset: Any, count: int, index: int, uneven: Uneven) -> Any:
    """Returns a shard of a tf.data dataset whose elements have equal shapes."""
    nest = sys.modules["tensorflow"].nest
    if uneven == "repeat":
        # `batch` below drops an incomplete last round, so append elements that complete
        # it.
        dataset = dataset.concatenate(dataset.repeat().take(count - 1))

    def own_element(*parts: Any) -> Any:
        round_ = parts if len(parts) > 1 else parts[0]
        return nest.map_structure(lambda part: part[index], round_)

    return dataset.batch(count, drop_remainder=True).map(own_element)


def _shard_indexable(dataset: Any, count: int, index: int, uneven: Uneven) -> Any:
    length = len(dataset)
    end = length if uneven != "drop" else length - length % count
    if uneven == "repeat" and length % count and length:
        return _Selection(dataset, range(index, -(-length // count) * count, count))
    try:
        return dataset[index:end:count]
    except (TypeError, ValueError, KeyError, IndexError):  # the dataset takes no slices
        return _Selection(dataset, range(index, end, count))


class _Selection:
    """Elements of a dataset at given indices, modulo the dataset's length."""

    def __init__(self, dataset: Any, indices: range) -> None:
        self._dataset, self._indices = dataset, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._indices[index] % len(self._dataset)]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))


class _Shard(Generic[_T]):
    """The elements of this rank: one of every `count` elements of an iterable."""

    def __init__(
        self, dataset: Iterable[_T], count: int, index: int, uneven: Uneven
    ) -> None:
        self._dataset, self._count, self._index = dataset, count, index
        self._uneven = uneven

    def __len__(self) -> int:
        if not isinstance(self._dataset, Sized):
            raise TypeError("this shard has no length, as its dataset has none")
        rounds, rest = divmod(len(self._dataset), self._count)
        extra = {"keep": self._index < rest, "drop": False, "repeat": rest > 0}
        return rounds + int(extra[self._uneven])

    def __iter__(self) -> Iterator[_T]:
        count, index = self._count, self._index
        first: list[_T] = []
        round_: list[_T] = []
        for element in self._dataset:
            if len(first) < count:
                first.append(element)
            round_.append(element)
            # Yield an element only when its round is complete: with "drop", the
            # elements of an incomplete last round must not be yielded.
            if len(round_) == count:
                yield round_[index]
                round_ = []
        if not round_ or self._uneven == "drop":
            return
        if self._uneven == "repeat":
            while len(round_) < count:
                round_ += first[: count - len(round_)]
        if index < len(round_):
            yield round_[index]
