"""Tests of ringjax.data: shards, samplers, and loaders that read ahead."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.waiting import until

import ringjax
from ringjax.data import (
    AsyncDataLoaderMixin,
    BaseDataLoader,
    DistributedSampler,
    ElasticSampler,
    shard,
)
from ringjax.errors import NotInitialized


class Stream:
    """An iterable without a length that can be iterated several times."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Places:
    """A map-style dataset like PyTorch's, which has elements by index but no slices."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> int:
        if not isinstance(place, int):
            raise TypeError("no slices")
        if place >= self.count:
            raise IndexError(place)
        return place


class Counted(Stream):
    """An iterable with a length."""

    def __len__(self) -> int:
        return self.count


KINDS = {
    "range": range,
    "list": lambda n: list(range(n)),
    "array": np.arange,
    "places": Places,
    "stream": Stream,
    "counted": Counted,
    "iterator": lambda n: iter(range(n)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 2, 5, 6, 7])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("uneven", ["keep", "drop", "repeat"])
def test_elements_of_each_shard(kind: str, count: int, size: int, uneven: Any) -> None:
    shards = [shard(KINDS[kind](count), size, i, uneven=uneven) for i in range(size)]
    found = [[int(one) for one in part] for part in shards]
    rounds, rest = divmod(count, size)
    for i, part in enumerate(found):
        places = range(i, (rounds + (rest > 0)) * size, size)
        if uneven == "keep":
            expected = [place for place in places if place < count]
        elif uneven == "drop":
            expected = [place for place in places if place < rounds * size]
        else:
            expected = [place % count for place in places] if count else []
        assert part == expected, (i, part)
        if kind not in ("stream", "iterator"):
            assert len(shards[i]) == len(expected)
        if kind != "iterator":
            assert [int(one) for one in shards[i]] == expected  # a second time


def test_bad_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="num_shards is 0"):
        shard([1], 0, 0)
    with pytest.raises(ValueError, match="index is 2, expected 0 to 1"):
        shard([1], 2, 2)
    with pytest.raises(ValueError, match="uneven is 'odd'"):
        shard([1], 2, 1, uneven="odd")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a int has no shard"):
        shard(3, 2, 1)
    with pytest.raises(TypeError, match="a mapping has no order"):
        shard({0: 1}, 2, 1)
    with pytest.raises(NotInitialized):
        shard([1, 2])
    with pytest.raises(TypeError, match="its dataset has none"):
        len(shard(Stream(3), 2, 1))


def test_a_dataset_that_shards_itself() -> None:
    class Own:
        def shard(self, num_shards: int, index: int) -> tuple[int, int]:
            return num_shards, index

    assert shard(Own(), 3, 1) == (3, 1)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(("count", "size"), [(10, 3), (9, 3), (2, 3), (0, 2), (5, 1)])
def test_samplers_cover_an_epoch(count: int, size: int, drop: bool) -> None:
    def epoch(number: int, seed: int = 1) -> list[list[int]]:
        parts = []
        for rank in range(size):
            sampler = DistributedSampler(
                range(count), size, rank, seed=seed, drop_last=drop
            )
            sampler.set_epoch(number)
            parts.append(list(sampler))
            assert len(parts[-1]) == len(sampler) == sampler.num_samples
            assert sampler.total_size == size * len(sampler)
        return parts

    parts = epoch(0)
    assert len({len(part) for part in parts}) == 1
    seen = [one for part in parts for one in part]
    if drop:
        assert len(set(seen)) == len(seen) == count // size * size
    else:
        assert set(seen) == set(range(count))
        assert len(seen) - count < size
    assert epoch(0) == parts
    if count > 5:
        assert epoch(1) != parts and epoch(0, seed=2) != parts


def test_unshuffled_and_bad_samplers() -> None:
    assert list(DistributedSampler(5, 2, 1, shuffle=False)) == [1, 3, 0]
    with pytest.raises(ValueError, match="num_replicas is 0"):
        DistributedSampler(5, 0, 0)
    with pytest.raises(ValueError, match="rank is 2, expected 0 to 1"):
        DistributedSampler(5, 2, 2)
    with pytest.raises(ValueError, match="-1 samples"):
        DistributedSampler(-1, 2, 0)
    with pytest.raises(NotInitialized):
        DistributedSampler(5)
    assert ElasticSampler.__module__ == "ringjax.elastic.sampler"


class Loader(BaseDataLoader):
    """Yields batches 0, 1, 2 of every epoch and records the reading threads."""

    def __init__(self, batches: int, fails_at: int | None = None) -> None:
        self.batches, self.fails_at = batches, fails_at
        self.readers: list[str] = []

    def __len__(self) -> int:
        return self.batches

    def _iterate(self) -> Iterator[int]:
        for i in range(self.batches):
            if i == self.fails_at:
                raise OSError(f"batch {i} cannot be read")
            self.readers.append(threading.current_thread().name)
            yield i

    def _process_batch(self, batch: int) -> int:
        return 10 * batch


class AsyncLoader(AsyncDataLoaderMixin, Loader):
    pass


def test_a_loader_must_define_iterate() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BaseDataLoader()  # type: ignore[abstract]
    assert list(Loader(3)) == [0, 10, 20]


@pytest.mark.parametrize("room", [1, 2, 64])
def test_async_loaders_yield_the_same_batches(room: int) -> None:
    loader = AsyncLoader(room, False, 3)
    assert not loader.started
    for _ in range(3):
        assert list(loader) == [0, 10, 20]
    assert set(loader.readers) == {"ringjax-loader"}
    loader.close_async_loader()
    loader.close_async_loader()
    with pytest.raises(RuntimeError, match="was closed"):
        next(iter(loader))


def test_a_queue_of_size_0_starts_no_thread() -> None:
    loader = AsyncLoader(async_loader_queue_size=0, batches=3)
    assert list(loader) == [0, 10, 20]
    assert set(loader.readers) == {threading.current_thread().name}
    loader.close_async_loader()
    with pytest.raises(ValueError, match="async_loader_queue_size is -1"):
        AsyncLoader(-1, False, 3)


def test_batches_are_read_ahead() -> None:
    loader = AsyncLoader(2, False, 9)
    batches = iter(loader)
    assert next(batches) == 0
    until(lambda: len(loader.readers) >= 4)  # two batches are queued, one waits
    assert len(loader.readers) == 4
    batches.close()  # type: ignore[attr-defined]
    assert list(itertools.islice(loader, 4)) == [0, 10, 20, 30]  # a new epoch
    loader.close_async_loader()


def test_an_error_in_the_thread_is_raised_in_the_loop() -> None:
    loader = AsyncLoader(4, False, 3, fails_at=2)
    seen = []
    with pytest.raises(OSError, match="batch 2 cannot be read"):
        for batch in loader:
            seen.append(batch)
    assert seen == [0, 10]
    loader.close_async_loader()


# -- even_steps; tests/ranks/jax/test_uneven.py tests several ranks --------------------


class Wrong:
    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter([np.ones((2, 1))] * 2)


@pytest.mark.parametrize(
    ("batches", "size", "problem"),
    [
        ([np.ones((3, 1))], 2, "a batch has 3 rows, more than batch_size, which is 2"),
        ([np.ones((2, 1)), np.ones((3, 1))], None, "a batch has 3 rows"),
        ([{"x": np.ones((2, 1)), "y": np.ones(3)}], None, r"'x': \[2, 1\], 'y': \[3\]"),
        ([np.float32(1.0)], None, "equally many rows"),
        ([np.ones((2, 1))], 0, "batch_size is 0, expected at least 1"),
        (Wrong(), None, "more batches than their length, 1"),
    ],
)
def test_bad_batches_of_even_steps(
    batches: Any, size: int | None, problem: str
) -> None:
    ringjax.init()
    try:
        with pytest.raises(ValueError, match=problem):
            list(ringjax.data.even_steps(batches, batch_size=size))
    finally:
        ringjax.shutdown()


def test_even_steps_need_init() -> None:
    with pytest.raises(NotInitialized):
        list(ringjax.data.even_steps([np.ones((1, 1))]))
