"""Tests of the registry of process sets: numbers, newcomers, lost ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ringjax.world.process_set import ProcessSet
from ringjax.world.registry import Registry


class World:
    """A backend that only records added and removed process sets."""

    def __init__(self) -> None:
        self.sets: dict[int, list[int]] = {}
        self.calls: list[str] = []

    def add(self, number: int, ranks: Sequence[int], what: str) -> None:
        self.calls.append(f"{what} {number}")
        self.sets[number] = list(ranks)

    def remove(self, number: int, ranks: Sequence[int], what: str) -> None:
        self.calls.append(f"{what} {number}")


@pytest.fixture
def global_set() -> ProcessSet:
    found = ProcessSet(())
    found.process_set_id = 0
    return found


def test_str_and_repr_are_those_of_horovod() -> None:
    text = "ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)"
    assert str(ProcessSet([2, 0])) == text
    assert repr(ProcessSet([2, 0])) == "ProcessSet(process_set_id=None, ranks=[0, 2])"


def test_equal_sets_share_a_number(global_set: ProcessSet) -> None:
    registry, world = Registry(global_set, ProcessSet([])), World()
    registry.reset(3)
    one, two = ProcessSet([2, 0]), ProcessSet([0, 2])
    assert registry.add(one, world) is one
    assert registry.add(two, world).process_set_id == one.process_set_id == 1
    assert registry.add(ProcessSet([0, 1, 2]), world).process_set_id == 0
    assert world.calls == ["add_process_set 1"]
    assert registry.remove(two, world)
    assert [one.process_set_id, two.process_set_id] == [None, None]
    assert not registry.remove(two, world)
    assert registry.add(ProcessSet([1]), world).process_set_id == 2
    registry.clear()
    assert 2 not in registry
    assert global_set.ranks == []


def test_a_failed_add_registers_nothing(global_set: ProcessSet) -> None:
    class Refusing(World):
        def add(self, number: int, ranks: Sequence[int], what: str) -> None:
            raise ValueError(what)

    registry, refused = Registry(global_set, ProcessSet([])), ProcessSet([0])
    registry.reset(2)
    with pytest.raises(ValueError, match="add_process_set"):
        registry.add(refused, Refusing())
    assert refused.process_set_id is None
    # The failed number is not used again, so that all ranks count equally.
    assert registry.add(refused, World()).process_set_id == 2


def test_process_sets_follow_lost_ranks(global_set: ProcessSet) -> None:
    registry, world = Registry(global_set, ProcessSet([])), World()
    registry.reset(4)
    low, high, same = ProcessSet([0, 1]), ProcessSet([2, 3]), ProcessSet(range(4))
    for each in (low, high, same):
        registry.add(each, world)
    registry.update(3, {1: [0], 2: [1, 2]}, 3)  # rank 1 was lost
    assert (low.ranks, high.ranks) == ([0], [1, 2])
    assert global_set.ranks == same.ranks == [0, 1, 2]
    registry.update(2, {2: [0, 1]}, 3)
    assert (low.process_set_id, high.process_set_id) == (None, 2)


def test_a_newcomer_claims_the_sets_of_the_job_in_order(global_set: ProcessSet) -> None:
    registry, world = Registry(global_set, ProcessSet([])), World()
    registry.reset(0)
    registry.update(3, {}, 0)
    early = ProcessSet([0, 1])
    registry.add(early, world)  # added before this newcomer is a member
    world.sets = {1: [0], 4: [0, 1]}
    registry.update(3, world.sets, 6)
    assert (early.process_set_id, early.ranks) == (1, [0])
    late = registry.add(ProcessSet([1, 2]), world)
    assert (late.process_set_id, late.ranks) == (4, [0, 1])
    assert registry.add(ProcessSet([2]), world).process_set_id == 6
    assert world.calls == ["add_process_set 1", "add_process_set 6"]
