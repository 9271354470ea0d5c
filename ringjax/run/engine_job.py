"""A job whose processes an engine places and restarts: Ray, Spark, and your own.

Where ringrun starts processes itself, this only brings them together: a coordinator in
the driver; for each worker a ticket, the
variables that let it join; and what became of them, as results or as one error. Starts
and ends no process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringjax.config import Config
from ringjax.errors import LaunchError
from ringjax.membership.coordinator import Coordinator
from ringjax.run import environ
from ringjax.run.hosts.slots import ANY, Host, assign, own_addresses
from ringjax.run.verdict import blames_others, one_line

RUNS, FINISHED, FAILED, LEFT = "runs", "finished", "failed", "left"


@dataclass(slots=True)
class Worker:
    """What is known of one worker.

    Attributes:
        node: where it runs, in the engine's words.
        rank: in the latest epoch that it belonged to, None: in none.
        joined, ended: when, on `time.monotonic`'s clock.
        state: it runs, has finished, has failed, or has left as it was asked to.
        error: why it failed.
        report: what it told the others before it went down.
        fenced: the others go on without it.
        ready: it could be a member.
        result: what its function returned.
    """

    node: str = ""
    rank: int | None = None
    joined: float = 0.0
    ended: float = 0.0
    state: str = RUNS
    error: str = ""
    report: str = ""
    fenced: str = ""
    ready: bool = False
    result: Any = None

    @property
    def words(self) -> str:
        """Why it failed, as well as it is known."""
        return self.report or self.error or self.fenced or "failed"


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

    Attributes:
        workers: all that ever were, by number.
        members: number -> rank in the latest epoch of an elastic job.

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
            "hosts": own_addresses([ANY], names) if hosts is None else hosts,
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
        self.workers: dict[int, Worker] = {}
        self.members: dict[int, int] = {}
        self.resets = 0
        self._spread = False
        self._stop = ""
        self._fenced: list[int] = []  # whose processes are to be ended

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
        for number, node in enumerate(nodes):
            self.workers[number] = Worker(node, number)
        return [{**self.common_ticket(), **place} for place in places(nodes)]

    def again(self) -> None:
        """The workers of a static job run another function, with the same tickets."""
        self.poll()
        self._stop = ""
        for number, worker in self.workers.items():
            self.workers[number] = Worker(worker.node, worker.rank)

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
        self.workers[worker] = Worker(node)
        self._coordinator.expected(worker)
        place = places([self.workers[n].node for n in self.running()])[-1]
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
        self._of(worker).node = node

    def finished(self, worker: int, result: Any = None) -> None:
        """The worker's function has returned `result`."""
        self._hear()  # one that was sent away returns, and that is not the job's end
        known = self._of(worker)
        if known.state == RUNS:
            known.state, known.result = FINISHED, result
            known.ended = time.monotonic()
            if self.elastic:
                self._coordinator.lost(worker, "it has ended without an error")

    def lost(self, worker: int, why: str, *, certain: bool = True) -> None:
        """The worker's process, or its node, is gone, or its function has raised.

        Args:
            why: what the engine knows, a traceback for example.
            certain: the process has ended, it is not only out of reach. Only then a
                newcomer may begin afresh when all others are gone.
        """
        known = self._of(worker)
        if known.state != RUNS:
            return
        known.state, known.error = FAILED, why
        known.ended = time.monotonic()
        if self.elastic:
            heirs = certain and not known.report
            self._coordinator.lost(worker, one_line(last_line(why)), heirs)

    def poll(self) -> list[int]:
        """Takes note of what the workers have said; call it some times a second.

        Returns:
            Workers that run and that the others go on without: their processes should
            be ended.
        """
        self._hear()
        fenced, self._fenced = self._fenced, []
        return [number for number in fenced if self.workers[number].state == RUNS]

    def _hear(self) -> None:
        """Takes what the coordinator has decided."""
        self._coordinator.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._decided(*self._coordinator.events.get_nowait())

    def _of(self, worker: int) -> Worker:
        rank = None if self.elastic else worker
        return self.workers.setdefault(worker, Worker(rank=rank))

    def _decided(self, event: str, *details: Any) -> None:
        match event, *details:
            case ["members", _, _, members]:
                self._entered(members)
            case ["ready", number]:
                self._of(number).ready = True
            case ["fenced", number, why]:
                self._of(number).fenced = self._of(number).fenced or why
                self._fenced.append(number)
            case ["failure", number, text]:
                self._of(number).report = self._of(number).report or text
            case ["dismissed", number, _]:
                self._of(number).state = LEFT
            case ["waiting", text]:
                self._note(text)
            case ["stop", text]:
                start = "" if self.elastic else "the job did not start: "
                self._stop = start + text

    def _entered(self, members: Mapping[int, int]) -> None:
        if self.members and self.members.keys() != members.keys():
            self.resets += 1
        for number in members.keys() - self.members.keys():
            self._of(number).joined = time.monotonic()
        if self.members:
            count = "1 rank" if len(members) == 1 else f"{len(members)} ranks"
            for number, rank in members.items():
                if number not in self.members:
                    where = f" on {self._of(number).node}" * bool(self._of(number).node)
                    text = f"worker {number}{where} joined as rank {rank}; {count}"
                    self._note(text)
        self.members = dict(members)
        for number, rank in members.items():
            self._of(number).rank = rank

    # How it ends.

    def running(self) -> list[int]:
        """The workers that were started and have not ended."""
        return [n for n, worker in self.workers.items() if worker.state == RUNS]

    @property
    def closing(self) -> bool:
        """Whether a worker has finished, so that no other is to be started."""
        return any(worker.state == FINISHED for worker in self.workers.values())

    @property
    def over(self) -> bool:
        """Whether nothing more can come of it: all have ended, or one too many."""
        states = [worker.state for worker in self.workers.values()]
        if self._stop:
            return True
        if not self.elastic:
            return FAILED in states or states.count(FINISHED) == self.size
        last = [self.workers[n] for n in self.members]
        if last:
            return all(w.state != RUNS for w in last) and not self._heirs(last)
        return len(states) >= self.size and RUNS not in states

    def _heirs(self, last: list[Worker]) -> bool:
        """Whether newcomers may begin afresh: the members were all killed."""
        if any(w.state != FAILED or w.report for w in last):
            return False
        ready = [w for w in self.workers.values() if w.ready and w.state == RUNS]
        return len(ready) >= (self.min_size or 1)

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
        done = [w for w in self.workers.values() if w.state == FINISHED]
        if not self._stop:
            if not self.elastic and len(done) == self.size:
                return [self.workers[rank].result for rank in range(self.size)]
            last = [self.workers[n] for n in self.members]
            stayed = [worker for worker in last if worker.state != LEFT]
            if stayed and all(worker.state == FINISHED for worker in stayed):
                return [w.result for w in sorted(stayed, key=lambda w: w.rank or 0)]
        raise self.failure()

    def failure(self) -> LaunchError:
        """The error that says who failed first, and why."""
        failed = [n for n, w in self.workers.items() if w.state == FAILED]
        # Or who has said so itself, if the engine has put others into their places.
        failed = failed or [n for n, w in self.workers.items() if w.report]
        last = [n for n in failed if n in self.members]
        order = [
            (blames_others(self.workers[n].words), self.workers[n].ended, n)
            for n in last or failed
        ]
        if not order:
            return LaunchError(
                self._stop or "the workers ended without having finished"
            )
        number = min(order)[2]
        worker = self.workers[number]
        about = [f"worker {number}"] if self.elastic else []
        about += [f"on {worker.node}"] if worker.node else []
        who = f"worker {number}" if worker.rank is None else f"rank {worker.rank}"
        who += f" ({', '.join(about)})" if about else ""
        text = f"{who}: {one_line(worker.report or last_line(worker.words))}"
        if self._stop and worker.rank is None:
            text = f"{self._stop}; {text}"
        if "\n" in worker.error.strip():
            text += f"\n\n{worker.error.strip()}"
        return LaunchError(text, -1 if worker.rank is None else worker.rank)


def places(nodes: Sequence[str]) -> list[dict[str, str]]:
    """The variables that tell rank n, which is on `nodes[n]`, its place.

    Example:
        >>> [place["RINGJAX_LOCAL_RANK"] for place in places(["a", "b", "a"])]
        ['0', '0', '1']
    """
    hosts = [Host(node, nodes.count(node)) for node in dict.fromkeys(nodes)]
    slots = assign(hosts, len(nodes))
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


def last_line(text: str) -> str:
    """Of a traceback, what it ends with."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else ""
