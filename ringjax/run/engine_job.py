"""A job whose processes an engine places and restarts: Ray, Spark, and your own.

Where ringrun starts processes itself, this only brings them together: a coordinator in
the driver; for each worker a ticket, the
variables that let it join; and what became of them, as results or as one error. Starts
and ends no process.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringjax.config import Config
from ringjax.errors import LaunchError
from ringjax.membership.coordinator import Coordinator
from ringjax.run import environ
from ringjax.run.hosts.slots import (
    ANY_HOST,
    HostSlots,
    assign_slots,
    reachable_addresses,
)
from ringjax.run.outcome import first_line, last_line
from ringjax.run.workers import Worker, WorkerSlot, WorkerTable, take_events


class EngineJob:
    """The driver's end of a job on an engine.

    A static job has `size` workers, and its worker n is rank n; the loss of one ends
    it. In an elastic job, one with `min_size`, workers may be lost, and others, under
    numbers that were never used before, join.

    Args:
        size: workers to begin with.
        min_size: with fewer members the job waits for newcomers.
        max_size: the most members of an elastic job; `size` if it is None.
        env: variables for all workers, settings of ringjax among them; this process's
            RINGJAX_* and HOROVOD_* are handed on anyway.
        hosts: the addresses to listen on; None: all of this machine's.
        port: the port there; 0: any free one.
        secret, job: of a job that had begun under another driver, which is gone; its
            members come back if it listened at the same place.
        note: takes sentences for people.

    Raises:
        StartupError: it cannot listen there.
        ValueError: numbers or settings do not fit together.

    Example:
        >>> with EngineJob(2) as job:
        ...     tickets = job.tickets(["node-a", "node-b"])
        ...     for n in (0, 1):  # the engine runs something with tickets[n] there
        ...         job.finished(n, f"result {n}")
        ...     job.results()
        ['result 0', 'result 1']
        >>> tickets[1]["RINGJAX_RANK"], tickets[1]["RINGJAX_LOCAL_RANK"]
        ('1', '0')
    """

    def __init__(
        self,
        size: int,
        *,
        min_size: int | None = None,
        max_size: int | None = None,
        env: Mapping[str, str] | None = None,
        hosts: Sequence[str] | None = None,
        port: int = 0,
        secret: bytes | None = None,
        job: str | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        most = _most(size, min_size, max_size)
        self._env = {**environ.own_settings(), **(env or {})}
        config = Config.from_env(self._env)
        self.size, self.min_size, self.max_size = size, min_size, most
        self.elastic = min_size is not None
        self._note = note or (lambda text: None)
        resume = secret is not None and job is not None
        self._secret = secret or secrets.token_bytes(32)
        self.job = job or secrets.token_hex(8)
        names = [name for name in config.network_interfaces.split(",") if name]
        where: dict[str, Any] = {
            "hosts": reachable_addresses([ANY_HOST], names) if hosts is None else hosts,
            "port": port,
            "start_timeout": config.start_timeout,
            "tls": config.tls,
        }
        self._coordinator = Coordinator(
            self._secret,
            self.job,
            np=size,
            min_np=min_size or size,
            max_np=most,
            on_loss="repair" if self.elastic else "stop",
            elastic_timeout=config.elastic_timeout,
            failure_timeout=config.failure_timeout,
            resume=resume,
            **where,
        )
        self._coordinator.start()
        self._table = self._new_table()
        self._results: dict[int, Any] = {}
        self._spread = False
        self._stop = ""
        self._fenced: list[int] = []  # whose processes are to be ended

    def _new_table(self) -> WorkerTable:
        def last_words(number: int) -> str:
            return self.workers[number].fence_reason or "failed"

        least = self.min_size or self.size
        return WorkerTable(least, last_words, elastic=self.elastic)

    @property
    def workers(self) -> Mapping[int, Worker]:
        """All workers that ever were, by number."""
        return self._table.workers

    @property
    def members(self) -> Mapping[int, int]:
        """Number -> rank in the latest epoch."""
        return self._table.members

    @property
    def resets(self) -> int:
        """How often the members have changed."""
        return self._table.resets

    def __enter__(self) -> EngineJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the coordinator; the ranks that are still there lose it."""
        self._coordinator.close()

    # What the engine starts.

    def tickets(self, nodes: Sequence[str]) -> list[dict[str, str]]:
        """The variables of the first `size` workers; worker n is on `nodes[n]`.

        They hold the job's secret, so they are for an engine's own, trusted channels.
        Workers on nodes of one name share memory, so no two machines may have one name.

        Raises:
            ValueError: there are not `size` nodes.
        """
        if len(nodes) != self.size:
            raise ValueError(f"{self.size} workers, but {len(nodes)} nodes: {nodes!r}")
        self._spread = len(set(nodes)) > 1
        if self.elastic:
            found = [self.ticket(n, node) for n, node in enumerate(nodes)]
            return [{**t, **p} for t, p in zip(found, places(nodes), strict=True)]
        self._begin(nodes)
        return [{**self.common_ticket(), **place} for place in places(nodes)]

    def again(self) -> None:
        """The workers of a static job run another function, with the same tickets."""
        self.poll()
        self._stop = ""
        self._begin([worker.slot.host for worker in self.workers.values()])

    def _begin(self, nodes: Sequence[str]) -> None:
        self._table, self._results = self._new_table(), {}
        for number, node in enumerate(nodes):
            self._table.adopt(number, WorkerSlot(node, number, number, number))

    def ticket(self, worker: int, node: str = "") -> dict[str, str]:
        """The variables of one worker of an elastic job; `tickets` says more.

        Its rank in there is what it is expected to be when it joins.

        Raises:
            ValueError: the number was used before, or the job is not elastic.
        """
        if not self.elastic:
            raise ValueError("a job of fixed size gives all its tickets at once")
        if worker in self.workers:
            raise ValueError(f"worker {worker} is not new")
        self._table.adopt(worker, WorkerSlot(node, worker, worker, worker))
        self._coordinator.expected(worker)
        place = places([self.workers[n].slot.host for n in self.running()])[-1]
        return {**place, **self.common_ticket(), "RINGJAX_WORKER": str(worker)}

    def common_ticket(self) -> dict[str, str]:
        """What the tickets of all workers have in common.

        For an engine that cannot ask for one before it starts a worker. To it belongs,
        in an elastic job, RINGJAX_WORKER, a number that no other ever had; and in
        others what `places` returns.
        """
        found = {
            **self._env,
            "RINGJAX_RENDEZVOUS": ",".join(self._coordinator.addresses),
            "RINGJAX_SECRET": self._secret.hex(),
            "RINGJAX_JOB": self.job,
        }
        if self.elastic:
            spread = str(int(self._spread))
            found |= {"RINGJAX_ELASTIC": "1", "RINGJAX_SPREAD": spread}
        return found

    # What the engine reports.

    def runs_on(self, worker: int, node: str) -> None:
        """Where a worker is that got no ticket of its own."""
        self._table.get_or_add(worker).slot.host = node

    def finished(self, worker: int, result: Any = None) -> None:
        """The worker's function has returned `result`."""
        self._hear()  # one that was sent away returns, and that is not the job's end
        if self._ended(worker, 0, "it has ended without an error"):
            self._results[worker] = result

    def lost(self, worker: int, why: str, *, certain: bool = True) -> None:
        """The worker's process, or its node, is gone, or its function has raised.

        Args:
            why: what the engine knows, a traceback for example.
            certain: the process has ended, it is not only out of reach. Only then a
                newcomer may begin afresh when all others are gone.
        """
        self._ended(worker, 255, why, certain)

    def _ended(self, number: int, code: int, why: str, certain: bool = True) -> bool:
        """Whether that is news; it is not of a worker that was sent away before."""
        worker = self._table.get_or_add(number)
        if worker.settled:
            return False
        worker.settled, worker.end_confirmed = True, certain
        self._table.record_end(worker, code, why if code else "", time.monotonic())
        if self.elastic:
            heirs = not code or worker.may_be_succeeded
            self._coordinator.process_ended(number, first_line(last_line(why)), heirs)
        return True

    def poll(self) -> list[int]:
        """Takes note of what the workers have said; call it some times a second.

        Returns:
            Workers that run and that the others go on without: their processes should
            be ended.
        """
        self._hear()
        fenced, self._fenced = self._fenced, []
        return [number for number in fenced if not self.workers[number].settled]

    def _hear(self) -> None:
        """Takes what the coordinator has decided."""
        for event in take_events(self._coordinator):
            self._decided(*event)

    def _decided(self, event: str, *details: Any) -> None:
        match event, *details:
            case ["members", _, _, members]:
                again = bool(self.members)
                new = self._table.start_epoch(members, time.monotonic())
                for worker in new if again else ():
                    self._note(self._table.describe_join(worker, place=True))
            case ["waiting", text]:
                self._note(text)
            case ["stop", text]:
                start = "" if self.elastic else "the job did not start: "
                self._stop = start + text
            case [_, int(number), *text]:
                why = "".join(text)
                worker = self._table.record_event(event, number, why, time.monotonic())
                worker.settled |= worker.dismissed
                if event == "fenced":
                    worker.fence_reason = worker.fence_reason or why
                    self._fenced.append(number)

    # How it ends.

    def running(self) -> list[int]:
        """The workers that were started and have not ended."""
        return [n for n, worker in self.workers.items() if not worker.settled]

    @property
    def closing(self) -> bool:
        """Whether a worker has finished, so that no other is to be started."""
        ended = [w for w in self.workers.values() if w.exit_code == 0]
        return not all(worker.dismissed for worker in ended)

    @property
    def over(self) -> bool:
        """Whether nothing more can come of it: all have ended, or one too many."""
        if self._stop or (self._table.failed() and not self.elastic):
            return True
        begun = self.members or len(self.workers) >= self.size
        return bool(begun) and self._table.is_over()

    @property
    def stopped(self) -> str:
        """Why the job can not go on, if that is so."""
        return self._stop

    def stop(self, why: str) -> None:
        """Ends the job without success: `results` raises, and gives this reason."""
        self._stop = self._stop or why

    def results(self) -> list[Any]:
        """What the functions returned, in the order of the ranks at the end.

        Raises:
            LaunchError: the job has failed. It names rank, node and error of the first
                to blame.
        """
        self.poll()
        known = self.members or not self.elastic
        if known and not self._stop and self._table.has_succeeded():
            return [self._results[w.number] for w in self._table.succeeded()]
        raise self.failure()

    def failure(self) -> LaunchError:
        """The error that says who failed first, and why."""
        table = self._table
        # Or who has said so itself, if the engine has put others into their places.
        worker = table.first_failure() or table.earliest(table.with_report())
        if worker is None:
            ended = "the workers ended without having finished"
            return LaunchError(self._stop or ended)
        who = table.describe(worker, place=True)
        if not self.elastic and worker.slot.host:
            who = f"rank {worker.number} (on {worker.slot.host})"
        text = f"{who}: {first_line(worker.report or last_line(table.failure_text(worker)))}"
        if self._stop and worker.rank is None:
            text = f"{self._stop}; {text}"
        if "\n" in worker.exit_text.strip():
            text += f"\n\n{worker.exit_text.strip()}"
        return LaunchError(text, -1 if worker.rank is None else worker.rank)


def places(nodes: Sequence[str]) -> list[dict[str, str]]:
    """The variables that tell rank n, which is on `nodes[n]`, its place.

    Example:
        >>> [place["RINGJAX_LOCAL_RANK"] for place in places(["a", "b", "a"])]
        ['0', '0', '1']
    """
    hosts = [HostSlots(node, nodes.count(node)) for node in dict.fromkeys(nodes)]
    slots = assign_slots(hosts, len(nodes))
    free = {node: iter([s for s in slots if s.host == node]) for node in nodes}
    return [
        dataclasses.replace(next(free[node]), rank=rank).environment()
        for rank, node in enumerate(nodes)
    ]


def _most(size: int, least: int | None, most: int | None) -> int:
    if least is None and most is not None:
        raise ValueError(f"max_size={most}: only elastic jobs have one; give min_size")
    found = size if most is None else most
    if size < 1 or (least is not None and not 1 <= least <= size <= found):
        limits = "" if least is None else f" between min_size={least} and {found}"
        raise ValueError(f"size={size}: expected a number from 1 on{limits}")
    return found
