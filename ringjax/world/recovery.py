"""Recovery: the thread that moves this rank of an elastic job from epoch to epoch.

The thread waits for losses, which the heartbeat detects, and for directives of the
coordinator. It stops an epoch that is over, reports the progress of this rank to the
coordinator, connects the members of the next epoch and puts that epoch in force.
Meanwhile the native core parks unfinished calls of the program. epoch_sequence.py
implements these steps, and ringjax/membership/ decides which ranks are members.
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
from ringjax.world.time_spent import spent

_SUSPECT_DELAY = 0.5  # seconds to wait for a revocation before this rank suspects ranks


class EpochRevoked(PeerLost):
    """The epoch that this rank is connecting is over already."""


class Recovery:
    """Runs the recovery in its own thread, the only thread that polls `client`."""

    def __init__(self, world: EpochSequence, client: CoordinatorClient) -> None:
        self._world, self._client = world, client
        # `notify_fd` is the eventfd to which heartbeats write when a peer is lost.
        # Other threads write to `_wakeup_fd` in `leave` and `close`.
        self.notify_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = self._leaving = False
        self._reported = -1  # the newest epoch that was reported
        self._connecting = -1  # the epoch that is being connected
        # The epoch directives that the coordinator has sent since the current epoch
        # began.
        self._directives: list[EpochDirective] = []
        # The directive to connect next. None if there is none, or if it was revoked.
        self._next: EpochDirective | None = None
        self._timer = _PhaseTimer()
        self._thread = threading.Thread(
            target=self._run, name="ringjax-recovery", daemon=True
        )

    def start(self, first: Directive | None) -> None:
        """Starts the thread with the first directive, or None if none has arrived."""
        if first is not None:
            self._handle(first)
        self._thread.start()

    def leave(self) -> None:
        """Requests to leave at the next pause. Uses no lock, for signal handlers."""
        self._leaving = True
        os.eventfd_write(self._wakeup_fd, 1)

    def close(self) -> None:
        """Ends the thread and waits for its end. Further calls do nothing."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wakeup_fd, 1)
        if self._thread.is_alive():
            self._thread.join(10.0)
        self.close_in_child()

    def close_in_child(self) -> None:
        """Closes a forked child's copies of the eventfds. The child has no thread."""
        for fd in (self.notify_fd, self._wakeup_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.notify_fd = self._wakeup_fd = -1

    def _run(self) -> None:
        try:
            poll = select.poll()
            for fd in (self._client.fileno(), self.notify_fd, self._wakeup_fd):
                poll.register(fd, select.POLLIN)
            while not self._closing:
                if self._next is None:  # else connect that epoch without waiting
                    poll.poll()
                self._serve()
        except Exception as error:  # no other thread could report the error
            text = f"{type(error).__name__}: {error}"
            self._world.on_thread_failure(f"the recovery of this rank failed: {text}")

    def _serve(self) -> None:
        for fd in (self.notify_fd, self._wakeup_fd):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(fd)
        if self._leaving:
            self._leaving = False
            self._client.request_leave()
        self._receive_directives()
        self._check_heartbeat()
        if self._next is not None and not self._closing:
            self._begin_epoch(self._next)

    # -- directives and losses ---------------------------------------------------------

    def _receive_directives(self) -> None:
        for directive in self._client.poll():
            self._handle(directive)

    def _handle(self, directive: Directive) -> None:
        world = self._world
        match directive:
            case EpochDirective():
                self._timer.mark("members")
                world.pending_update = 0
                self._directives.append(directive)
                self._next = directive
            case Revoke():
                self._on_revoke(directive)
            case ResizePending(number=number):
                world.pending_update = number
            case Dismiss(text=text):
                world.dismiss(text)
            case Fence(text=text):
                world.end(
                    errors.Fenced, f"this rank {errors.FENCED}: the others say: {text}"
                )
            case Stop(text=text):
                world.end(RingjaxError, f"the job was stopped: {text}")
            case UserNotice(text=text):
                world.log("warning", text)

    def _on_revoke(self, revoke: Revoke) -> None:
        if self._next is not None and self._next.epoch <= revoke.epoch:
            self._next = None
        if revoke.epoch <= self._reported:
            return
        rank, text = -1, "another rank asked to start again"
        epoch = self._world.current_epoch
        if epoch is not None and epoch.number == revoke.epoch:
            # Another rank may have requested a restart because of a loss that it has
            # not reported yet. Report the losses that this rank has detected.
            self._suspect_lost(epoch, revoke.lost)
        if revoke.lost:
            rank, why = next(iter(revoke.lost.items()))
            text = f"rank {rank} {why}"
        self._stop(revoke.epoch, text, rank)

    def _check_heartbeat(self) -> None:
        """Reports ranks that the heartbeat has lost, and stops the current epoch."""
        epoch = self._world.current_epoch
        if epoch is None or epoch.number <= self._reported:
            return
        if self._directives and self._directives[-1].epoch > epoch.number:
            return  # peers close their links when they begin the next epoch
        lost = epoch.lost()
        if not lost:
            return
        self._suspect_lost(epoch)
        self._stop(epoch.number, f"rank {lost[0][0]} {lost[0][1]}", lost[0][0])

    def _suspect_lost(self, epoch: Epoch, known: Collection[int] = ()) -> None:
        """Reports the ranks that the heartbeat has lost, except those in `known`."""
        for rank, why in epoch.lost():
            # The heartbeat may list this rank itself, which the other ranks report.
            if rank != epoch.rank_info.rank and rank not in known:
                self._client.suspect(epoch.number, rank, why)

    def _stop(self, number: int, text: str, rank: int) -> None:
        """Stops all calls of an epoch, and reports each communicator's progress."""
        self._timer.start()
        spent.begin_loss()
        progress: Mapping[int, CallProgress] = {}
        epoch = self._world.current_epoch
        if epoch is not None and epoch.number == number:
            progress = self._world.halt(text, rank)
        self._timer.mark("quiesce")
        failpoints.passing("recovery.halted")
        sets, next_set, restart = self._world.epoch_report()
        self._client.report(
            number, progress, sets, next_set, restart=restart, text=text
        )
        self._reported = number
        failpoints.passing("recovery.reported")
        self._timer.mark("report")

    # -- the next epoch ----------------------------------------------------------------

    def _begin_epoch(self, members: EpochDirective) -> None:
        self._connecting = members.epoch
        try:
            epoch = self._world.link(tuple(self._directives), self)
            self._timer.mark("links")
            failpoints.passing("recovery.linked")
            self._world.install(epoch, tuple(self._directives))
            self._directives.clear()
            self._next = None
            self._timer.mark("install")
            failpoints.passing("recovery.installed")
            self._world.log("debug", f"epoch {members.epoch} {self._timer.end()}")
            self._world.complete(members)
            spent.end_loss()
            failpoints.passing("recovery.completed")
        except EpochRevoked:
            pass
        except OutOfDescriptors:
            # The next epoch would need as many descriptors, too. End this rank, so that
            # other ranks can continue.
            raise
        except (PeerLost, StartupError) as error:
            self._suspect_unreachable(members, error)
        finally:
            self._connecting = -1
        # Check the heartbeat once more, because it may have lost ranks while this epoch
        # was not the current epoch.
        os.eventfd_write(self.notify_fd, 1)

    def departed_ranks(self) -> dict[int, str]:
        """Raises EpochRevoked if the epoch that is being connected is over.

        This is the method of `LossMonitor` that `LinkFactory.build` polls. The result
        is empty, because the loss of a rank revokes the whole epoch.
        """
        self._check_connecting()
        return {}

    def _check_connecting(self) -> None:
        """Raises EpochRevoked if the epoch that is being connected is over."""
        self._receive_directives()
        self._check_heartbeat()
        if self._closing:
            raise EpochRevoked("ringjax is shut down")
        newest = self._directives[-1].epoch if self._directives else -1
        if self._reported >= self._connecting or newest > self._connecting:
            raise EpochRevoked(f"epoch {self._connecting} is over")

    def _suspect_unreachable(
        self, members: EpochDirective, error: PeerLost | StartupError
    ) -> None:
        """Reports unreachable members, unless the coordinator revokes the epoch first.

        A broken link does not show which of its two ranks is lost. The other ranks may
        report the loss to the coordinator, which then revokes the epoch. That loss is
        shown to the user, so only a failure of another kind needs a warning.
        """
        text = f"epoch {members.epoch} could not be connected: {error}"
        try:
            self._await_revocation()
        except EpochRevoked:
            self._world.log("debug", text)
            return
        self._world.log("warning", text)
        ranks = error.ranks if isinstance(error, Unreachable) else []
        for rank in [error.rank] if isinstance(error, PeerLost) else ranks:
            if rank >= 0:
                self._client.suspect(members.epoch, rank, str(error))
        self._next = None
        self._stop(members.epoch, str(error), -1)

    def _await_revocation(self) -> None:
        """Waits `_SUSPECT_DELAY`. Raises EpochRevoked if the epoch ends meanwhile."""
        deadline = time.monotonic() + _SUSPECT_DELAY
        while time.monotonic() < deadline:
            self._check_connecting()
            left = max(0.0, deadline - time.monotonic())
            wait_readable(self._client, left)


class _PhaseTimer:
    """Measures how long each phase of a recovery takes, for the log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self._phases: dict[str, float] = {}
        self._running = False

    def start(self) -> None:
        """Starts measuring a recovery, unless a measurement is running already."""
        if not self._running:
            self._began = self._last = self._clock()
            self._phases, self._running = {}, True

    def mark(self, phase: str) -> None:
        """Adds the time since the last mark to the phase `phase`."""
        self.start()
        now = self._clock()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
        self._last = now

    def end(self) -> str:
        """Ends the measurement. Returns its total time and the time of each phase."""
        self._running = False
        phases = ", ".join(f"{k} {1000 * v:.0f}" for k, v in self._phases.items())
        return f"in {1000 * (self._last - self._began):.0f} ms: {phases}"
