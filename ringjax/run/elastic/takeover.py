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

_STATIC_HOST = ""  # a host that does not come by itself
_LOST = "ended with the ringrun or the agent that had started it"


class Takeover:
    """What agents bring along.

    Attributes:
        job: the id of the job, once it is known; it may have been another ringrun's.
    """

    def __init__(
        self,
        table: WorkerTable,
        slots: WorkerSlots,
        agents: AgentPool,
        console: Console,
        inform: Callable[[Worker], None],
    ) -> None:
        self._table, self._slots = table, slots
        self._agents, self._console = agents, console
        self._inform = inform
        self.job = ""
        self._hosts: dict[int, str] = {}  # of workers before this ringrun -> hosts

    @property
    def resumes(self) -> bool:
        """Whether ranks of a job that had begun run."""
        return bool(self._table.running())

    @property
    def succeeded(self) -> bool:
        """Whether all ranks that came have ended, and one of them without an error."""
        codes = [worker.exit_code for worker in self._table.workers.values()]
        return 0 in codes and None not in codes

    def resolve_job(self, job_state: Message) -> str:
        """The job of an agent that remembers this; of another one it is to forget."""
        self.job = self.job or job_state.get("job", "")
        return self.job

    def add_host(self, host: str, hello: Message) -> None:
        """A host has come; its slots are there."""
        job_state = hello["memory"] or {"next": 0, "places": []}
        self._table.reserve(job_state["next"])
        self._hosts |= dict(job_state["places"])
        unwanted = []
        for rank in hello["ranks"]:
            worker = self._table.workers.get(rank["id"])
            if worker is None or not worker.slot.host:
                self._adopt_running(host, rank)
            elif not worker.is_running and "code" not in rank:
                unwanted.append(worker.number)  # the others went on without it
        for number, place in self._hosts.items():
            here = place == _STATIC_HOST or self._agents.has_joined(place)
            worker = self._table.workers.get(number)
            if here and (worker is None or not worker.slot.host):
                slot = WorkerSlot(place or "localhost", 0, 0)
                self._record_end(number, slot, 128 + signal.SIGKILL, _LOST)
        if unwanted:
            self._agents.signal(signal.SIGKILL, unwanted)

    def _adopt_running(self, host: str, rank: dict[str, Any]) -> None:
        number, index = rank["id"], rank["seat"]
        if "code" in rank:
            self._record_end(number, WorkerSlot(host, index, 0), rank["code"], "")
            return
        slot = self._slots.occupy(host, index, number)
        worker = self._table.adopt(number, slot)
        worker.pid = rank["pid"]
        self._console.add(number, slot.number)
        self._inform(worker)

    def _record_end(self, number: int, slot: WorkerSlot, code: int, text: str) -> None:
        worker = self._table.adopt(number, slot)
        self._table.record_end(worker, code, text, time.monotonic())
        worker.settled = True
        self._inform(worker)

    def job_state(self) -> Message:
        """What agents are to remember."""
        places = [
            (worker.number, host if self._agents.has_joined(host) else _STATIC_HOST)
            for worker in self._table.running()
            if (host := worker.slot.host)
        ]
        return {"job": self.job, "next": self._table.next, "places": places}
