"""Collects workers until a job can begin, or continue under a restarted coordinator.

The coordinator keeps nothing on disk. After the coordinator was restarted, each member
sends the newest epoch that it has received, and the job continues with the newest of
these epochs. This module decides when enough workers are connected to begin or to
continue the job. Then membership.py begins the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ringjax.control.member import ranks_text
from ringjax.control.number_lists import expand
from ringjax.membership import commit_decision
from ringjax.membership.commit_decision import CommitReport


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """The limits and timeouts of a job's membership.

    Attributes:
        np: the number of workers that start the job.
        min_np: the least number of members. A job with fewer waits for newcomers.
        max_np: the largest number of members.
        start_timeout: seconds to wait for the workers at the start.
        elastic_timeout: seconds to wait for newcomers if there are too few members.
        failure_timeout: seconds for a member to report after an epoch was revoked.
        report_timeout: seconds for a member to report after another member could not
            reach it. A live member needs milliseconds.
        arbitration_delay: seconds to wait before the coordinator excludes one of the
            live members that cannot reach each other. The two ends of a broken link
            notice the break up to a heartbeat apart.
        rejoin_timeout: seconds for the members to connect to a restarted coordinator.
        exit_grace: seconds to wait until the connection of an ended process closes.
        departure_interval: seconds between two messages about members that have left.
        group: the number of workers that are lost and join together: worker w belongs
            to group w // group.
        on_loss: with "repair", the job continues in a new epoch. With "stop", the other
            ranks receive the lost ranks, and the launcher ends the job. Then worker n
            is rank n, and ranks that have left may form another epoch.
    """

    np: int
    min_np: int
    max_np: int
    start_timeout: float = 120.0
    elastic_timeout: float = 600.0
    failure_timeout: float = 5.0
    report_timeout: float = 0.5
    arbitration_delay: float = 1.0
    rejoin_timeout: float = 2.0
    exit_grace: float = 0.25
    departure_interval: float = 0.05
    group: int = 1
    on_loss: Literal["repair", "stop"] = "repair"

    @property
    def stops_on_loss(self) -> bool:
        """Whether the first loss ends the job."""
        return self.on_loss == "stop"

    def group_of(self, worker: int) -> range:
        """Returns all workers of the group that `worker` is in, by ascending id."""
        first = worker - worker % self.group
        return range(first, first + self.group)

    def complete_groups(self, workers: Iterable[int]) -> list[int]:
        """Returns the workers whose groups are complete, by ascending id.

        Example:
            >>> config = MembershipConfig(np=4, min_np=2, max_np=4, group=2)
            >>> config.complete_groups([5, 0, 3, 2])
            [2, 3]
        """
        found = set(workers)
        return sorted(w for w in found if found.issuperset(self.group_of(w)))


@dataclass(frozen=True, slots=True)
class RejoinState:
    """The state that a worker reports when it reconnects to a restarted coordinator.

    Attributes:
        term: the term of that coordinator. Each restart of the coordinator increases
            the term.
        decided: the term in which the newest epoch of this worker was formed.
        epoch: the newest epoch of this worker, -1 for a newcomer.
        members: the message that announced this epoch, {} for a newcomer.
        order: the workers of this epoch by rank.
        finished: workers that have finished in this epoch, and their last reports.
    """

    term: int
    decided: int
    epoch: int
    members: Mapping[str, Any]
    order: tuple[int, ...]
    finished: Mapping[int, CommitReport]

    @property
    def version(self) -> tuple[int, int]:
        """A pair that grows with each epoch, even if the coordinator was restarted."""
        return self.decided, self.epoch


def parse_rejoin(message: Mapping[str, Any]) -> RejoinState:
    """Parses the entry `rejoin` of a hello. Raises ValueError if it is malformed."""
    try:
        members = message.get("members") or {}
        order = expand(members["members"]["workers"]) if members else ()
        finished = {
            order[int(rank)]: commit_decision.parse_report({"lines": lines})
            for rank, lines in (message.get("finished") or {}).items()
        }
        term, epoch = int(message.get("term", 0)), int(message["epoch"])
        decided = int(members.get("term", 0))
        state = RejoinState(term, decided, epoch, members, order, finished)
    except (TypeError, ValueError, OverflowError, LookupError, AttributeError) as error:
        raise ValueError(f"sent no memory of an epoch: {error!r}") from None
    if state.epoch >= 0 and not order:
        raise ValueError("sent an epoch without members")
    return state


@dataclass(frozen=True, slots=True)
class StartJob:
    """The decision that the job begins with `workers`."""

    workers: list[int]


@dataclass(frozen=True, slots=True)
class ResumeJob:
    """The decision that the job continues under a restarted coordinator.

    Attributes:
        state: the newest epoch that a worker has sent.
        term: greater than the term of any earlier coordinator.
        informed: members that have received this epoch, in the order of their ranks.
        uninformed: members that have not received this epoch yet.
        superseded: workers of an older epoch that are not members of this epoch.
        finished: members that have finished the program, and their last reports.
    """

    state: RejoinState
    term: int
    informed: list[int]
    uninformed: list[int]
    superseded: list[int]
    finished: dict[int, CommitReport]


@dataclass(frozen=True, slots=True)
class FailJob:
    """The decision that the job fails, because too few workers are connected."""

    text: str


class Assembly:
    """Collects the workers that have connected, and decides when the job begins.

    Attributes:
        deadline: when to call `outcome` again even if no worker connects or leaves.
        resuming: whether the job has begun under an earlier coordinator. The first
            hello from a worker that reconnects sets this attribute, too.

    Example:
        >>> assembly = Assembly(MembershipConfig(np=3, min_np=2, max_np=3))
        >>> for worker in (4, 2):
        ...     assembly.arrive(worker, None, now=0.0)
        >>> assembly.outcome(now=1.0)
        >>> assembly.outcome(now=120.0)
        StartJob(workers=[2, 4])
    """

    def __init__(self, config: MembershipConfig, resuming: bool = False) -> None:
        self._config, self.resuming = config, resuming
        self.deadline: float | None = None
        self._expected: set[int] = set()  # processes that have not sent a hello
        self._new: set[int] = set()
        self._rejoining: dict[int, RejoinState] = {}
        self._excluded: dict[int, str] = {}  # workers that will not connect, and why
        self._rejoin_expired = False  # whether `rejoin_timeout` is over

    def expect(self, worker: int) -> None:
        """Records that the process of a worker was started."""
        self._expected.add(worker)

    def arrive(self, worker: int, state: RejoinState | None, now: float) -> None:
        """Records the hello of a worker."""
        self._expected.discard(worker)
        self._excluded.pop(worker, None)
        if state is None or state.epoch < 0:
            self._new.add(worker)
        else:
            self._rejoining[worker] = state
        if state is not None and not self.resuming:
            self.resuming, self.deadline = True, None
        if self.deadline is None:
            config = self._config
            wait = config.rejoin_timeout if self.resuming else config.start_timeout
            self.deadline = now + wait

    def leave(self, worker: int) -> None:
        """Records that a worker has disconnected."""
        self._expected.discard(worker)
        self._new.discard(worker)
        self._rejoining.pop(worker, None)
        if not self._new and not self.resuming:
            self.deadline = None  # the timeout runs only while a worker waits

    def exclude(self, worker: int, why: str) -> None:
        """Records that a worker will not connect any more, and why."""
        self._excluded[worker] = why
        self.leave(worker)

    def missing(self) -> str:
        """Returns the workers that have not connected, as text."""
        if self._config.stops_on_loss:
            size = self._config.np
            absent = [rank for rank in range(size) if rank not in self._new]
            return f"{ranks_text(absent)} of {size}"
        return workers_text(self._expected) if self._expected else "more ranks"

    def outcome(self, now: float) -> StartJob | ResumeJob | FailJob | None:
        """Decides how the job continues. Returns None while workers are missing."""
        late = self.deadline is not None and now >= self.deadline
        return self._resume(now, late) if self.resuming else self._start(late)

    def _start(self, late: bool) -> StartJob | FailJob | None:
        config = self._config
        if len(self._new) < config.np and not late and not self._excluded:
            return None  # fast, because each of P ranks sends a hello
        present = config.complete_groups(self._new)
        count = len(present)
        if count >= config.np or (late and count >= config.min_np):
            return StartJob(present)
        limit = f"within {config.start_timeout:g} s"
        if config.stops_on_loss:
            if self._new and self._excluded:
                rank, why = min(self._excluded.items())
                wait = "while others wait for it in ringjax.init()"
                return FailJob(f"rank {rank} {why} {wait}")
            return FailJob(f"{self.missing()} did not join {limit}") if late else None
        expected = workers_text(self._expected)
        absent = f" (not yet here: {expected})" if self._expected else ""
        text = f"{count} of at least {config.min_np} ranks came {limit}{absent}"
        return FailJob(text) if late else None

    def _resume(self, now: float, late: bool) -> ResumeJob | FailJob | None:
        states = self._rejoining
        newest = max(states.values(), key=lambda state: state.version, default=None)
        order = newest.order if newest else ()
        present = [worker for worker in order if worker in states]
        finished: dict[int, CommitReport] = {}
        for state in states.values():
            if newest is not None and state.version == newest.version:
                finished |= state.finished
        absent = self._excluded.keys() | finished.keys()
        missing = len(order) - len(present) - len(absent.intersection(order))
        # Wait for a majority: otherwise the missing members might continue together
        # elsewhere (split brain), or connect later with a newer epoch.
        enough = bool(present) and (
            not missing or (self._rejoin_expired and len(present) > missing)
        )
        if late and not enough:
            limit = self._config.elastic_timeout
            if self._rejoin_expired:
                return FailJob(
                    f"most members did not come back to the coordinator in {limit:g} s"
                )
            self._rejoin_expired, self.deadline = True, now + limit
            enough = len(present) > missing
        if newest is None or not enough:
            return None
        return ResumeJob(
            newest,
            term=1 + max(state.term for state in states.values()),
            informed=[w for w in present if states[w].version == newest.version],
            uninformed=[w for w in present if states[w].version != newest.version],
            superseded=sorted(states.keys() - set(order)),
            finished=finished,
        )


def mismatch(
    hello: Mapping[str, Any], name: str, expected: Mapping[str, Any], others: str
) -> str:
    """Compares the hello of the worker `name` with the hello of `others`.

    Returns the first difference that prevents the workers from working together, or "".
    `expected` is {} if there are no others.

    Example:
        >>> mismatch({"version": "1.0"}, "rank 2", {"version": "1.1"}, "rank 0")
        'rank 2 runs ringjax 1.0, rank 0 1.1'
    """
    if not expected:
        return ""
    if hello.get("version") != expected.get("version"):
        versions = hello.get("version"), expected.get("version")
        return f"{name} runs ringjax {versions[0]}, {others} {versions[1]}"
    own, required = hello.get("settings"), expected.get("settings")
    if own == required:
        return _fabric_mismatch(hello, name, expected, others)
    if not isinstance(own, dict) or not isinstance(required, dict):
        return f"the settings of {name} are {own!r}, not {required!r} as on {others}"
    setting = next(k for k in (*required, *own) if own.get(k) != required.get(k))
    return (
        f"RINGJAX_{setting.upper()} must be alike on all ranks: it is "
        f"{required.get(setting)!r} on {others} and {own.get(setting)!r} on {name}"
    )


def _fabric_mismatch(
    hello: Mapping[str, Any], name: str, expected: Mapping[str, Any], others: str
) -> str:
    """Compares the providers of libfabric (links/fabric.py), as `mismatch` does.

    Two libraries may have different providers of one name, which do not understand each
    other: until 1.17, "tcp" is "tcp;ofi_rxm".
    """
    own, required = hello.get("fabric"), expected.get("fabric")
    if not isinstance(own, dict) or not isinstance(required, dict):
        return ""
    if own.get("speaks") == required.get("speaks"):
        return ""
    here, there = (
        f"{who} on {each.get('hostname')} uses {found.get('speaks')} of "
        f"{found.get('library')}"
        for who, each, found in ((name, hello, own), (others, expected, required))
    )
    return (
        f"{here}; {there}; they do not understand each other: install one version of "
        "libfabric on all hosts (RINGJAX_FABRIC_LIBRARY), or give RINGJAX_FABRIC the "
        "full name of a provider that all have"
    )


def workers_text(workers: Iterable[int]) -> str:
    """Formats workers: "worker 3", or "workers 2, 4"."""
    found = sorted(workers)
    return f"worker{'s' * (len(found) != 1)} {', '.join(map(str, found))}"
