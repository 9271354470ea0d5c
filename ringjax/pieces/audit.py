"""Audits: in some steps a second rank computes a piece, and all compare their states.

All ranks compute the same bits, so a difference is a fault of a core or of memory. The
ranks exchange checksums in the control words of the step, so that all of them find the
same ranks at fault in the same step.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ringjax import runtime, stderr
from ringjax.elastic.place import Place
from ringjax.errors import Fenced, Mismatch
from ringjax.pieces.control import Control
from ringjax.pieces.training import NAME

# An audit makes one step longer by a piece, or by places / pieces of its duration. With
# places / pieces * 128 steps from one audit to the next, it costs 1/128 of all time.
_STEPS = 128


def default_steps(places: int, pieces: int) -> int:
    """Returns the number of steps from one audit to the next if none is given.

    Example:
        >>> default_steps(places=2, pieces=12)
        21
    """
    return max(1, _STEPS * places // pieces)


class Duties(NamedTuple):
    """Duties of an audit: the places that compute the audited piece.

    Attributes:
        piece: the audited piece.
        voters: the places that compute it: its owner and the auditor.
        referees: who computes it if those differ: a third place, or both again.
    """

    piece: int
    voters: tuple[int, int]
    referees: tuple[int, ...]


def duties(turn: int, counts: Sequence[int]) -> Duties:
    """Returns the duties of audit number `turn` if the places have `counts` pieces.

    Example:
        >>> duties(3, [2, 2, 2])
        Duties(piece=3, voters=(1, 2), referees=(0,))
        >>> duties(0, [1, 1])
        Duties(piece=0, voters=(0, 1), referees=(0, 1))
    """
    pieces = sum(counts)
    piece = turn % pieces
    ends = list(itertools.accumulate(counts))
    owner = next(place for place, end in enumerate(ends) if piece < end)
    places = range(len(counts))
    # A place without a piece was probably lost.
    others = [place for place in places if place != owner and counts[place]]
    others = others or [place for place in places if place != owner]
    # In the next round of all pieces, another place is the auditor of a piece.
    index = (piece + turn // pieces) % len(others)
    auditor = others[index]
    referees = [place for place in others if place != auditor][:1]
    return Duties(piece, (owner, auditor), tuple(referees) or (owner, auditor))


def outvoted(votes: Iterable[tuple[int, object]]) -> set[int] | None:
    """Returns the voters that ever differed from more than half of the votes.

    Returns None if no value has more than half of the votes.

    Example:
        >>> outvoted([(0, "a"), (1, "b"), (2, "b")])
        {0}
        >>> outvoted([(0, "a"), (1, "b")]) is None
        True
    """
    votes = list(votes)
    [(value, count)] = Counter(vote for _, vote in votes).most_common(1)
    if 2 * count <= len(votes):
        return None
    return {voter for voter, vote in votes if vote != value}


class Audit:
    """The audit of one step, or of no piece and no state if it is not due.

    Args:
        every: the number of steps from one audit to the next; 0 for no audits; None
            for as many as cost less than a fiftieth of the time.
        number: the number of the step.
        place: the place of this rank.
        counts: the number of pieces of each place.
        piecewise: whether a single piece can be audited.
    """

    def __init__(
        self,
        every: int | None,
        number: int,
        place: Place,
        counts: Sequence[int],
        piecewise: bool = True,
    ) -> None:
        pieces = sum(counts)
        if every is None:
            every = default_steps(place.count, pieces)
        self.due = every > 0 and number % every == 0 and place.count > 1
        self._number, self._every, self._place = number, every, place.index
        self._duties: Duties | None = None
        if self.due and piecewise:
            self._duties = duties(number // every, counts)
        self._disputed = False

    @property
    def piece(self) -> int:
        """The audited piece; -1 if there is none."""
        return self._duties.piece if self._duties else -1

    @property
    def owns(self) -> bool:
        """Whether the audited piece is a piece of this rank."""
        return bool(self._duties and self._duties.voters[0] == self._place)

    def slots(self) -> list[int]:
        """Returns the votes for which this rank computes the piece apart from its sum.

        Vote 0 is that of the owner, who computes the piece for the sum.
        """
        if self._duties is None:
            return []
        _, (_, auditor), referees = self._duties
        voters = enumerate(referees, start=2) if self._disputed else [(1, auditor)]
        return [slot for slot, voter in voters if voter == self._place]

    def judge(self, total: Control) -> bool:
        """Compares the votes of all ranks. Returns whether to exchange once more.

        Then a referee has to vote, or a rank at fault has left an elastic job.

        Raises:
            Fenced: this rank is at fault, in an elastic job.
            Mismatch: ranks differ in a static job, or none of them is in the right
                for sure.
        """
        if not self.due:
            return False
        here = total.present.nonzero()[0].tolist()
        states = [(place, total.states[place].tobytes()) for place in here]
        if len({state for _, state in states}) > 1:
            return self._blame(
                states,
                "have different parameters or optimizer states, so results since step "
                f"{max(self._number - self._every, 0)} may be wrong",
            )
        votes = self._votes(total)
        if len({vote for _, vote in votes}) < 2:
            return False
        if not self._disputed:
            self._disputed = True
            return True
        what = f"have computed different gradients of piece {self.piece}"
        return self._blame(votes, what)

    def _votes(self, total: Control) -> list[tuple[int, object]]:
        if self._duties is None:
            return []
        _, voters, referees = self._duties
        all_voters = (*voters, *referees) if self._disputed else voters
        return [
            (voter, total.votes[slot].tobytes())
            for slot, voter in enumerate(all_voters)
            if total.present[voter]
        ]

    def _blame(self, votes: list[tuple[int, object]], what: str) -> bool:
        """Raises the error about the ranks at fault, or returns True on all others."""
        found = outvoted(votes)
        fault = " and ".join(f"rank {place} is at fault" for place in found or ())
        if found is None:
            fault = "it is not known which of them are at fault"
        places = ", ".join(map(str, sorted({voter for voter, _ in votes})))
        text = f"{NAME}: in step {self._number}, ranks {places} {what}: {fault}"
        if found and runtime.elastic():
            if self._place in found:
                raise Fenced(f"{text}, was declared lost and must not go on")
            if self._place == min({voter for voter, _ in votes} - found):
                stderr.line(f"[ringjax] warning: {text}, and is lost")
            return True
        remedy = (
            "test the memory and the CPU of its host"
            if found
            else "`load` and `loss_of` must depend on step and piece, never on the "
            "rank; if so, test the memory and the CPUs of their hosts"
        )
        error = Mismatch(f"{text}; {remedy}")
        error.rank = min(found) if found else -1
        raise error
