"""Deliberately wrong rules for elastic jobs, which the simulation must find.

naive: each worker repeats a call if it has no result itself.
no barrier: a call returns as soon as its results are complete on this worker.
silent leave: a worker that finishes does not report its progress.
majority: a call counts as complete if most workers have completed it.
hasty: the coordinator does not wait for the reports of all workers.
own ending: a call of a group ends when its replica set has the results.

The coordinator breaks the rules majority and hasty, the workers break the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from ringjax.membership import epochs, membership
from ringjax.membership.commit_decision import CommitReport
from ringjax.membership.epoch_state import EpochState

WRONG = ("naive", "no barrier", "silent leave", "majority", "hasty", "own ending")


class FirstReportDecides(EpochState):
    """Decides on the first report."""

    def unreported(self) -> list[int]:
        return [] if self.reports else super().unreported()

    def outcome(self, kind: str) -> dict[str, Any]:
        some = next(iter(self.reports.values()), CommitReport())
        for worker in self.survivors():
            self.reports.setdefault(worker, some)
        return super().outcome(kind)


class MajorityDecides(EpochState):
    """Counts a call as complete if most workers have completed it."""

    def outcome(self, kind: str) -> dict[str, Any]:
        found = super().outcome(kind)
        if kind == "repair" and "0" in found["verdicts"]:
            finished, repeats = found["verdicts"]["0"]
            lines = [report.lines["0"] for report in self.reports.values()]
            done = sorted(line[1] for line in lines)[(len(lines) - 1) // 2]
            found["verdicts"]["0"] = (max(finished, done), repeats)
        return found


@contextlib.contextmanager
def applied(wrong: str) -> Iterator[None]:
    """Makes coordinators follow a wrong rule, if it is a rule of the coordinator."""
    epoch_state = {"majority": MajorityDecides, "hasty": FirstReportDecides}.get(wrong)
    with contextlib.ExitStack() as stack:
        for module in (epochs, membership) if epoch_state else ():
            stack.enter_context(mock.patch.object(module, "EpochState", epoch_state))
        yield
