"""What a membership means for communicators and their calls: pure arithmetic."""

from __future__ import annotations

from ringjax.control.member import Member
from ringjax.membership.directives import EpochDirective
from ringjax.world.generation import Generation, Step, numbers, reason, steps
from ringjax.world.lanes import LANE


def members(
    epoch: int,
    previous: list[int],
    *,
    rank: int = 0,
    kind: str = "repair",
    sets: dict[int, tuple[int, ...]] | None = None,
    verdicts: dict[int, tuple[int, bool]] | None = None,
    lost: dict[int, str] | None = None,
) -> EpochDirective:
    return EpochDirective(
        epoch=epoch,
        kind=kind,
        members=tuple(Member(r, "", {}, 10 + r) for r in range(len(previous))),
        rank=rank,
        previous=tuple(previous),
        verdicts=verdicts or {},
        sets=sets or {},
        next_set=0,
        lost=lost or {},
    )


def test_a_generation_knows_its_newcomers() -> None:
    told = members(7, [0, 3, -1], rank=1, kind="resize")
    found = Generation.of(told)
    assert (found.epoch, found.kind, found.size, found.rank) == (7, "resize", 3, 1)
    assert (found.newcomers, found.workers) == ((2,), (10, 11, 12))
    assert Generation.constant(1, 3).workers == (0, 1, 2)


def test_numbers_are_those_of_the_sets_with_this_rank() -> None:
    told = members(1, [0, 1, 2], rank=2, sets={5: (1, 2), 4: (0, 1), 6: ()})
    found = {number: list(ranks) for number, ranks, _ in numbers(told)}
    everybody, pair = [0, 1, 2], [1, 2]
    assert found == {0: everybody, LANE: everybody, 5: pair, 5 | LANE: pair}


def test_a_step_maps_the_ranks_of_a_set() -> None:
    lost = {1: "died"}
    told = members(1, [0, 2, 3], sets={1: (1, 2)}, verdicts={1: (7, False)}, lost=lost)
    before = {0: [0, 1, 2, 3], 1: [1, 2, 3]}
    assert steps(1, before, [told]) == [Step(7, False, (-1, 0, 1), "rank 1 died")]
    assert steps(LANE, before, [told]) == [Step(0, True, (0, -1, 1, 2), "rank 1 died")]


def test_two_losses_in_a_row_are_two_steps() -> None:
    heard = [
        members(1, [0, 2, 3], sets={1: (1, 2)}, lost={1: "died"}),
        members(3, [1, 2], sets={1: (0, 1)}, lost={0: "died, too"}),
    ]
    before = {0: [0, 1, 2, 3], 1: [2, 3]}
    world = [step.ranks for step in steps(0, before, heard)]
    assert world == [(0, -1, 1, 2), (-1, 0, 1)]
    assert [step.ranks for step in steps(1, before, heard)] == [(0, 1), (0, 1)]


def test_after_a_restart_nothing_is_repeated() -> None:
    told = members(4, [0, 1], kind="restart")
    assert steps(0, {0: [0, 1]}, [told]) == [
        Step(0, False, (0, 1), "all ranks start again")
    ]
    assert reason(members(4, [0, 1], kind="resize")) == "the ranks change"
