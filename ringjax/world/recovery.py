"""The thread that keeps an elastic job going: from a loss to the next epoch.

It hears the heartbeat and the coordinator, stops an epoch that is over, reports how far
this rank came, connects the members of the next one and puts it in force. Calls that
are under way wait meanwhile, in the native core. What an epoch is made of is in
epoch_sequence.py, who decides about members in membership.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Mapping

from ringjax import errors, failpoints
from ringjax.control.polling import wait_readable
from ringjax.errors import (
    OutOfDescriptors,
    PeerLost,
    RingjaxError,
    StartupError,
    Unreachable,
)
from ringjax.membership.client import CallProgress, CoordinatorClient
from ringjax.membership.directives import (
    Directive,
    Dismiss,
    EpochDirective,
    Fence,
    ResizePending,
    Revoke,
    Stop,
    UserNotice,
)
from ringjax.world.epoch import Epoch
from ringjax.world.epoch_sequence import EpochSequence

_DOUBT = 0.5  # seconds in which the coordinator may know better who is lost


class Revoked(PeerLost):
    """The epoch that is being formed is over already."""


class Recovery:
    """Forms epochs in a thread of its own.

    Args:
        home: the world.
        client: this rank's line to the coordinator; only this thread polls it.

    Attributes:
        bell: an eventfd for heartbeats to ring.
    """

    def __init__(self, home: EpochSequence, client: CoordinatorClient) -> None:
        self._home, self._client = home, client
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = self._leaving = False
        self._reported = -1  # the newest epoch that was reported
        self._forming = -1  # the epoch whose links are being made
        self._heard: list[EpochDirective] = []  # since the epoch that is in force
        self._next: EpochDirective | None = None  # the newest of them, unless revoked
        self._times = _Times()
        self._thread = threading.Thread(
            target=self._run, name="ringjax-recovery", daemon=True
        )

    def start(self, first: Directive | None) -> None:
        """Begins, with what this rank was told first."""
        if first is not None:
            self._hear(first)
        self._thread.start()

    def leave(self) -> None:
        """Asks to leave at the next pause. For signal handlers: takes no lock."""
        self._leaving = True
        os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Ends the thread, whatever it does. May be called twice."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wakeup, 1)
        if self._thread.is_alive():
            self._thread.join(10.0)
        self.release()

    def release(self) -> None:
        """Closes its descriptors, also in a forked child, which has no such thread."""
        for fd in (self.bell, self._wakeup):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.bell = self._wakeup = -1

    def _run(self) -> None:
        try:
            poll = select.poll()
            for fd in (self._client.fileno(), self.bell, self._wakeup):
                poll.register(fd, select.POLLIN)
            while not self._closing:
                if self._next is None:
                    poll.poll()
                self._serve()
        except Exception as error:  # nobody else could say what is wrong
            text = f"{type(error).__name__}: {error}"
            self._home.broken(f"the recovery of this rank failed: {text}")

    def _serve(self) -> None:
        for fd in (self.bell, self._wakeup):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(fd)
        if self._leaving:
            self._leaving = False
            self._client.request_leave()
        self._listen()
        self._look_for_losses()
        if self._next is not None and not self._closing:
            self._form(self._next)

    # -- hearing -----------------------------------------------------------------------

    def _listen(self) -> None:
        for message in self._client.poll():
            self._hear(message)

    def _hear(self, message: Directive) -> None:
        home = self._home
        match message:
            case EpochDirective():
                self._times.mark("members")
                home.announce(0)
                self._heard.append(message)
                self._next = message
            case Revoke():
                self._on_revoke(message)
            case ResizePending(number=number):
                home.announce(number)
            case Dismiss(text=text):
                home.dismiss(text)
            case Fence(text=text):
                home.end(
                    errors.Fenced, f"this rank {errors.FENCED}: the others say: {text}"
                )
            case Stop(text=text):
                home.end(RingjaxError, f"the job was stopped: {text}")
            case UserNotice(text=text):
                home.log("warning", text)

    def _on_revoke(self, revoke: Revoke) -> None:
        if self._next is not None and self._next.epoch <= revoke.epoch:
            self._next = None
        if revoke.epoch <= self._reported:
            return
        rank, text = -1, "another rank asked to start again"
        present = self._home.present
        if present is not None and present.number == revoke.epoch:
            # A wish to start again may have overtaken the accusation that caused it.
            self._accuse_lost(present, revoke.lost)
        if revoke.lost:
            rank, why = next(iter(revoke.lost.items()))
            text = f"rank {rank} {why}"
        self._stop(revoke.epoch, text, rank)

    def _look_for_losses(self) -> None:
        """Tells the coordinator whom the heartbeat has lost, and stops the epoch."""
        epoch = self._home.present
        if epoch is None or epoch.number <= self._reported:
            return
        if self._heard and self._heard[-1].epoch > epoch.number:
            return  # the others are on their way to the next one as well
        lost = epoch.lost()
        if not lost:
            return
        self._accuse_lost(epoch)
        self._stop(epoch.number, f"rank {lost[0][0]} {lost[0][1]}", lost[0][0])

    def _accuse_lost(self, epoch: Epoch, known: Collection[int] = ()) -> None:
        """Names the ranks that the heartbeat has lost, but for those that are known."""
        for rank, why in epoch.lost():
            # If it is this rank, the others accuse it.
            if rank != epoch.standing.rank and rank not in known:
                self._client.suspect(epoch.number, rank, why)

    def _stop(self, number: int, text: str, rank: int) -> None:
        """Ends what runs in an epoch, and reports how far that came."""
        self._times.start()
        lines: Mapping[int, CallProgress] = {}
        epoch = self._home.present
        if epoch is not None and epoch.number == number:
            lines = self._home.halt(text, rank)
        self._times.mark("quiesce")
        failpoints.passing("recovery.halted")
        sets, next_set, restart = self._home.reported()
        self._client.report(number, lines, sets, next_set, restart=restart, text=text)
        self._reported = number
        failpoints.passing("recovery.reported")
        self._times.mark("report")

    # -- forming -----------------------------------------------------------------------

    def _form(self, members: EpochDirective) -> None:
        self._forming = members.epoch
        try:
            epoch = self._home.link(tuple(self._heard), self)
            self._times.mark("links")
            failpoints.passing("recovery.linked")
            self._home.install(epoch, tuple(self._heard))
            self._heard.clear()
            self._next = None
            self._times.mark("install")
            failpoints.passing("recovery.installed")
            self._home.log("debug", f"epoch {members.epoch} {self._times.end()}")
            self._home.complete(members)
            failpoints.passing("recovery.completed")
        except Revoked:
            pass
        except OutOfDescriptors:
            raise  # it would be the same in the next epoch: the others are to go on
        except (PeerLost, StartupError) as error:
            # A link that breaks says less than the coordinator, who is about to.
            self._accuse(members, error)
        finally:
            self._forming = -1
        os.eventfd_write(self.bell, 1)  # what was lost while it formed

    def departed_ranks(self) -> dict[int, str]:
        """For the links of an epoch: raises if it is over already."""
        self._listen()
        self._look_for_losses()
        if self._closing:
            raise Revoked("ringjax is shut down")
        newest = self._heard[-1].epoch if self._heard else -1
        if self._reported >= self._forming or newest > self._forming:
            raise Revoked(f"epoch {self._forming} is over")
        return {}

    def _accuse(self, members: EpochDirective, error: PeerLost | StartupError) -> None:
        """A member cannot be reached: without it, then, unless the others see it."""
        ranks = error.ranks if isinstance(error, Unreachable) else []
        ranks = [error.rank] if isinstance(error, PeerLost) else ranks
        with contextlib.suppress(Revoked):
            deadline = time.monotonic() + _DOUBT
            while time.monotonic() < deadline:
                self.departed_ranks()
                left = max(0.0, deadline - time.monotonic())
                wait_readable(self._client, left)
            for rank in ranks:
                if rank >= 0:
                    self._client.suspect(members.epoch, rank, str(error))
            self._next = None
            self._stop(members.epoch, str(error), -1)


class _Times:
    """How long the parts of a recovery took, for the log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self._parts: dict[str, float] = {}
        self._running = False

    def start(self) -> None:
        """A loss begins one."""
        if not self._running:
            self._began = self._last = self._clock()
            self._parts, self._running = {}, True

    def mark(self, part: str) -> None:
        """Everything since the last mark belongs to this part."""
        self.start()
        now = self._clock()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def end(self) -> str:
        """The whole story."""
        self._running = False
        parts = ", ".join(f"{k} {1000 * v:.0f}" for k, v in self._parts.items())
        return f"in {1000 * (self._last - self._began):.0f} ms: {parts}"
