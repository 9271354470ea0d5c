"""EngineJob: a job whose processes an engine starts, such as Ray, Spark or your own.

An `EngineJob` runs in the driver of the engine. It runs the coordinator, makes a ticket
for each worker (the environment variables with which the worker joins the job), and
collects the results or the first error. Only the engine starts and ends processes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringjax.config import Config
from ringjax.errors import LaunchError
from ringjax.membership.coordinator import Coordinator
from ringjax.run import environ
from ringjax.run.hosts.slots import ANY_HOST, place_ranks, reachable_addresses
from ringjax.run.outcome import first_line, last_line
from ringjax.run.workers import Worker, WorkerSlot, WorkerTable, take_events


class EngineJob:
    """A job that runs on an engine, seen from the driver of the engine.

    A static job has `size` workers, and worker n is rank n. The loss of a worker ends
    the job. A job with `min_size` is elastic: workers may be lost, and new workers may
    join with ids that were never used before.

    Args:
        size: number of workers to start with.
        min_size: the least number of members. An elastic job with fewer members waits
            for new workers.
        max_size: the most members of an elastic job; None means `size`.
        env: variables for all workers, such as settings of ringjax. Workers also get
            the RINGJAX_* and HOROVOD_* variables of this process.
        hosts: the addresses to listen on; by default all addresses of this machine.
        port: the port to listen on. With 0, the system chooses a free port.
        secret, job: secret and id of a job that an earlier driver began. The members of
            that job reconnect if this driver listens at the earlier driver's address.
        note: called with each line for the user.

    Raises:
        StartupError: listening is not possible.
        ValueError: sizes or settings contradict each other.

    Example:
        >>> with EngineJob(2) as job:
        ...     tickets = job.tickets(["node-a", "node-b"])
        ...     for n in (0, 1):  # here the engine runs worker n with tickets[n]
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
        names = config.network_interfaces
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
            hosts=reachable_addresses([ANY_HOST], names) if hosts is None else hosts,
            port=port,
            start_timeout=config.start_timeout,
            tls=config.tls,
        )
        self._coordinator.start()
        self._table = self._new_table()
        self._results: dict[int, Any] = {}
        self._spread = False
        self._stop = ""
        # The ids of workers whose processes the engine must end.
        self._fenced: list[int] = []

    def _new_table(self) -> WorkerTable:
        def last_words(number: int) -> str:
            return self.workers[number].fence_reason or "failed"

        least = self.min_size or self.size
        return WorkerTable(least, last_words, elastic=self.elastic)

    @property
    def workers(self) -> Mapping[int, Worker]:
        """All workers by id, including workers that have ended."""
        return self._table.workers

    @property
    def members(self) -> Mapping[int, int]:
        """The ranks of the members in the latest epoch, by worker id."""
        return self._table.members

    @property
    def resets(self) -> int:
        """How often the members of the job have changed."""
        return self._table.resets

    def __enter__(self) -> EngineJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the coordinator. Ranks that still run lose their connection to it."""
        self._coordinator.close()

    # -- tickets for the workers that the engine starts --------------------------------

    def tickets(self, nodes: Sequence[str]) -> list[dict[str, str]]:
        """Returns a ticket (environment variables) for each of `size` workers.

        Tickets contain the job's secret, so send them only over trusted channels of the
        engine. Workers on nodes with the same name share memory, so two machines must
        have different names.

        Args:
            nodes: the name of each worker's node; worker n runs on `nodes[n]`.

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
        """Prepares a static job to run another function. The old tickets stay valid."""
        self.poll()
        self._stop = ""
        self._begin([worker.slot.host for worker in self.workers.values()])

    def _begin(self, nodes: Sequence[str]) -> None:
        self._table, self._results = self._new_table(), {}
        for number, node in enumerate(nodes):
            self._table.adopt(number, WorkerSlot(node, number, number, number))

    def ticket(self, worker: int, node: str = "") -> dict[str, str]:
        """Returns the ticket of one worker of an elastic job; see `tickets`.

        The ticket contains the rank that the worker will probably get.

        Args:
            worker: the id of the worker.
            node: the node on which the worker runs.

        Raises:
            ValueError: the id was used before, or the job is not elastic.
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
        """Returns the environment variables that all tickets have in common.

        Use these variables if the engine cannot receive a ticket before it starts a
        worker. Each worker of an elastic job also needs RINGJAX_WORKER, an id that no
        other worker has had. Each worker of a static job also needs its element of the
        result of `places`.
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

    # -- reports from the engine -------------------------------------------------------

    def runs_on(self, worker: int, node: str) -> None:
        """Reports the node of a worker that has no ticket of its own."""
        self._table.get_or_add(worker).slot.host = node

    def finished(self, worker: int, result: Any = None) -> None:
        """Reports that the function of a worker has returned `result`."""
        # Handle the events first, because a dismissed worker also returns from its
        # function, but its return does not end the job.
        self._take_decisions()
        if self._ended(worker, 0, "it has ended without an error"):
            self._results[worker] = result

    def lost(self, worker: int, why: str, *, certain: bool = True) -> None:
        """Reports that a worker's process, node or function has failed.

        Args:
            worker: the id of the worker.
            why: the engine's explanation, such as a traceback.
            certain: True if the process has certainly ended. False if it is only
                unreachable and may still train: then new workers cannot begin the job
                again after all other workers have ended.
        """
        self._ended(worker, 255, why, certain)

    def _ended(self, number: int, code: int, why: str, certain: bool = True) -> bool:
        """Records an end. Returns False if the end was known or expected already."""
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
        """Handles events of the coordinator. Call this method a few times a second.

        Returns:
            The ids of running workers that the coordinator has declared lost. The
            engine should end their processes.
        """
        self._take_decisions()
        fenced, self._fenced = self._fenced, []
        return [number for number in fenced if not self.workers[number].settled]

    def _take_decisions(self) -> None:
        for event in take_events(self._coordinator):
            self._handle_event(*event)

    def _handle_event(self, event: str, *details: Any) -> None:
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

    # -- the end of the job ------------------------------------------------------------

    def running(self) -> list[int]:
        """Returns the ids of workers that were started and have not ended."""
        return [n for n, worker in self.workers.items() if not worker.settled]

    @property
    def closing(self) -> bool:
        """Whether a worker has finished the work, so that no more should start."""
        ended = [w for w in self.workers.values() if w.exit_code == 0]
        return not all(worker.dismissed for worker in ended)

    @property
    def over(self) -> bool:
        """Whether the outcome is decided: all members have ended, or the job failed."""
        if self._stop or (self._table.failed() and not self.elastic):
            return True
        begun = self.members or len(self.workers) >= self.size
        return bool(begun) and self._table.is_over()

    @property
    def stopped(self) -> str:
        """The reason why the job cannot continue, or "" if it can."""
        return self._stop

    def stop(self, why: str) -> None:
        """Makes the job fail: `results` then raises an error with the reason `why`."""
        self._stop = self._stop or why

    def results(self) -> list[Any]:
        """Returns the results of the last members, ordered by rank.

        Raises:
            LaunchError: the job has failed. The error names the rank that failed first,
                with its node and its error.
        """
        self.poll()
        known = self.members or not self.elastic
        if known and not self._stop and self._table.has_succeeded():
            return [self._results[w.number] for w in self._table.succeeded()]
        raise self.failure()

    def failure(self) -> LaunchError:
        """Returns an error that names the rank that failed first, and the reason."""
        table = self._table
        # If no worker has ended with an error, use a worker that has reported an error
        # without ending.
        worker = table.first_failure() or table.earliest(table.with_report())
        if worker is None:
            ended = "the workers ended without having finished"
            return LaunchError(self._stop or ended)
        who = table.describe(worker, place=True)
        if not self.elastic and worker.slot.host:
            who = f"rank {worker.number} (on {worker.slot.host})"
        why = worker.report or last_line(table.failure_text(worker))
        text = f"{who}: {first_line(why)}"
        if self._stop and worker.rank is None:
            text = f"{self._stop}; {text}"
        if "\n" in worker.exit_text.strip():
            text += f"\n\n{worker.exit_text.strip()}"
        return LaunchError(text, -1 if worker.rank is None else worker.rank)


def places(nodes: Sequence[str]) -> list[dict[str, str]]:
    """Returns the variables for the rank and local rank of each worker.

    Args:
        nodes: the name of each rank's node; rank n runs on `nodes[n]`.

    Example:
        >>> [place["RINGJAX_LOCAL_RANK"] for place in places(["a", "b", "a"])]
        ['0', '0', '1']
    """
    return [slot.environment() for slot in place_ranks(nodes)]


def _most(size: int, least: int | None, most: int | None) -> int:
    if least is None and most is not None:
        raise ValueError(f"max_size={most}: only elastic jobs have one; give min_size")
    found = size if most is None else most
    if size < 1 or (least is not None and not 1 <= least <= size <= found):
        limits = "" if least is None else f" between min_size={least} and {found}"
        raise ValueError(f"size={size}: expected a number from 1 on{limits}")
    return found
