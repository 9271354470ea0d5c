"""Takes over the workers of an earlier ringrun when the agents of their hosts join.

Each ringrun stores a record in its agents, for the next ringrun: the id of the job, the
lowest id that no worker has had, and the host of each worker. Workers that the old
ringrun started itself have ended with the old ringrun. If the record lists a worker on
a host, and that host's agent does not report the worker, the worker has ended with an
earlier agent. The ranks reconnect to the coordinator by themselves, and the coordinator
decides which of them are members.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from ringjax.run.console import Console
from ringjax.run.elastic.worker_slots import WorkerSlots
from ringjax.run.hosts.agent_pool import AgentPool
from ringjax.run.hosts.channel import Message
from ringjax.run.workers import Worker, WorkerSlot, WorkerTable

_STATIC_HOST = ""  # stands in the state for hosts on which ringrun started the agent
_LOST = "ended with the ringrun or the agent that had started it"


class Takeover:
    """Registers the workers of an earlier ringrun when their agents join.

    `inform` is called to report a running or ended worker to the coordinator.
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
        self._job = ""  # the id of the job, which an earlier ringrun may have chosen
        # The hosts of earlier ringruns' workers, by worker id.
        self._hosts: dict[int, str] = {}

    @property
    def resumes(self) -> bool:
        """Whether workers that an earlier ringrun has started still run."""
        return bool(self._table.running())

    @property
    def succeeded(self) -> bool:
        """Whether all registered workers have ended, at least one without an error."""
        codes = [worker.exit_code for worker in self._table.workers.values()]
        return 0 in codes and None not in codes

    def resolve_job(self, state: Message) -> str:
        """Returns the id of this job: the first job id in the record of an agent.

        An agent whose record has another job id ends its ranks.
        """
        self._job = self._job or state.get("job", "")
        return self._job

    def add_host(self, host: str, hello: Message) -> None:
        """Registers the workers that a joining agent lists in its hello."""
        state = hello["state"] or {"next": 0, "hosts": []}
        self._table.reserve(state["next"])
        self._hosts |= dict(state["hosts"])
        unwanted = []
        for rank in hello["ranks"]:
            worker = self._table.workers.get(rank["id"])
            if worker is None or not worker.slot.host:
                self._adopt_running(host, rank)
            elif not worker.is_running and "code" not in rank:
                # This worker was declared lost when the connection to its host broke.
                unwanted.append(worker.number)
        for number, place in self._hosts.items():
            here = place == _STATIC_HOST or self._agents.has_joined(place)
            worker = self._table.workers.get(number)
            if here and (worker is None or not worker.slot.host):
                slot = WorkerSlot(place or "localhost", 0, 0)
                self._record_end(number, slot, 128 + signal.SIGKILL, _LOST)
        if unwanted:
            self._agents.signal(signal.SIGKILL, unwanted)

    def _adopt_running(self, host: str, rank: Message) -> None:
        number, index = rank["id"], rank["local_rank"]
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
        """Returns the record that agents keep for the next ringrun."""
        places = [
            (worker.number, host if self._agents.has_joined(host) else _STATIC_HOST)
            for worker in self._table.running()
            if (host := worker.slot.host)
        ]
        return {"job": self._job, "next": self._table.next, "hosts": places}
