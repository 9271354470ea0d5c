"""One epoch as the coordinator sees it: members, losses, accusations, reports.

Pure bookkeeping; what is done about it is decided in membership.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ringjax.membership import commit_decision
from ringjax.membership.commit_decision import CommitReport


class EpochState:
    """One generation of membership.

    Attributes:
        number: -1 before there is a first one.
        order: its workers by rank, also those that are gone since.
        joiners: those of them who were no members before.
        alive: those of them who are members now.
        lost: ranks that are gone -> why.
        leavers: members who want to leave at the next pause.
        reports: of members: how far they came. Once there is one, the epoch is over.
        pauses: of members: they stand at a step boundary.
        restart: all go back to their last commit.
        announced: what the members were told about who wants to join, and to leave.
        untold: ranks that are gone and of which the members have not heard -> how far
            they came, if they said so.
        told: when the members were told of such ranks last.
    """

    def __init__(
        self,
        number: int = -1,
        order: Sequence[int] = (),
        joiners: Iterable[int] = (),
    ) -> None:
        self.number, self.order = number, list(order)
        self.joiners = frozenset(joiners)
        self.alive = set(order)
        self.lost: dict[int, str] = {}
        self.leavers: set[int] = set()
        self.reports: dict[int, CommitReport] = {}
        self.pauses: dict[int, CommitReport] = {}
        self.restart = False
        self.announced = (0, 0)
        self.untold: dict[int, CommitReport | None] = {}
        self.told = -math.inf
        self._last_words: list[CommitReport] = []  # of lost members
        self._doubts: dict[tuple[int, int], float] = {}  # (accuser, accused) -> since
        self._why: dict[int, str] = {}

    def remove(self, worker: int, why: str, last: CommitReport | None = None) -> None:
        """A member is gone."""
        self.alive.discard(worker)
        self.lost[self.order.index(worker)] = why
        self.leavers.discard(worker)
        self.pauses.pop(worker, None)
        report = self.reports.pop(worker, None) or last
        if report is not None:
            self._last_words.append(report)
        if self._doubts:
            self._doubts = {
                pair: since
                for pair, since in self._doubts.items()
                if worker not in pair
            }

    def accuse(self, accuser: int, accused: int, text: str, now: float) -> None:
        """One member cannot reach another one."""
        self._doubts.setdefault((accuser, accused), now)
        rank = self.order.index(accuser)
        self._why.setdefault(accused, f"{text} (says rank {rank})")

    def tell_at(self, pause: float) -> float | None:
        """When the members are to be told who is gone; None: they know."""
        return self.told + pause if self.untold else None

    def wait_for(self, silence: float, doubt: float) -> float | None:
        """When the accusations have to be looked at again.

        Args:
            silence: seconds that an accused member has to report.
            doubt: seconds until accusers and accused that all live are weighed.
        """
        if not self._doubts:
            return None
        if not self.unreported():
            return min(self._doubts.values()) + doubt
        limits = (
            since + silence
            for (_, accused), since in self._doubts.items()
            if accused not in self.reports
        )
        return min(limits, default=None)

    def silent(self, now: float, silence: float) -> dict[int, str]:
        """Members that were accused and do not report, and why they count as lost."""
        return {
            accused: self._why[accused]
            for (_, accused), since in self._doubts.items()
            if accused not in self.reports and now >= since + silence
        }

    def revocation(self) -> dict[str, Any]:
        """Tells members that the epoch is over."""
        lost = {str(rank): why for rank, why in self.lost.items()}
        message = {"type": "revoke", "epoch": self.number, "lost": lost}
        return message | {"restart": self.restart}

    def unreported(self) -> list[int]:
        """Members that have not reported."""
        return [w for w in self.order if w in self.alive and w not in self.reports]

    def torn(self, now: float, doubt: float) -> dict[int, str] | None:
        """Whom to give up because members cannot reach each other, all being alive.

        Returns:
            None if it is too early to tell.
        """
        if not self._doubts:
            return {}
        if now < min(self._doubts.values()) + doubt:
            return None
        rank_of = {worker: rank for rank, worker in enumerate(self.order)}
        pairs = ((rank_of[a], rank_of[b]) for a, b in self._doubts)
        rank = commit_decision.culprit(
            pairs, {rank_of[worker] for worker in self.joiners}
        )
        assert rank is not None
        worker = self.order[rank]
        accusers = [w for w, accused in self._doubts if accused == worker]
        why = self._why.get(worker) if accusers else None
        return {worker: why or "it says that it cannot reach the others"}

    def survivors(self) -> list[int]:
        """The members, in the order of their ranks."""
        return [worker for worker in self.order if worker in self.alive]

    def outcome(self, kind: str) -> dict[str, Any]:
        """What the members of the next epoch are told about this one."""
        if kind == "start":
            return {"verdicts": {}, "sets": {}, "next_set": 1}
        survivors = self.survivors()
        words = self.pauses if kind == "resize" else self.reports
        reports = [words[worker] for worker in survivors]
        ranks = {self.order.index(worker): new for new, worker in enumerate(survivors)}
        sets, next_set = commit_decision.all_sets(reports, ranks)
        found: Mapping[str, Any] = {}
        if kind != "resize":
            found = commit_decision.decide(reports, self._last_words, kind == "restart")
        return {"verdicts": found, "sets": sets, "next_set": next_set}
