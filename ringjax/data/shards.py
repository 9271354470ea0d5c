"""shard: the part of a dataset that this rank reads, every size-th element.

For datasets with a `shard` of their own (tf.data), with places (sequences, arrays,
grain), and for iterables of which nobody knows how long they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Literal

from ringjax import runtime

Uneven = Literal["keep", "drop", "repeat"]
_UNEVEN = ("keep", "drop", "repeat")


def shard(
    dataset: Any,
    num_shards: int | None = None,
    index: int | None = None,
    *,
    uneven: Uneven = "keep",
) -> Any:
    """Every `num_shards`-th element of a dataset, from number `index` on.

    Args:
        dataset: one of these, tried in this order: something with a method `shard` like
            that of `tf.data.Dataset` (its elements have the same shapes, unless
            `uneven` is "keep"); a sequence or array; something with a length and
            elements at places; any other iterable.
        num_shards: how many parts there are; None: as many as ranks.
        index: which part, from 0; None: that of this rank.
        uneven: if the elements cannot be shared out evenly: "keep": the first ranks
            have one more; "drop": the last elements are left out; "repeat": the first
            elements come again at the end, so that all ranks make as many steps.

    Returns:
        A dataset of `tf.data`; a slice of a sequence or array; otherwise an iterable,
        which has a length if the dataset has one, and which can be iterated as often.

    Raises:
        ValueError: a number out of range, or `uneven` is something else.
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
    place = runtime.rank() if index is None else index
    if count < 1:
        raise ValueError(f"shard: num_shards is {count}, expected at least 1")
    if not 0 <= place < count:
        raise ValueError(f"shard: index is {place}, expected 0 to {count - 1}")
    if uneven not in _UNEVEN:
        raise ValueError(f"shard: uneven is {uneven!r}, expected one of {_UNEVEN}")
    own = getattr(dataset, "shard", None)
    if callable(own) and uneven == "keep":
        return own(count, place)
    if callable(own) and hasattr(dataset, "cardinality"):
        return _of_tf_data(dataset, count, place, uneven)
    if isinstance(dataset, Mapping):
        raise TypeError("shard: a mapping has no order; shard its values or its items")
    if isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"):
        return _of_places(dataset, count, place, uneven)
    if not isinstance(dataset, Iterable):
        raise TypeError(
            f"shard: a {type(dataset).__name__} has no shard(), no elements at places, "
            "and cannot be iterated"
        )
    return _Shard(dataset, count, place, uneven)


def _of_tf_data(dataset: Any, count: int, place: int, uneven: Uneven) -> Any:
    """Of a dataset whose elements have the same shapes."""
    nest = sys.modules["tensorflow"].nest
    if uneven == "repeat":
        # Only whole rounds are kept of the dataset and its beginning.
        dataset = dataset.concatenate(dataset.repeat().take(count - 1))

    def mine(*parts: Any) -> Any:
        round_ = parts if len(parts) > 1 else parts[0]
        return nest.map_structure(lambda part: part[place], round_)

    return dataset.batch(count, drop_remainder=True).map(mine)


def _of_places(dataset: Any, count: int, place: int, uneven: Uneven) -> Any:
    length = len(dataset)
    end = length if uneven != "drop" else length - length % count
    if uneven == "repeat" and length % count and length:
        return _Repeated(dataset, range(place, -(-length // count) * count, count))
    try:
        return dataset[place:end:count]
    except (TypeError, ValueError, KeyError, IndexError):  # it takes no slices
        return _Repeated(dataset, range(place, end, count))


class _Repeated:
    """Elements of a dataset at given places, counted around and around."""

    def __init__(self, dataset: Any, places: range) -> None:
        self._dataset, self._places = dataset, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: int) -> Any:
        return self._dataset[self._places[place] % len(self._dataset)]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))


class _Shard:
    """Elements of an iterable, which is read in rounds of one element a rank."""

    def __init__(
        self, dataset: Iterable[Any], count: int, place: int, uneven: Uneven
    ) -> None:
        self._dataset, self._count, self._place = dataset, count, place
        self._uneven = uneven

    def __len__(self) -> int:
        if not isinstance(self._dataset, Sized):
            raise TypeError("this shard has no length, as its dataset has none")
        rounds, rest = divmod(len(self._dataset), self._count)
        extra = {"keep": self._place < rest, "drop": False, "repeat": rest > 0}
        return rounds + int(extra[self._uneven])

    def __iter__(self) -> Iterator[Any]:
        count, place = self._count, self._place
        first: list[Any] = []
        round_: list[Any] = []
        for element in self._dataset:
            if len(first) < count:
                first.append(element)
            round_.append(element)
            if len(round_) == count:
                yield round_[place]
                round_ = []
        if not round_ or self._uneven == "drop":
            return
        if self._uneven == "repeat":
            while len(round_) < count:
                round_ += first[: count - len(round_)]
        if place < len(round_):
            yield round_[place]
