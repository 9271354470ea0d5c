"""Tests of the ranks, communicators, and repeated calls of a new epoch."""

from __future__ import annotations

from ringjax.control.member import Member
from ringjax.membership.directives import EpochDirective
from ringjax.world.communicator_ids import EAGER_LANE
from ringjax.world.epoch_info import (
    EpochInfo,
    Transition,
    communicators_of,
    end_reason,
    transitions,
)


def members(
    epoch: int,
    previous: list[int],
    *,
    rank: int = 0,
    kind: str = "repair",
    sets: dict[int, tuple[int, ...]] | None = None,
    decisions: dict[int, tuple[int, bool]] | None = None,
    lost: dict[int, str] | None = None,
) -> EpochDirective:
    return EpochDirective(
        epoch=epoch,
        kind=kind,
        members=tuple(Member(r, 10 + r) for r in range(len(previous))),
        rank=rank,
        previous=tuple(previous),
        decisions=decisions or {},
        sets=sets or {},
        next_set=0,
        lost=lost or {},
    )


def test_fields_of_an_epoch() -> None:
    directive = members(7, [0, 3, -1], rank=1, kind="resize")
    found = EpochInfo.from_members(directive)
    assert (found.epoch, found.kind, found.size, found.rank) == (7, "resize", 3, 1)
    assert (found.newcomers, found.workers) == ((2,), (10, 11, 12))
    assert EpochInfo.of_static_job(1, 3).workers == (0, 1, 2)


def test_communicators_of_the_sets_with_this_rank() -> None:
    directive = members(1, [0, 1, 2], rank=2, sets={5: (1, 2), 4: (0, 1), 6: ()})
    found = {number: list(ranks) for number, ranks, _ in communicators_of(directive)}
    everybody, pair = [0, 1, 2], [1, 2]
    assert found == {0: everybody, EAGER_LANE: everybody, 5: pair, 5 | EAGER_LANE: pair}


def test_a_step_maps_the_ranks_of_a_set() -> None:
    lost = {1: "died"}
    directive = members(
        1, [0, 2, 3], sets={1: (1, 2)}, decisions={1: (7, False)}, lost=lost
    )
    before = {0: [0, 1, 2, 3], 1: [1, 2, 3]}
    assert transitions(1, before, [directive]) == [
        Transition(7, False, (-1, 0, 1), "rank 1 died")
    ]
    assert transitions(EAGER_LANE, before, [directive]) == [
        Transition(0, True, (0, -1, 1, 2), "rank 1 died")
    ]


def test_two_losses_in_sequence() -> None:
    heard = [
        members(1, [0, 2, 3], sets={1: (1, 2)}, lost={1: "died"}),
        members(3, [1, 2], sets={1: (0, 1)}, lost={0: "died, too"}),
    ]
    before = {0: [0, 1, 2, 3], 1: [2, 3]}
    world = [step.ranks for step in transitions(0, before, heard)]
    assert world == [(0, -1, 1, 2), (-1, 0, 1)]
    assert [step.ranks for step in transitions(1, before, heard)] == [(0, 1), (0, 1)]


def test_a_restart_repeats_no_call() -> None:
    directive = members(4, [0, 1], kind="restart")
    assert transitions(0, {0: [0, 1]}, [directive]) == [
        Transition(0, False, (0, 1), "all ranks start again")
    ]
    assert end_reason(members(4, [0, 1], kind="resize")) == "the ranks change"
