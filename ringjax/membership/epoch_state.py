"""Records the members, the lost ranks and the members' reports of one epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ringjax.control.member import JsonObject
from ringjax.control.number_lists import compress
from ringjax.errors import SHUT_DOWN
from ringjax.membership import commit_decision
from ringjax.membership.commit_decision import CommitDecisions, CommitReport


class EpochState:
    """The coordinator's record of one epoch.

    Attributes:
        number: the index of the epoch, -1 before the first epoch.
        order: the workers of the epoch by rank, including workers that have left since.
        rank_of: the rank of each of these workers.
        joiners: the workers that were not members before.
        alive: the workers that are members now.
        lost: ranks that have left or are lost, with the reasons.
        leavers: members that want to leave at the next pause.
        reports: the reports of members. The first report ends the epoch.
        pauses: the reports of members that wait at a step boundary.
        restart: whether all members return to their last commit.
        announced: how many joining and leaving workers were announced last.
        unannounced: departed ranks that the members do not know yet, each with its last
            report or None.
        announced_at: the time of the last message to members about departed ranks.
    """

    def __init__(
        self,
        number: int = -1,
        order: Sequence[int] = (),
        joiners: Iterable[int] = (),
    ) -> None:
        self.number, self.order = number, list(order)
        self.rank_of = {worker: rank for rank, worker in enumerate(self.order)}
        self.joiners = frozenset(joiners)
        self.alive = set(order)
        self.lost: dict[int, str] = {}
        self.leavers: set[int] = set()
        self.reports: dict[int, CommitReport] = {}
        self.pauses: dict[int, CommitReport] = {}
        self.restart = False
        self.announced = (0, 0)
        self.unannounced: dict[int, CommitReport | None] = {}
        self.announced_at = -math.inf
        self._departed_reports: list[CommitReport] = []
        # When the first member of a pair has reported that it cannot reach the second.
        # The entries are in the order of these times.
        self._accusations: dict[tuple[int, int], float] = {}
        self._reasons: dict[int, str] = {}  # the first accusation, by accused member
        # The pairs of which the second member has announced that it closes its links.
        self._closed_links: set[tuple[int, int]] = set()

    def remove(self, worker: int, why: str, last: CommitReport | None = None) -> None:
        """Records that a member has left or is lost.

        If the member has not reported before, `last` may be its last report.
        """
        self.alive.discard(worker)
        self.lost[self.rank_of[worker]] = why
        self.leavers.discard(worker)
        self.pauses.pop(worker, None)
        report = self.reports.pop(worker, None) or last
        if report is not None:
            self._departed_reports.append(report)
        self._accusations = {
            pair: since
            for pair, since in self._accusations.items()
            if worker not in pair
        }

    def accuse(self, accuser: int, accused: int, text: str, now: float) -> None:
        """Records that one member cannot reach another."""
        if SHUT_DOWN in text:
            self._closed_links.add((accuser, accused))
        self._accusations.setdefault((accuser, accused), now)
        rank = self.rank_of[accuser]
        self._reasons.setdefault(accused, f"{text} (says rank {rank})")

    def announce_at(self, interval: float) -> float | None:
        """Returns when to announce departed ranks, or None if there are none."""
        return self.announced_at + interval if self.unannounced else None

    def accusation_deadline(
        self, report_timeout: float, arbitration_delay: float
    ) -> float | None:
        """Returns when `silent` or `arbitrate` may name a member, or None if never."""
        if not self._accusations:
            return None
        if self.all_reported():
            return next(iter(self._accusations.values())) + arbitration_delay
        limits = (
            since + report_timeout
            for (_, accused), since in self._accusations.items()
            if accused not in self.reports
        )
        return next(limits, None)

    def silent(self, now: float, report_timeout: float) -> dict[int, str]:
        """Returns the unreachable members that did not report in time, with reasons."""
        return {
            accused: self._reasons[accused]
            for (_, accused), since in self._accusations.items()
            if accused not in self.reports and now >= since + report_timeout
        }

    def revocation(self) -> JsonObject:
        """Returns the message that ends this epoch."""
        lost = {str(rank): why for rank, why in self.lost.items()}
        message = {"type": "revoke", "epoch": self.number, "lost": lost}
        return message | {"restart": self.restart}

    def all_reported(self) -> bool:
        """Returns whether every member has sent a report."""
        # The lengths decide in most cases, so that P reports take no P * P steps.
        return len(self.reports) >= len(self.alive) and not self.unreported()

    def unreported(self) -> list[int]:
        """Returns the members that have not sent a report yet."""
        return [w for w in self.order if w in self.alive and w not in self.reports]

    def arbitrate(self, now: float, delay: float) -> dict[int, str] | None:
        """Chooses one of several live members that cannot reach each other.

        Returns the member to exclude and the reason, {} if all members can reach each
        other, or None if it is too early to decide.

        A member that could not connect this epoch closes its links. It can be reached
        if it has reported, so accusations for this reason exclude nobody.
        """
        accusations = {
            pair: since
            for pair, since in self._accusations.items()
            if pair not in self._closed_links
        }
        if not accusations:
            return {}
        if now < next(iter(accusations.values())) + delay:
            return None
        pairs = ((self.rank_of[a], self.rank_of[b]) for a, b in accusations)
        joined = {self.rank_of[worker] for worker in self.joiners}
        rank = commit_decision.rank_to_give_up(pairs, joined)
        assert rank is not None
        worker = self.order[rank]
        is_accused = any(accused == worker for _, accused in accusations)
        why = self._reasons.get(worker) if is_accused else None
        return {worker: why or "it says that it cannot reach the others"}

    def survivors(self) -> list[int]:
        """Returns the current members, in the order of their ranks."""
        return [worker for worker in self.order if worker in self.alive]

    def outcome(self, kind: str) -> JsonObject:
        """Returns what the message that begins the next epoch says about this epoch."""
        if kind == "start":
            return {"verdicts": {}, "sets": {}, "next_set": 1}
        survivors = self.survivors()
        source = self.pauses if kind == "resize" else self.reports
        reports = [source[worker] for worker in survivors]
        ranks = {self.rank_of[worker]: new for new, worker in enumerate(survivors)}
        found, next_set = commit_decision.all_sets(reports, ranks)
        sets = {number: compress(members) for number, members in found.items()}
        decisions: CommitDecisions = {}
        if kind != "resize":
            restart = kind == "restart"
            decisions = commit_decision.decide(reports, self._departed_reports, restart)
        return {"verdicts": decisions, "sets": sets, "next_set": next_set}
