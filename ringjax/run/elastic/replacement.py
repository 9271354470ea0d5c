"""What is done about workers that end, are declared lost, or are asked to leave.

The coordinator hears of an end at once; people and the seats of the job a moment later,
when everything that the process wrote has come, as that says why. Starts nothing.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from ringjax.run.elastic.coordinator_process import CoordinatorProcess
from ringjax.run.elastic.seats import Seating
from ringjax.run.elastic.workers import Roster, Worker
from ringjax.run.hosts.blacklist import Blacklist

_LAST_WORDS = 0.3  # seconds to wait for what a process wrote before it ended
_NEWS = 0.5  # seconds for a worker's own word that it is through to arrive
_FENCED = 5.0  # seconds for a worker that was declared lost to end by itself
_TOLD = 30.0  # seconds for a worker that is asked to leave


class Signaller(Protocol):
    """What sends signals to workers; hosts/fleet.py does."""

    def signal(
        self, number: int, names: Sequence[int] | None = None, *, alone: bool = False
    ) -> None:
        """Signals the groups of these workers, or the workers alone."""


class Keeper:
    """Looks after the workers of one job.

    Args:
        roster, seating: its workers and its seats.
        blacklist: of hosts, if they are held to account.
        signaller: reaches the workers.
        note: shows a line.
        done: these have ended and were taken note of, so their files can be closed.
    """

    def __init__(
        self,
        roster: Roster,
        seating: Seating,
        blacklist: Blacklist | None,
        signaller: Signaller,
        note: Callable[[str], None],
        done: Callable[[int], None],
    ) -> None:
        self._roster = roster
        self._seating = seating
        self._blacklist = blacklist
        self._signaller = signaller
        self._note = note
        self._done = done
        self._gone: list[tuple[float, Worker]] = []  # of whom to tell the coordinator
        self._fenced: list[Worker] = []  # not yet spoken of
        self.coordinator: CoordinatorProcess | None = None
        self.silent = False  # the job is ending, which says enough

    def over(self) -> bool:
        """Whether all that matter have ended."""
        roster = self._roster
        if roster.members:
            return roster.over() and not roster.heirs()
        if self._seating.closed:
            return all(worker.settled for worker in roster.workers.values())
        return self._seating.all_failed()

    def ended(self, worker: Worker, code: int, text: str, now: float) -> None:
        """Its process has ended."""
        worker.exit_code, worker.exit_text, worker.ended = code, text, now
        if text:
            worker.streams.clear()
        if code:
            self._tell(worker)
            return
        # It may have said so itself, and the news of it be on its way.
        self._gone.append((now + _NEWS, worker))
        worker.answered = self.coordinator is None
        if self.coordinator is not None:
            self.coordinator.ended(worker.number)

    def _tell(self, worker: Worker) -> None:
        if self.coordinator is not None:
            why = self._roster.fate(worker).lstrip(": ") if worker.exit_code else ""
            why = why or "ended without an error"
            self.coordinator.lost(worker.number, why, worker.may_have_heirs)

    def fence(self, worker: Worker, why: str, now: float) -> None:
        """It was declared lost."""
        worker.why = why
        if not worker.seat.host:  # nobody will tell of its end
            self.ended(worker, 255, why, now)
        if worker.runs and worker.fenced is None:
            worker.fenced = now
            self._fenced.append(worker)

    def dismiss(self, number: int, now: float) -> None:
        """Its seat is gone: it is asked to leave, with its group."""
        worker = self._roster.workers[number]
        who = self._roster.who(worker, place=True)
        self._note(f"{who} is asked to leave: its slot is gone")
        for mate in self._roster.mates(worker):
            if mate.runs and mate.told is None:
                mate.told = now
                self._signaller.signal(signal.SIGTERM, [mate.number], alone=True)

    def dismiss_all(self, why: str) -> None:
        """The whole job is asked to leave."""
        self._seating.closed = True  # nobody joins any more
        self._note(f"{why}: all ranks leave at their next commit")
        self.signal(signal.SIGTERM, asked=True)

    def signal(self, number: int, *, asked: bool) -> None:
        """Signal all workers that run; `asked`: SIGTERM is a wish that they leave."""
        running = [worker.number for worker in self._roster.running()]
        # What a rank has started may have to help it to its next commit.
        alone = asked and number == signal.SIGTERM
        self._signaller.signal(number, running, alone=alone)

    def tick(self, now: float) -> None:
        """Do what is due."""
        for worker in self._roster.workers.values():
            if worker.settled:
                continue
            if worker.exit_code is not None:
                over = not worker.streams or now - worker.ended > _LAST_WORDS
                if over and not _is_unexplained(worker):
                    self._settle(worker, now)
            elif not worker.killed and now > _latest(worker):
                worker.killed = True
                self._signaller.signal(signal.SIGKILL, [worker.number])
        for worker in list(self._fenced):
            # Of one that has ended meanwhile the better line is said when it settles.
            if worker.runs and now > (worker.fenced or 0.0) + _LAST_WORDS:
                self._fenced.remove(worker)
                self._say(worker, worker.loss)
        while self._gone and self._gone[0][0] <= now:
            self._tell(self._gone.pop(0)[1])

    def _settle(self, worker: Worker, now: float) -> None:
        """Nothing more comes from it: whether its seat is taken again."""
        worker.settled = True
        if not worker.streams:
            self._done(worker.number)
        if worker.dismissed or worker.told is not None:
            self._seating.left(worker.seat, asked=worker.told is not None)
            self._say(worker, None if worker.exit_code else " has left")
        elif worker.exit_code == 0 and worker.fenced is None:
            self._seating.closed = True
        else:
            spoken = worker.fenced is not None and worker not in self._fenced
            self._fenced = [other for other in self._fenced if other is not worker]
            member_for = None if worker.rank is None else worker.ended - worker.joined
            pause = self._seating.failed(
                worker.seat,
                member_for=member_for,
                own_fault=self._roster.own_fault(worker),
                now=now,
            )
            if not spoken and not self.over():  # that would say it, too
                self._say(worker, None if worker.exit_code else worker.loss, pause)
            self._speak_of_host(worker.seat.host, now)

    def _say(self, worker: Worker, what: str | None, pause: float = 0.0) -> None:
        """A line about a worker that is lost or has left; None: what became of it."""
        if self.silent:
            return
        roster = self._roster
        text = roster.who(worker, place=roster.several_hosts())
        text += roster.fate(worker) if what is None else what
        if worker.rank is not None:
            text += roster.left_over()
        elif 0 < pause < math.inf and self._blacklist is None:
            text += f"; the next try is in {pause:g} s"
        self._note(text)

    def _speak_of_host(self, host: str, now: float) -> None:
        seconds = None if self._blacklist is None else self._blacklist.news(host, now)
        if seconds is None or self.silent or self.over():
            return
        how_long = "any more" if seconds == math.inf else f"for {seconds:.0f} s"
        self._note(f"host {host} gets no worker {how_long}: one has failed there")


def _is_unexplained(worker: Worker) -> bool:
    """Whether it has ended without an error, and the reason is still to come.

    A worker that was sent away makes room for another one; any other has come to the
    end of its program, and so has the job.
    """
    known = worker.answered or worker.finished or worker.dismissed
    return worker.exit_code == 0 and not known


def _latest(worker: Worker) -> float:
    """When it should have ended by itself.

    What has lost its group has nothing to say, and its place is wanted.
    """
    grace = 0.0 if worker.ends_with_group else _FENCED
    fenced = math.inf if worker.fenced is None else worker.fenced + grace
    told = math.inf if worker.told is None else worker.told + _TOLD
    return min(fenced, told)
