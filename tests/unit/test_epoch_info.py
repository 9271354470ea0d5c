"""The meaning of a new epoch for communicators and their calls: pure arithmetic."""

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
        members=tuple(Member(r, "", {}, 10 + r) for r in range(len(previous))),
        rank=rank,
        previous=tuple(previous),
        decisions=decisions or {},
        sets=sets or {},
        next_set=0,
        lost=lost or {},
    )


def test_the_epoch_info_has_the_newcomers() -> None:
    told = members(7, [0, 3, -1], rank=1, kind="resize")
    found = EpochInfo.from_members(told)
    assert (found.epoch, found.kind, found.size, found.rank) == (7, "resize", 3, 1)
    assert (found.newcomers, found.workers) == ((2,), (10, 11, 12))
    assert EpochInfo.of_static_job(1, 3).workers == (0, 1, 2)


def test_numbers_are_those_of_the_sets_with_this_rank() -> None:
    told = members(1, [0, 1, 2], rank=2, sets={5: (1, 2), 4: (0, 1), 6: ()})
    found = {number: list(ranks) for number, ranks, _ in communicators_of(told)}
    everybody, pair = [0, 1, 2], [1, 2]
    assert found == {0: everybody, EAGER_LANE: everybody, 5: pair, 5 | EAGER_LANE: pair}


def test_a_step_maps_the_ranks_of_a_set() -> None:
    lost = {1: "died"}
    told = members(1, [0, 2, 3], sets={1: (1, 2)}, decisions={1: (7, False)}, lost=lost)
    before = {0: [0, 1, 2, 3], 1: [1, 2, 3]}
    assert transitions(1, before, [told]) == [
        Transition(7, False, (-1, 0, 1), "rank 1 died")
    ]
    assert transitions(EAGER_LANE, before, [told]) == [
        Transition(0, True, (0, -1, 1, 2), "rank 1 died")
    ]


def test_two_losses_in_a_row_are_two_steps() -> None:
    heard = [
        members(1, [0, 2, 3], sets={1: (1, 2)}, lost={1: "died"}),
        members(3, [1, 2], sets={1: (0, 1)}, lost={0: "died, too"}),
    ]
    before = {0: [0, 1, 2, 3], 1: [2, 3]}
    world = [step.ranks for step in transitions(0, before, heard)]
    assert world == [(0, -1, 1, 2), (-1, 0, 1)]
    assert [step.ranks for step in transitions(1, before, heard)] == [(0, 1), (0, 1)]


def test_after_a_restart_nothing_is_repeated() -> None:
    told = members(4, [0, 1], kind="restart")
    assert transitions(0, {0: [0, 1]}, [told]) == [
        Transition(0, False, (0, 1), "all ranks start again")
    ]
    assert end_reason(members(4, [0, 1], kind="resize")) == "the ranks change"
