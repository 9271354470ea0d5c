"""One membership of an elastic job: as programs see it, and what it means for calls.

Computed from what the coordinator says; nothing here touches a link.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from ringjax.membership.directives import EpochDirective
from ringjax.world.groups import REPLICAS, replicas
from ringjax.world.lanes import LANE


@dataclass(frozen=True)
class Generation:
    """One membership of an elastic job, as a program sees it.

    Attributes:
        epoch: its number; they only grow.
        kind: "start", "repair" (ranks were lost, the calls went on), "restart" (all
            ranks go back to the last commit) or "resize" (after a pause).
        newcomers: the ranks that were not there before.
        previous: by rank: its rank in the epoch before, -1 for a newcomer.
        workers: by rank: the number of its process, which is never used again.
    """

    epoch: int
    kind: str
    size: int
    rank: int
    newcomers: tuple[int, ...]
    previous: tuple[int, ...]
    workers: tuple[int, ...]

    @staticmethod
    def of(members: EpochDirective) -> Generation:
        """As the coordinator describes it."""
        return Generation(
            members.epoch,
            members.kind,
            len(members.members),
            members.rank,
            tuple(r for r, old in enumerate(members.previous) if old < 0),
            tuple(members.previous),
            tuple(m.worker for m in members.members),
        )

    @staticmethod
    def constant(rank: int, size: int) -> Generation:
        """That of a job that is not elastic."""
        everybody = tuple(range(size))
        return Generation(0, "start", size, rank, (), everybody, everybody)


@dataclass(frozen=True)
class Step:
    """What a membership says about the calls of one communicator before it.

    Attributes:
        finished: so many of them are finished.
        repeats: the next one is repeated; else it fails.
        ranks: by rank in it before: the rank now, -1: lost.
        reason: why the one before has ended.
    """

    finished: int = 0
    repeats: bool = True
    ranks: tuple[int, ...] = ()
    reason: str = ""

    @staticmethod
    def nothing(size: int) -> list[Step]:
        """About a communicator that never came to life: all goes on as it was."""
        return [Step(ranks=tuple(range(size)))]


# A communicator to come: its number, ranks and name.
Wanted = tuple[int, Sequence[int], str]


def numbers(members: EpochDirective) -> Iterator[Wanted]:
    """The communicators of this rank, the world's first; alike on all of theirs."""
    everybody = range(len(members.members))
    sets = {0: everybody, **{n: members.sets[n] for n in sorted(members.sets)}}
    for number, ranks in sets.items():
        if members.rank in ranks:
            name = f"process set {number}" if number else "world"
            yield number, ranks, name
            yield number | LANE, ranks, name
    if members.group > 1:
        yield REPLICAS, _ranks_in(members, REPLICAS), "replica set"


def carried(
    heard: Sequence[EpochDirective],
    before: Mapping[int, Sequence[int]],
    known: Set[int],
) -> dict[int, list[Step]]:
    """The communicators that go on, by number, and what becomes of their calls.

    Args:
        heard: the memberships since the epoch in force, the oldest first.
        before: the process sets of that epoch, the world as number 0.
        known: the communicators that this rank has.
    """
    wanted = {number for number, _, _ in numbers(heard[-1])}
    return {number: steps(number, before, heard) for number in wanted & known}


def steps(
    number: int, before: Mapping[int, Sequence[int]], heard: Sequence[EpochDirective]
) -> list[Step]:
    """What becomes of the calls of a communicator, membership by membership.

    Args:
        before: the process sets of the epoch in force, the world as number 0.
        heard: the memberships since then, the oldest first.
    """
    found = []
    ranks = list(before.get(number & ~LANE, ()))
    for members in heard:
        after = _ranks_in(members, number & ~LANE)
        moved = [_at(members.ranks, rank) for rank in ranks]
        finished, repeats = members.verdicts.get(number, (0, members.kind != "restart"))
        found.append(
            Step(
                finished,
                repeats,
                tuple(after.index(r) if r in after else -1 for r in moved),
                reason(members),
            )
        )
        ranks = after
    return found


def _ranks_in(members: EpochDirective, number: int) -> list[int]:
    if number == REPLICAS:
        workers = [member.worker for member in members.members]
        return replicas(workers, workers[members.rank], members.group)
    everybody = range(len(members.members))
    return list(members.sets.get(number, ()) if number else everybody)


def _at(ranks: Sequence[int], rank: int) -> int:
    return ranks[rank] if rank < len(ranks) else -1


def reason(members: EpochDirective) -> str:
    """Why the epoch before has ended, in a sentence."""
    if members.lost:
        return "; ".join(f"rank {r} {why}" for r, why in members.lost.items())
    return {"restart": "all ranks start again"}.get(members.kind, "the ranks change")
