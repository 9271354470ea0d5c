"""Tests of ElasticSampler: the samples of each rank, and Horovod's attributes."""

from __future__ import annotations

from collections import Counter

import pytest

from ringjax import runtime
from ringjax.torch.elastic.sampler import ElasticSampler


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch):
    def become(rank: int, size: int) -> None:
        monkeypatch.setattr(runtime, "rank", lambda: rank)
        monkeypatch.setattr(runtime, "size", lambda: size)

    return become


def samplers(as_rank, size: int, count: int, **options) -> list[ElasticSampler]:
    made = []
    for rank in range(size):
        as_rank(rank, size)
        made.append(ElasticSampler(range(count), **options))
    return made


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 12, 13])
@pytest.mark.parametrize("shuffle", [False, True])
def test_samplers_cover_all_samples_in_equal_steps(
    as_rank, size: int, count: int, shuffle: bool
) -> None:
    everyone = samplers(as_rank, size, count, shuffle=shuffle)
    parts = [list(sampler) for sampler in everyone]
    steps = -(-count // size)
    assert [len(part) for part in parts] == [steps] * size
    assert [len(sampler) for sampler in everyone] == [steps] * size
    given_out = Counter(index for part in parts for index in part)
    assert given_out.keys() == set(range(count))
    assert sum(given_out.values()) - count < max(size, 1)  # padding of the last step


def test_the_order_depends_only_on_seed_and_epoch(as_rank) -> None:
    as_rank(0, 1)
    first, second = ElasticSampler(range(50)), ElasticSampler(range(50))
    assert list(first) == list(second) == list(first) != list(range(50))
    second.set_epoch(1)
    assert list(first) != list(second)
    first.set_epoch(1)
    assert list(first) == list(second)
    assert list(ElasticSampler(range(50), seed=1)) == list(second)  # seed + epoch
    assert list(ElasticSampler(range(50), shuffle=False)) == list(range(50))


def test_processed_samples_as_in_horovod(as_rank) -> None:
    as_rank(1, 3)
    sampler = ElasticSampler(range(24))
    assert len(sampler) == 8 and sampler.processed_indices == set()
    sampler.record_batch(0, 2)
    sampler.record_batch(1, 2)
    assert sampler.processed_num == 12
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 12, "returned": []}
    assert len(sampler) == 8  # loading the state resets the length
    sampler.load_state_dict(sampler.state_dict())
    assert len(sampler) == 4 and len(sampler.remaining_indices) == 12
    assert sampler.processed_indices == set(range(24)) - set(sampler.remaining_indices)
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.processed_num, len(sampler)) == (1, 0, 8)
