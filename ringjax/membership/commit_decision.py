"""What the reports of an epoch that is over mean: verdicts, process sets, the culprit.

Pure functions of what workers said, so that every coordinator decides the same; when
they are called is decided in membership.py.

A rank returns from a call only when it knows that all ranks have complete results of
it. So if one rank has returned from a call, all can finish it, and if all survivors
have complete results, it may count as finished though nobody has returned yet.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Verdicts = dict[str, tuple[int, bool]]


@dataclass(slots=True)
class CommitReport:
    """How far a worker came in an epoch.

    Attributes:
        lines: number of the communicator, as text -> (returned, done, repeatable):
            calls that have returned here, calls whose results are complete here, and
            whether the call in flight still has its inputs.
        sets: the process sets it knows, without the world -> ranks in that epoch.
        next_set: the least number that no process set had.
        restart: it can only start again from its last commit.
    """

    lines: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    sets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    next_set: int = 0
    restart: bool = False


def read(message: Mapping[str, Any]) -> CommitReport:
    """Takes a report from a worker's message.

    Raises:
        ValueError: it is none.
    """
    try:
        lines = {
            str(int(number)): (int(returned), int(done), bool(repeatable))
            for number, (returned, done, repeatable) in (
                message.get("lines") or {}
            ).items()
        }
        sets = {
            str(int(number)): tuple(map(int, ranks))
            for number, ranks in (message.get("sets") or {}).items()
            if int(number)
        }
        next_set = int(message.get("next_set") or 0)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ValueError(f"sent no report: {error}") from None
    return CommitReport(lines, sets, next_set, bool(message.get("restart")))


def decide(
    survivors: Iterable[CommitReport], others: Iterable[CommitReport], restart: bool
) -> Verdicts:
    """The verdict for every communicator that a survivor has.

    Args:
        survivors: the reports of those who go on.
        others: of those who reported and do not go on: what they have returned from
            stays finished.
        restart: nothing is repeated.

    Returns:
        Number of the communicator -> (calls that are finished, whether the one in
        flight is repeated).

    Example:
        >>> quick = CommitReport({"0": (6, 6, True)})
        >>> slow = CommitReport({"0": (5, 6, True), "2": (3, 3, False)})
        >>> decide([quick, slow], [], restart=False)
        {'0': (6, True), '2': (3, False)}
    """
    found: Verdicts = {}
    least: dict[str, int] = {}
    for report in survivors:
        for number, (returned, done, repeatable) in report.lines.items():
            if number not in found:
                found[number], least[number] = (returned, repeatable), done
            else:
                most, repeats = found[number]
                found[number] = (max(most, returned), repeats and repeatable)
                least[number] = min(least[number], done)
    for report in others:
        for number, (returned, _, _) in report.lines.items():
            if number in found:
                most, repeats = found[number]
                found[number] = (max(most, returned), repeats)
    if restart:
        return {number: (most, False) for number, (most, _) in found.items()}
    return {
        number: (max(most, least[number]), repeats)
        for number, (most, repeats) in found.items()
    }


def all_sets(
    survivors: Iterable[CommitReport], ranks: Mapping[int, int]
) -> tuple[dict[str, list[int]], int]:
    """The process sets that any survivor knows, and the next free number.

    A set that is complete anywhere was agreed by all, even if a survivor was
    interrupted before it heard so.

    Args:
        ranks: old rank -> new rank, of the survivors.

    Example:
        >>> one = CommitReport(sets={"1": (0, 2), "2": (1, 2)}, next_set=3)
        >>> other = CommitReport(sets={"1": (0, 2)}, next_set=2)
        >>> all_sets([one, other], {0: 0, 2: 1})
        ({'1': [0, 1], '2': [1]}, 3)
    """
    sets: dict[str, tuple[int, ...]] = {}
    following = 1
    for report in survivors:
        following = max(following, report.next_set)
        sets |= report.sets
    found = {
        number: [ranks[rank] for rank in members if rank in ranks]
        for number, members in sorted(sets.items(), key=lambda item: int(item[0]))
    }
    return found, following


def culprit(
    accusations: Iterable[tuple[int, int]], joined: Container[int] = ()
) -> int | None:
    """The rank to give up so that ranks which cannot reach each other are not together.

    Args:
        accusations: pairs of (accuser, accused), both alive.
        joined: ranks that have joined in this epoch. They may have no state of the
            training yet, and the others have it.

    Returns:
        The one that has trouble with the most others; of equals one that has joined;
        of equals the one that more accuse; of equals the highest.

    Example:
        >>> culprit([(0, 3), (3, 0), (1, 3)])
        3
        >>> culprit([(0, 1), (1, 0)])
        1
        >>> culprit([(1, 0)])
        0
        >>> culprit([(1, 0)], joined=[1])
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
