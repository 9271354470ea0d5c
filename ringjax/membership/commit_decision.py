"""Decides which calls of an epoch that is over count as complete.

The module also decides which process sets survive, and which rank to exclude if ranks
cannot reach each other. All functions are pure, so equal reports lead to equal
decisions, also after a restart of the coordinator. epoch_state.py calls the functions.

A rank returns from a call only if it knows that all ranks have complete results of the
call. So if one rank has returned from a call, all ranks can finish it. If all survivors
have complete results, the call may count as complete although no rank has returned.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringjax.control.number_lists import expand

# Maps the id of a communicator, as text, to a pair: the count of complete calls, and
# whether the call in flight is repeated.
CommitDecisions = dict[str, tuple[int, bool]]


@dataclass(slots=True)
class CommitReport:
    """The progress of a worker in an epoch that is over.

    Attributes:
        lines: maps the id of a communicator, as text, to (returned, done, repeatable):
            how many calls have returned on this worker, how many have complete results
            on this worker, and whether this worker still has the inputs of the call in
            flight.
        sets: maps the id of each process set of this worker except the world, as text,
            to the ranks of the set.
        next_set: the least id that no process set has had on this worker.
        restart: whether the worker can only start again from its last commit.
    """

    lines: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    sets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    next_set: int = 0
    restart: bool = False


def parse_report(message: Mapping[str, Any]) -> CommitReport:
    """Parses the report in a worker's message. Raises ValueError if it is malformed."""
    try:
        lines = {
            str(int(number)): (int(returned), int(done), bool(repeatable))
            for number, (returned, done, repeatable) in (
                message.get("lines") or {}
            ).items()
        }
        sets = {
            str(int(number)): expand(ranks)
            for number, ranks in (message.get("sets") or {}).items()
            if int(number)
        }
        next_set = int(message.get("next_set") or 0)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ValueError(f"sent no report: {error}") from None
    return CommitReport(lines, sets, next_set, bool(message.get("restart")))


def decide(
    survivors: Sequence[CommitReport], departed: Sequence[CommitReport], restart: bool
) -> CommitDecisions:
    """Decides for each communicator of a survivor which calls are complete.

    A call from which a departed worker has returned is complete, too. If `restart` is
    true, all workers return to their last commit, so no call is repeated.

    Example:
        >>> quick = CommitReport({"0": (6, 6, True)})
        >>> slow = CommitReport({"0": (5, 6, True), "2": (3, 3, False)})
        >>> decide([quick, slow], [], restart=False)
        {'0': (6, True), '2': (3, False)}
    """
    found: CommitDecisions = {}
    for number in dict.fromkeys(n for report in survivors for n in report.lines):
        known = [r.lines[number] for r in survivors if number in r.lines]
        gone = [r.lines[number] for r in departed if number in r.lines]
        complete = max(returned for returned, _, _ in (*known, *gone))
        if restart:
            found[number] = (complete, False)
        else:
            done_by_all = min(done for _, done, _ in known)
            repeats = all(repeatable for _, _, repeatable in known)
            found[number] = (max(complete, done_by_all), repeats)
    return found


def all_sets(
    survivors: Iterable[CommitReport], ranks: Mapping[int, int]
) -> tuple[dict[str, list[int]], int]:
    """Returns the union of the process sets that the survivors know.

    All ranks agree on a process set before any rank has made the set. So a set that one
    survivor knows is valid, even if another survivor was interrupted before.

    Args:
        ranks: maps the old rank of each survivor to its new rank.

    Returns:
        The new ranks of each process set, by id as text, and the next free id.

    Example:
        >>> one = CommitReport(sets={"1": (0, 2), "2": (1, 2)}, next_set=3)
        >>> other = CommitReport(sets={"1": (0, 2)}, next_set=2)
        >>> all_sets([one, other], {0: 0, 2: 1})
        ({'1': [0, 1], '2': [1]}, 3)
    """
    sets: dict[str, tuple[int, ...]] = {}
    next_set = 1
    for report in survivors:
        next_set = max(next_set, report.next_set)
        sets |= report.sets
    found = {
        number: [ranks[rank] for rank in members if rank in ranks]
        for number, members in sorted(sets.items(), key=lambda item: int(item[0]))
    }
    return found, next_set


def rank_to_give_up(
    accusations: Iterable[tuple[int, int]], joined: Container[int] = ()
) -> int | None:
    """Chooses the rank to exclude if ranks are alive but cannot reach each other.

    An accusation is the report of one rank that it cannot reach another. The function
    chooses the rank with accusations from or against the most other ranks. Among equal
    ranks, it prefers a rank of `joined`, then the most accused rank, then the highest.

    Args:
        accusations: pairs of (accuser, accused).
        joined: ranks that have joined in this epoch, and may not have received the
            training state yet.

    Example:
        >>> rank_to_give_up([(0, 3), (3, 0), (1, 3)])
        3
        >>> rank_to_give_up([(0, 1), (1, 0)])
        1
        >>> rank_to_give_up([(1, 0)])
        0
        >>> rank_to_give_up([(1, 0)], joined=[1])
        1
    """
    trouble: dict[int, set[int]] = {}
    accusers: dict[int, int] = {}
    for accuser, accused in sorted(set(accusations)):
        trouble.setdefault(accuser, set()).add(accused)
        trouble.setdefault(accused, set()).add(accuser)
        accusers[accused] = accusers.get(accused, 0) + 1
    return max(
        trouble,
        key=lambda rank: (
            len(trouble[rank]),
            rank in joined,
            accusers.get(rank, 0),
            rank,
        ),
        default=None,
    )
