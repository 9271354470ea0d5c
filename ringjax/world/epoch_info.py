"""Epoch information: how a new epoch affects the program and its pending calls.

Pure functions compute these effects from the coordinator's directives, without I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from ringjax.membership.directives import EpochDirective
from ringjax.world.communicator_ids import EAGER_LANE, REPLICA_SET
from ringjax.world.groups import replicas


@dataclass(frozen=True)
class EpochInfo:
    """An epoch of an elastic job, as a program sees it.

    Attributes:
        epoch: the number of the epoch, which grows with every epoch.
        kind: "start", "repair" (ranks were lost, calls continued), "restart" (all ranks
            return to the last commit) or "resize" (ranks joined or left at a pause).
        newcomers: the ranks that had no rank in the previous epoch.
        previous: for each rank, its rank in the previous epoch; -1 for a newcomer.
        workers: for each rank, the id of its process. The job never uses an id again.
    """

    epoch: int
    kind: str
    size: int
    rank: int
    newcomers: tuple[int, ...]
    previous: tuple[int, ...]
    workers: tuple[int, ...]

    @staticmethod
    def from_members(members: EpochDirective) -> EpochInfo:
        return EpochInfo(
            epoch=members.epoch,
            kind=members.kind,
            size=len(members.members),
            rank=members.rank,
            newcomers=tuple(r for r, old in enumerate(members.previous) if old < 0),
            previous=tuple(members.previous),
            workers=tuple(m.worker for m in members.members),
        )

    @staticmethod
    def of_static_job(rank: int, size: int) -> EpochInfo:
        """Returns the only epoch of a static job, in which no rank joins or leaves."""
        ranks = tuple(range(size))
        return EpochInfo(0, "start", size, rank, (), ranks, ranks)


@dataclass(frozen=True)
class Transition:
    """The outcome of one communicator's pending calls when a new epoch begins.

    Attributes:
        finished: how many calls all ranks have completed.
        repeats: whether the next call runs again; if not, it fails.
        ranks: for each rank of the communicator in the previous epoch, its rank in the
            new epoch; -1 if it was lost.
        reason: why the previous epoch has ended.
    """

    finished: int = 0
    repeats: bool = True
    ranks: tuple[int, ...] = ()
    reason: str = ""


# (id, ranks, name) of a communicator that this rank must connect.
CommunicatorSpec = tuple[int, Sequence[int], str]


def communicators_of(members: EpochDirective) -> Iterator[CommunicatorSpec]:
    """Yields the communicators that this rank must connect, the world's first.

    All ranks of a communicator yield equal ids, ranks and names for it.
    """
    everybody = range(len(members.members))
    sets = {0: everybody, **{n: members.sets[n] for n in sorted(members.sets)}}
    for number, ranks in sets.items():
        if members.rank in ranks:
            name = f"process set {number}" if number else "world"
            yield number, ranks, name
            yield number | EAGER_LANE, ranks, name
    if members.group > 1:
        yield REPLICA_SET, _ranks_in(members, REPLICA_SET), "replica set"


def surviving_transitions(
    directives: Sequence[EpochDirective],
    before: Mapping[int, Sequence[int]],
    known: Set[int],
) -> dict[int, list[Transition]]:
    """Returns the transitions of all communicators that survive, by communicator id.

    `before` and `directives` are those of `transitions`. `known` has the ids of this
    rank's resilient communicators.
    """
    wanted = {number for number, _, _ in communicators_of(directives[-1])}
    return {
        number: transitions(number, before, directives) for number in wanted & known
    }


def transitions(
    number: int,
    before: Mapping[int, Sequence[int]],
    directives: Sequence[EpochDirective],
) -> list[Transition]:
    """Returns one transition of communicator `number` for each directive.

    `before` has the process sets of the current epoch. `directives` has the directives
    that have arrived since this epoch began, the oldest first. An epoch that ended
    before it was in force counts as a transition, too.
    """
    found = []
    ranks = list(before.get(number & ~EAGER_LANE, ()))
    for members in directives:
        after = _ranks_in(members, number & ~EAGER_LANE)
        new_ranks = members.new_ranks
        position = {rank: index for index, rank in enumerate(after)}
        moved = [_at(new_ranks, rank) for rank in ranks]
        finished, repeats = members.decisions.get(
            number, (0, members.kind != "restart")
        )
        found.append(
            Transition(
                finished=finished,
                repeats=repeats,
                ranks=tuple(position.get(rank, -1) for rank in moved),
                reason=end_reason(members),
            )
        )
        ranks = after
    return found


def _ranks_in(members: EpochDirective, number: int) -> list[int]:
    if number == REPLICA_SET:
        workers = [member.worker for member in members.members]
        return replicas(workers, workers[members.rank], members.group)
    everybody = range(len(members.members))
    return list(members.sets.get(number, ()) if number else everybody)


def _at(ranks: Sequence[int], rank: int) -> int:
    return ranks[rank] if rank < len(ranks) else -1


def end_reason(members: EpochDirective) -> str:
    """Returns a clause that says why the epoch before `members` has ended."""
    if members.lost:
        return "; ".join(f"rank {r} {why}" for r, why in members.lost.items())
    return {"restart": "all ranks start again"}.get(members.kind, "the ranks change")
