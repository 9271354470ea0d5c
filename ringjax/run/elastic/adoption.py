"""Ranks that an earlier ringrun has started, and that come with their hosts' agents.

The agents remember for the next ringrun what it has to know: which numbers of workers
were used, and which of those ran beside ringrun itself and ended with it. Decides
nothing about members; that is the coordinator's, to which the members come back.
"""

from __future__ import annotations

import signal
import time
from typing import Any

from ringjax.run.elastic.coordinator_process import CoordinatorProcess
from ringjax.run.elastic.seats import Seat, Seating
from ringjax.run.elastic.workers import Roster, Worker
from ringjax.run.hosts.channel import Message
from ringjax.run.hosts.fleet import Fleet
from ringjax.run.output import Console

_GONE = "ended with the ringrun that had started it"


class Adoption:
    """What agents bring along.

    Attributes:
        resumes: ranks of a job that had begun run.
        done: they have all ended, and some of them without an error.
    """

    def __init__(
        self, roster: Roster, seating: Seating, fleet: Fleet, console: Console
    ) -> None:
        self._roster, self._seating = roster, seating
        self._fleet, self._console = fleet, console
        self._coordinator: CoordinatorProcess | None = None

    @property
    def resumes(self) -> bool:
        """Whether ranks of a job that had begun run."""
        return bool(self._roster.running())

    @property
    def done(self) -> bool:
        """Whether all ranks that came have ended, and one of them without an error."""
        codes = [worker.exit_code for worker in self._roster.workers.values()]
        return 0 in codes and None not in codes

    def take(self, host: str, hello: Message) -> None:
        """A host has come; its seats are there."""
        memory = hello["memory"] or {"next": 0, "own": []}
        self._roster.reserve(memory["next"])
        unwanted = []
        for rank in hello["ranks"]:
            worker = self._roster.workers.get(rank["id"])
            if worker is None or not worker.seat.host:
                self._adopt(host, rank)
            elif not worker.runs and "code" not in rank:
                unwanted.append(worker.number)  # the others went on without it
        for number in memory["own"]:
            worker = self._roster.workers.get(number)
            if worker is None or not worker.seat.host:
                self._ended(
                    number, Seat("localhost", 0, 0), 128 + signal.SIGKILL, _GONE
                )
        if unwanted:
            self._fleet.signal(signal.SIGKILL, unwanted)

    def _adopt(self, host: str, rank: dict[str, Any]) -> None:
        number, index = rank["id"], rank["seat"]
        if "code" in rank:
            self._ended(number, Seat(host, index, 0), rank["code"], "")
            return
        seat = self._seating.occupy(host, index, number)
        worker = self._roster.adopt(number, seat)
        worker.pid = rank["pid"]
        self._console.add(number, seat.number)
        self._tell(worker)

    def _ended(self, number: int, seat: Seat, code: int, text: str) -> None:
        worker = self._roster.adopt(number, seat)
        worker.exit_code, worker.exit_text, worker.ended = code, text, time.monotonic()
        worker.settled = True
        self._tell(worker)

    def introduce(self, coordinator: CoordinatorProcess) -> None:
        """From now on there is somebody who has to know."""
        self._coordinator = coordinator
        for worker in self._roster.workers.values():
            self._tell(worker)

    def _tell(self, worker: Worker) -> None:
        if self._coordinator is None:
            return
        if worker.runs:
            self._coordinator.expected(worker.number)
            return
        why = worker.exit_text or f"ended with exit code {worker.exit_code}"
        self._coordinator.lost(worker.number, why, worker.may_have_heirs)

    def memory(self) -> Message:
        """What agents are to remember."""
        own = [w.number for w in self._roster.running() if self._is_own(w.seat.host)]
        return {"next": self._roster.next, "own": own}

    def _is_own(self, host: str) -> bool:
        return not self._fleet.has_come(host)
