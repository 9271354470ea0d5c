"""The live state of one `init`: membership, links, heartbeat, communicators.

It is formed from the settings and the environment, adds and removes communicators of
process sets, and ends in good order, with a failure, or by being forgotten in a forked
child. What users call is in runtime/; how a rank finds the others is in
membership/rendezvous_discovery.py, how one epoch follows another in epoch_sequence.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ringjax import _native
from ringjax.config import Config, horovod_names
from ringjax.control import addresses as address
from ringjax.control import launch_environment
from ringjax.control.listener import LinkListener
from ringjax.control.member import Member
from ringjax.errors import (
    Mismatch,
    PeerLost,
    RingjaxError,
    StartupError,
    from_status,
)
from ringjax.membership.client import CallProgress
from ringjax.membership.directives import EpochDirective, Welcome
from ringjax.membership.rendezvous_discovery import join_job
from ringjax.settings import horovod_variables
from ringjax.settings.misspelt import misspelt
from ringjax.world import devices, elastic_devices, forming, lanes, record
from ringjax.world.carried_calls import Calls
from ringjax.world.coordinates import Standing
from ringjax.world.epoch import Epoch
from ringjax.world.epoch_sequence import CLOSED, EpochSequence
from ringjax.world.introduction import check_agreement, hello, listening_hosts
from ringjax.world.lanes import LANE
from ringjax.world.profiling import Recording
from ringjax.world.recovery import Recovery
from ringjax.world.registry import Registry
from ringjax.world.rehearsal import Rehearsal
from ringjax.world.report import Reporter, to_standard_error
from ringjax.world.telling import Teller
from ringjax.world.whereabouts import Whereabouts

_told: set[str] = set()  # each once, however often ringjax is initialised
_left: set[tuple[str, int]] = set()  # jobs and workers that this process was once
_NEWS = 1.0  # seconds until the coordinator has said why an agreement broke off


class World(EpochSequence):
    """All ranks of the job, as this one is connected with them.

    Args:
        registry: the process sets of the program.

    Raises:
        StartupError, PeerLost: the job could not be brought together.

    Attributes:
        recorder: has heard of all calls since `init`.
        recovery: keeps an elastic job going.
        rehearsal: the time in which a newcomer's collectives run alone.
        tuned: what autotune has found out; rank 0 tells of it in reports.
        privates: how many private communicators the ranks of an epoch have had.
        secret: the job's; a job of one has none.
    """

    recorder: _native.Recorder

    def __init__(self, config: Config, registry: Registry) -> None:
        super().__init__(config, registry)
        self.devices = devices.Devices(self, [0])
        self.lanes = lanes.Lanes(self)
        self.calls = Calls(self.lanes)
        self.rehearsal = Rehearsal(self)
        self.recovery: Recovery | None = None
        self.privates: dict[tuple[int, ...], int] = {}  # see elastic_requests
        self.tuned, self.secret = "", b""
        self._whereabouts: Whereabouts | None = None
        self._telling: Reporter | Teller | None = None
        self._recording: Recording | None = None
        self._share: tuple[int, ...] | None = None
        launch = launch_environment.detect_launch(config)
        self._prefix = f"ringjax {launch.rank}/{launch.size}"
        self.standing = Standing.provisional(launch.rank, launch.size, config)
        if launch.rank == 0:
            for note in horovod_variables.notes(horovod_names()):
                self.log("info", note)
            for note in misspelt():
                if note not in _told:
                    self.log("warning", note)
                    _told.add(note)
        try:
            self._begin(launch)
        except BaseException:
            self.close()
            raise

    def _begin(self, launch: launch_environment.LaunchInfo) -> None:
        """Joins the job, and its first epoch unless this rank comes later."""
        config, size = self.config, launch.size
        if self.elastic:
            _check(config)
        else:
            self.group.check(size)
        own = launch.rank if config.worker is None else config.worker
        described = hello(launch.rank, size, config) | self.group.offer(own)
        if size > 1 or self.elastic:
            self._meet(launch, described)
            self._whereabouts = Whereabouts(self.log)
        job = "" if self._meeting is None else self._meeting.job
        self.begin_recording(f"{'worker' if self.elastic else 'rank'} {own}", job)
        self._registry.begin(0)
        if self.elastic and self.client is not None:
            self.recovery = Recovery(self, self.client)
        self._former = forming.Former(
            *(config, self._meeting, self._listener),
            -1 if self.recovery is None else self.recovery.bell,
            *(self._whereabouts, self.log, self.recorder),
        )
        if self.client is None:
            alone = (Member(0, "here", described, 0),)
            first: Any = EpochDirective(0, "start", alone, 0, (-1,), {}, {}, 1, {})
        else:
            first = self.client.first
        if isinstance(first, EpochDirective):
            if not self.elastic:  # groups are a matter of the settings alone
                first = replace(first, group=config.group_size)
            check_agreement(first.members)
            self.group.meet(first.mates, first.group)
        if self.recovery is None:
            self.install(self.link([first], self.client), [first])
            self._open_records()
        elif not isinstance(first, Welcome):
            self.recovery.start(first)
            self.wait_for_admission()
        else:
            self._be_a_newcomer(first)
            self.recovery.start(None)

    def _be_a_newcomer(self, welcome: Welcome) -> None:
        """Rank and size are provisional until this rank is a member."""
        rank, size = welcome.rank, welcome.size
        self.standing = Standing.provisional(rank, size, self.config)
        self._prefix = f"ringjax worker {self.config.worker}"
        self.group.meet(welcome.mates, welcome.group)
        self.group.replicas = [rank] if self.group.mates else []
        self._registry.renew(size, {}, 0, self.group.replicas)
        self.sets = {0: list(range(size))}
        self.devices.counts = [devices.count(self.config)] * size

    def wait_for_admission(self) -> None:
        """Waits until this rank is a member.

        Raises:
            SystemExit: the job ends, in good order, without it.
        """
        self.wait(lambda: self.generation is not None or self.dismissed)
        if self.generation is None:
            raise SystemExit(0)
        self._open_records()

    def _open_records(self) -> None:
        """What the settings ask for, now that the rank is known."""
        self.lanes.open_timeline()
        self.open_profile()
        mine, local = self.devices.counts[self.rank], self.standing.local_size
        if mine and local > 1 and local * (self.config.devices_per_rank or mine) > mine:
            self.log(
                "info",
                f"{local} ranks of this host share {mine} CUDA device(s): let JAX take "
                "a part of the memory only (XLA_PYTHON_CLIENT_MEM_FRACTION)",
            )

    def begin_recording(self, who: str, job: str) -> None:
        """Calls are heard of from now on, and told to who wants to know."""
        config = self.config
        self.recorder = record.recorder(config, who, job)
        if config.monitor:
            own = config.rank if config.worker is None else config.worker
            self._telling = Teller(self, config.monitor, own or 0)
        elif config.report > 0:
            self._telling = Reporter(self, config.report, to_standard_error)
        self._named = (who, job[:8] or "alone")

    def begin_profile(
        self, directory: str, *, steps: int = 0, jax_trace: bool | None = None
    ) -> Recording:
        """Begins this rank's part of a profile; one that runs comes to its end.

        Raises:
            OSError: nothing can be written there.
        """
        self.end_profile()
        who, run = self._named
        self._recording = Recording(
            *(self, Path(directory), run, who), steps=steps, jax_trace=jax_trace
        )
        return self._recording

    def end_profile(self) -> None:
        """Writes what is left of it. May be called twice."""
        if self._recording is not None:
            self._recording.end()

    def open_profile(self) -> None:
        """Begins the one that the settings ask for; the job does not depend on it."""
        if not self.config.profile or self._recording is not None:
            return
        try:
            self.begin_profile(self.config.profile)
        except OSError as error:
            self.log("warning", f"no profile of {self._named[0]}: {error}")

    def end_telling(self) -> None:
        """Last words about the calls of this rank. May be called twice."""
        if self._telling is not None:
            self._telling.close()

    def _meet(
        self, launch: launch_environment.LaunchInfo, described: dict[str, Any]
    ) -> None:
        """Joins the job; `described`: what the others shall know about this rank.

        Raises:
            StartupError: the job did not come together.
        """
        config = self.config

        def open_doors(secret: bytes, job: str) -> dict[str, Any]:
            """For the other ranks, before they can know about them."""
            if self._listener is not None:
                self._listener.close()
            rank, size, one_host = launch.rank, launch.size, launch.single_host
            if config.elastic:  # rank and hosts may be others in the next epoch
                found = address.parse(config.rendezvous)
                one_host = all(address.is_loopback(host) for host, _ in found)
                rank, size = -1, 0
            self._listener = LinkListener(
                secret,
                job,
                rank=rank,
                size=size,
                hosts=listening_hosts(config, one_host=one_host),
                log=lambda text: self.log("warning", text),
                failed=self.broken,
                tls=config.tls,
            )
            return self._listener.hello_entries()

        say = partial(self.log, "warning")
        self._meeting = join_job(launch, config, described, open_doors, say)
        self.secret = self._meeting.secret

    @property
    def cuda_absence(self) -> str:
        """Why this rank has no CUDA device; nothing if its driver shows one."""
        return "" if self.devices.counts[self.rank] else devices.absence(self.config)

    @property
    def cuda_for_lanes(self) -> dict[str, Any] | None:
        """What a lane needs to take CUDA tensors; None where no rank has a device."""
        if not self.devices.possible:
            return None
        have = self.devices.counts[self.rank]
        first = (self.device_share or (0,))[0]
        return devices.lane_options(self.config, first if have else -1)

    @property
    def device_share(self) -> tuple[int, ...] | None:
        """The CUDA devices that fall to this rank, None if there is no choice.

        A rank stays on them, whatever its number becomes.
        """
        if self._share is None:
            here, each = self.standing, self.config.devices_per_rank
            count = self.devices.counts[self.rank]
            self._share = devices.share(here.local_rank, here.local_size, count, each)
        return self._share

    def open_devices(self, numbers: Sequence[int], why_not: str = "") -> None:
        """Builds the device communicators, once; collective over the world.

        A newcomer does it when it is a member.

        Args:
            numbers: of the CUDA devices that this rank computes on; if there are none,
                because of `why_not`.

        Raises:
            StartupError: the ranks do not fit together, or NCCL failed.
        """
        if self.device is not None:
            return
        self.device = numbers, why_not
        if self.generation is not None and not elastic_devices.renew(self):
            elastic_devices.start_again(self, elastic_devices.LOST)

    def confirm(self) -> None:
        """Waits until all calls on devices have ended.

        Raises:
            PeerLost, RingjaxError: they have failed, and their results are void.
        """
        try:
            for communicator in self.devices.everyone():
                communicator.confirm()
            for lane in list(self.lanes.lanes.values()):
                lane.confirm()
        except _native.StatusError as error:
            raise from_status(error) from error

    def add(self, number: int, ranks: Sequence[int], what: str) -> None:
        """Registers a process set; collective over the world.

        If ranks are lost meanwhile, it begins again with those that are left, unless
        some rank has come to its end: then all have the set already.

        Raises:
            Mismatch: ranks disagree about the set. Nothing was registered.
        """
        while number not in self.sets:
            generation, epoch = self.generation, self.present
            if generation is None or epoch is None:
                self.sets[number] = list(ranks)  # a newcomer: the job tells its ranks
                return
            try:
                self._add(epoch, number, ranks, what)
                break
            except Mismatch:
                raise
            except RingjaxError:
                if not self.is_over(epoch, _NEWS):
                    raise
            self.wait_for_another(epoch.number)
            if self.waits or self.generation is None:
                raise PeerLost(f"ringjax.{what}: another rank starts again")
            kept = {generation.workers[rank] for rank in ranks}
            ranks = [r for r, w in enumerate(self.generation.workers) if w in kept]
        mine = self.rank in self.sets[number]
        # Where another rank had come to the end, the recovery connects it here.
        self.wait(lambda: number in self.calls.serving or not mine)

    def _add(self, epoch: Epoch, number: int, ranks: Sequence[int], what: str) -> None:
        self.agree(f"{what} {number}", ranks)
        both = (number, number | LANE) if self.rank in ranks else ()
        try:
            for each in both:
                name = f"process set {number}"
                epoch.link(each, ranks, name, self.within(epoch))
            self.adopt(epoch, number, ranks)
        except BaseException:
            for each in both:
                epoch.disconnect(each)
            raise
        try:
            self.devices.add(number, ranks)
        except BaseException:
            if not self.elastic:
                self._forget(number)
            raise

    def remove(self, number: int, ranks: Sequence[int], what: str) -> None:
        """Ends a process set; collective over the world.

        In an elastic job what it holds ends with the epoch: here nobody can say whether
        the other ranks have come as far.
        """
        if not self.elastic:
            self.agree(f"{what} {number}", ranks)
            self.devices.remove(number)
            self._forget(number)
            return
        with self.changed:
            self._removed.add(number)
            self.devices.remove(number)

    def _forget(self, number: int) -> None:
        """Ends what a process set holds in an epoch that goes on."""
        self.sets.pop(number, None)
        self.lanes.drop(number)
        for each in (number, number | LANE):
            self.calls.serving.pop(each, None)
            self.epoch.disconnect(each)

    def connect_control(
        self, number: int, ranks: Sequence[int], name: str
    ) -> _native.Communicator:
        """A communicator for messages of a few bytes, beside a device communicator."""
        return self.epoch.connect_small(number, ranks, name)

    def disconnect(self, number: int) -> None:
        """Ends a communicator, if there is one."""
        self.epoch.disconnect(number)

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Gives every rank the values of all ranks; `what` names it in errors."""
        if self.client is None:
            return [value]
        seconds = self.config.start_timeout
        return self.client.exchange(value, seconds, what, self.epoch.number)

    def prepare(self, what: str) -> None:
        """Called before each collective; has those of a newcomer run alone."""
        if self.generation is None and not self.calls.serving:
            self.rehearsal.begin(what)

    def agree(self, what: str, ranks: Sequence[int]) -> None:
        """All ranks say the same; raises Mismatch if one does not."""
        text = str(list(ranks[:32])) + ("..." if len(ranks) > 32 else "")
        digest = hashlib.sha256(str(list(ranks)).encode()).hexdigest()[:16]
        mine = f"{what} {text} {digest}"
        for rank, other in enumerate(self.exchange(mine, f"ringjax.{what}")):
            if other != mine:
                raise Mismatch(
                    f"ringjax.{what} of ranks {text}: rank {rank} calls "
                    f"{str(other)[:-17]}"
                )

    def stop(self) -> None:
        """Fails what is pending, and what comes."""
        self.end_telling()
        super().stop()
        self.end_profile()

    def close(self) -> None:
        """Leaves the job. Bounded in time; may be called on half of a world."""
        self.end_telling()
        self.end_profile()
        self.rehearsal.end()
        in_order = not (self.failed or self._end or self.dismissed)
        if self.recovery is not None:
            self.recovery.close()
        epoch, client = self._epoch, self.client
        self.group.close()
        self.devices.close()  # first: what the devices still do needs all ranks
        if not self.elastic:
            self.lanes.close()
        if in_order and epoch is not None:
            epoch.leave()
        if in_order and client is not None and (epoch is not None or not self.elastic):
            client.leave(self._last_lines(), self._joined)
        if self.elastic:
            self.stop()
            self.lanes.close()
        self.calls.clear()
        if epoch is not None:
            epoch.close()
        if self._whereabouts is not None:
            self._whereabouts.close()
        if self._listener is not None:
            self._listener.close()
        self._registry.end()
        if self._meeting is not None:
            self._meeting.close()
            if self.config.worker is not None:
                _left.add((self.config.job, self.config.worker))
        self._epoch = self._listener = self._meeting = self.recovery = None

    def _last_lines(self) -> dict[int, CallProgress]:
        """How far this rank came, for those that may still be inside the last call."""
        if self.waits or not self.elastic:
            return {}
        try:
            return self.halt(CLOSED, -1)
        except _native.StatusError as error:  # somebody is still in a call
            self.log("info", f"leaving in the middle of a call: {error}")
            return {}

    def abandon(self) -> None:
        """In a forked child: lets go of the sockets and of nothing else.

        Copies of them here would hide the parent's death from its peers. The threads of
        the core do not exist in the child, so its objects must never be closed.
        """
        _abandoned.append(self)
        if isinstance(self._telling, Teller):
            self._telling.release()
        if self._epoch is not None:
            self._epoch.abandon()
        if self._whereabouts is not None:
            self._whereabouts.release()
        if self._listener is not None:
            self._listener.close_in_child()
        if self._meeting is not None:
            self._meeting.close_in_child()
        if self.recovery is not None:
            self.recovery.release()


_abandoned: list[object] = []


def _check(config: Config) -> None:
    """Refuses a process that cannot join an elastic job.

    Raises:
        StartupError: the environment does not say enough, or this process has left.
    """
    if not config.rendezvous or config.worker is None:
        raise StartupError(
            "RINGJAX_ELASTIC is set, but RINGJAX_RENDEZVOUS or RINGJAX_WORKER is not: "
            "start elastic jobs by ringrun --min-np"
        )
    if (config.job, config.worker) in _left:
        raise StartupError(
            "this process has left its elastic job by ringjax.shutdown(), and cannot "
            "come back: another process would have to"
        )
