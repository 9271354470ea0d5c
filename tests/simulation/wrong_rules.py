"""Rules for elastic jobs that are wrong on purpose: the simulation must find them.

naive: everybody repeats what it has no result of. no barrier: a call returns as soon as
its own results are complete. silent leave: who finishes does not say how far it came.
majority: what most have done counts as finished. hasty: the coordinator does not wait
for the reports of all. own ending: of groups, a call ends where the others at the same
place have their results. Those that are no rules of the coordinator are played by the
workers.
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


class Hasty(EpochState):
    """Decides on the first report."""

    def unreported(self) -> list[int]:
        return [] if self.reports else super().unreported()

    def outcome(self, kind: str) -> dict[str, Any]:
        some = next(iter(self.reports.values()), CommitReport())
        for worker in self.survivors():
            self.reports.setdefault(worker, some)
        return super().outcome(kind)


class Majority(EpochState):
    """Lets most decide."""

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
    """Has coordinators follow a wrong rule, if it is theirs."""
    epoch_state = {"majority": Majority, "hasty": Hasty}.get(wrong)
    with contextlib.ExitStack() as stack:
        for module in (epochs, membership) if epoch_state else ():
            stack.enter_context(mock.patch.object(module, "EpochState", epoch_state))
        yield
