"""Ranks that an earlier ringrun has started, and that come with their hosts' agents.

The agents remember for the next ringrun what it has to know: the job, which numbers of
workers were used, and where each one ran. What ran beside ringrun itself has ended with
it, and what an agent should have and does not, with the agent that was there before.
Decides nothing about members; that is the coordinator's, to which they come back.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from ringjax.run.console import Console
from ringjax.run.elastic.worker_slots import WorkerSlots
from ringjax.run.hosts.agent_pool import AgentPool
from ringjax.run.hosts.channel import Message
from ringjax.run.workers import Worker, WorkerSlot, WorkerTable

_OWN = ""  # a host that does not come by itself
_GONE = "ended with the ringrun or the agent that had started it"


class Takeover:
    """What agents bring along.

    Attributes:
        job: the id of the job, once it is known; it may have been another ringrun's.
    """

    def __init__(
        self,
        table: WorkerTable,
        seating: WorkerSlots,
        fleet: AgentPool,
        console: Console,
        tell: Callable[[Worker], None],
    ) -> None:
        self._table, self._seating = table, seating
        self._fleet, self._console = fleet, console
        self._tell = tell
        self.job = ""
        self._places: dict[int, str] = {}  # of workers before this ringrun -> hosts

    @property
    def resumes(self) -> bool:
        """Whether ranks of a job that had begun run."""
        return bool(self._table.running())

    @property
    def done(self) -> bool:
        """Whether all ranks that came have ended, and one of them without an error."""
        codes = [worker.exit_code for worker in self._table.workers.values()]
        return 0 in codes and None not in codes

    def job_for(self, memory: Message) -> str:
        """The job of an agent that remembers this; of another one it is to forget."""
        self.job = self.job or memory.get("job", "")
        return self.job

    def take(self, host: str, hello: Message) -> None:
        """A host has come; its seats are there."""
        memory = hello["memory"] or {"next": 0, "places": []}
        self._table.reserve(memory["next"])
        self._places |= dict(memory["places"])
        unwanted = []
        for rank in hello["ranks"]:
            worker = self._table.workers.get(rank["id"])
            if worker is None or not worker.seat.host:
                self._adopt(host, rank)
            elif not worker.runs and "code" not in rank:
                unwanted.append(worker.number)  # the others went on without it
        for number, place in self._places.items():
            here = place == _OWN or self._fleet.has_come(place)
            worker = self._table.workers.get(number)
            if here and (worker is None or not worker.seat.host):
                seat = WorkerSlot(place or "localhost", 0, 0)
                self._ended(number, seat, 128 + signal.SIGKILL, _GONE)
        if unwanted:
            self._fleet.signal(signal.SIGKILL, unwanted)

    def _adopt(self, host: str, rank: dict[str, Any]) -> None:
        number, index = rank["id"], rank["seat"]
        if "code" in rank:
            self._ended(number, WorkerSlot(host, index, 0), rank["code"], "")
            return
        seat = self._seating.occupy(host, index, number)
        worker = self._table.adopt(number, seat)
        worker.pid = rank["pid"]
        self._console.add(number, seat.number)
        self._tell(worker)

    def _ended(self, number: int, seat: WorkerSlot, code: int, text: str) -> None:
        worker = self._table.adopt(number, seat)
        self._table.ended(worker, code, text, time.monotonic())
        worker.settled = True
        self._tell(worker)

    def memory(self) -> Message:
        """What agents are to remember."""
        places = [
            (worker.number, host if self._fleet.has_come(host) else _OWN)
            for worker in self._table.running()
            if (host := worker.seat.host)
        ]
        return {"job": self.job, "next": self._table.next, "places": places}
