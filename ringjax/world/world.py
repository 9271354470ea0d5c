"""World: the live state on this rank from `init` to `shutdown`.

A world joins the job that the settings and the environment describe, adds and removes
process sets, and ends in good order, with a failure, or in a forked child. Users call
runtime/. membership/rendezvous_discovery.py finds the other ranks of the job, and
epoch_sequence.py changes from one epoch to the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ringjax import _native
from ringjax.config import Config, horovod_names
from ringjax.control import addresses as address
from ringjax.control import launch_environment
from ringjax.control.listener import LinkListener
from ringjax.errors import Mismatch, PeerLost, RingjaxError, StartupError, from_status
from ringjax.membership import member_table
from ringjax.membership.client import CallProgress
from ringjax.membership.directives import Dismiss, EpochDirective, Welcome
from ringjax.membership.rendezvous_discovery import join_job
from ringjax.settings import horovod_variables
from ringjax.settings.unknown_variables import unknown_variable_warnings
from ringjax.world import call_records, devices, epoch_devices
from ringjax.world.communicator_ids import EAGER_LANE
from ringjax.world.communicator_table import CommunicatorTable
from ringjax.world.epoch import Epoch
from ringjax.world.epoch_builder import EpochBuilder
from ringjax.world.epoch_sequence import CLOSED, EpochSequence
from ringjax.world.hello import create_hello, listening_hosts
from ringjax.world.lanes import Lanes
from ringjax.world.profile_recording import ProfileRecording
from ringjax.world.rank_info import RankInfo
from ringjax.world.recovery import Recovery
from ringjax.world.registry import Registry
from ringjax.world.reporter import Reporter
from ringjax.world.solo_mode import SoloMode
from ringjax.world.stack_probe import StackProbe
from ringjax.world.telemetry_client import TelemetryClient
from ringjax.world.time_spent import spent

_logged_warnings: set[str] = set()  # a second `init` does not log them again
# The (job, worker) of each elastic job that has ended in this process.
_left_jobs: set[tuple[str, int]] = set()
_Value = TypeVar("_Value")


class World(EpochSequence):
    """The connection of this rank with all other ranks of the job.

    The constructor raises StartupError or PeerLost if this rank could not join the job.
    """

    recorder: _native.Recorder  # the flight recorder of all calls since `init`

    def __init__(self, config: Config, registry: Registry) -> None:
        super().__init__(config, registry)
        self.devices = devices.Devices(config, [0])
        self.lanes = Lanes(self)
        self.comm_table = CommunicatorTable(self.lanes)
        self.solo_mode = SoloMode(self)
        self.recovery: Recovery | None = None  # None in a static job
        # (epoch, ranks) -> how many private communicators these ranks have had; see
        # `runtime.private_communicator`.
        self.private_counts: dict[tuple[int, ...], int] = {}
        self.tuned = ""  # the result of autotune, for reports of rank 0
        self.secret = b""  # the job's secret; empty in a job of one process
        self._start_error = ""
        self._stack_probe: StackProbe | None = None
        self._telemetry: Reporter | TelemetryClient | None = None
        self._recording: ProfileRecording | None = None
        self._device_share: tuple[int, ...] | None = None
        launch = launch_environment.detect_launch(config)
        self._prefix = f"ringjax {launch.rank}/{launch.size}"
        self.rank_info = RankInfo.provisional(launch.rank, launch.size, config)
        if launch.rank == 0:
            self._log_setting_notes()
        try:
            self._join(launch)
        except BaseException as error:
            self._start_error = str(error)
            self.close()
            raise

    def _log_setting_notes(self) -> None:
        for note in horovod_variables.notes(horovod_names()):
            self.log("info", note)
        for warning in unknown_variable_warnings():
            if warning not in _logged_warnings:
                self.log("warning", warning)
                _logged_warnings.add(warning)

    def _join(self, launch: launch_environment.LaunchInfo) -> None:
        """Joins the job. Joins its first epoch, too, unless this rank is a newcomer."""
        config, size = self.config, launch.size
        if self.elastic:
            _check_can_join(config)
        else:
            self.group.check_job_size(size)
        worker = launch.rank if config.worker is None else config.worker
        hello = create_hello(launch.rank, size, config)
        hello |= self.group.reserve_port(worker)
        if size > 1 or self.elastic:
            self._join_job(launch, hello)
            self._stack_probe = StackProbe(self.log)
        job = "" if self._joined_job is None else self._joined_job.job
        self._begin_recording(f"{'worker' if self.elastic else 'rank'} {worker}", job)
        self._registry.reset(0)
        if self.elastic and self.client is not None:
            self.recovery = Recovery(self, self.client)
        self._epoch_builder = EpochBuilder(
            config=config,
            joined_job=self._joined_job,
            listener=self._listener,
            notify=-1 if self.recovery is None else self.recovery.notify_fd,
            stack_probe=self._stack_probe,
            log=self.log,
            recorder=self.recorder,
        )
        if self.client is None:
            alone = member_table.decode(member_table.encode([0], [hello]))
            first: EpochDirective | Welcome | Dismiss = EpochDirective(
                0, "start", alone, 0, (-1,), {}, {}, 1, {}
            )
        else:
            first = self.client.first
        if isinstance(first, EpochDirective):
            self.group.join(first.group_addresses, first.group)
        if self.recovery is None:
            assert isinstance(first, EpochDirective)
            self.install(self.link([first], self.client), [first])
            self._open_records()
        elif not isinstance(first, Welcome):
            self.recovery.start(first)
            self.wait_for_admission()
        else:
            self._become_newcomer(first)
            self.recovery.start(None)

    def _become_newcomer(self, welcome: Welcome) -> None:
        # Rank and size are provisional until this newcomer becomes a member.
        rank, size = welcome.rank, welcome.size
        self.rank_info = RankInfo.provisional(rank, size, self.config)
        self._prefix = f"ringjax worker {self.config.worker}"
        self.group.join(welcome.group_addresses, welcome.group)
        self.group.replicas = [rank] if self.group.addresses else []
        self._registry.update(size, {}, 0, self.group.replicas)
        self.sets = {0: list(range(size))}
        self.devices.counts = [devices.count(self.config)] * size

    def wait_for_admission(self) -> None:
        """Waits until this rank is a member. Exits if the job ends before that."""
        self.wait(lambda: self.epoch_info is not None or self.dismissed)
        if self.epoch_info is None:
            raise SystemExit(0)
        self._open_records()

    def _open_records(self) -> None:
        """Starts the timeline, on rank 0 only, and the profile, if they are configured.

        The rank must be final, so a newcomer calls this method when it becomes a
        member.
        """
        spent.begin(self.recorder)
        self.lanes.open_timeline()
        if self.config.profile and self._recording is None:
            try:
                self.begin_profile(self.config.profile)
            except OSError as error:  # the job does not depend on its profile
                self.log("warning", f"no profile of {self._process_name}: {error}")
        count, local_size = self.devices.counts[self.rank], self.rank_info.local_size
        needed = local_size * (self.config.devices_per_rank or count)
        if count and local_size > 1 and needed > count:
            self.log(
                "info",
                f"{local_size} ranks of this host share {count} CUDA device(s): let "
                "JAX take a part of the memory only (XLA_PYTHON_CLIENT_MEM_FRACTION)",
            )

    # -- records of calls --------------------------------------------------------------

    def _begin_recording(self, name: str, job: str) -> None:
        """Starts the recorder, and telemetry or reports if they are configured."""
        self.recorder = call_records.begin_job(self.config, name, job)
        self._telemetry = call_records.start_telemetry(self, self.config)
        self._process_name, self._profile_run = name, job[:8] or "alone"

    def _end_telemetry(self) -> None:
        """Sends or prints the last telemetry sample. Further calls do nothing."""
        if self._telemetry is not None:
            self._telemetry.close()

    def begin_profile(
        self, directory: str, *, steps: int = 0, jax_trace: bool | None = None
    ) -> ProfileRecording:
        """Ends a running profile, and begins to record this rank for a new profile.

        Raises OSError if the folder cannot be written.
        """
        self.end_profile()
        self._recording = ProfileRecording(
            source=self,
            directory=Path(directory),
            run=self._profile_run,
            name=self._process_name,
            steps=steps,
            jax_trace=jax_trace,
        )
        return self._recording

    def end_profile(self) -> None:
        """Writes the rest of a running profile, if there is one."""
        if self._recording is not None:
            self._recording.end()

    # -- joining the job ---------------------------------------------------------------

    def _join_job(
        self, launch: launch_environment.LaunchInfo, hello: dict[str, Any]
    ) -> None:
        def open_listener(secret: bytes, job: str) -> dict[str, str]:
            # Start to listen before the hello is sent, because other ranks may connect
            # as soon as they have received the hello.
            if self._listener is not None:
                self._listener.close()
            self._listener = self._listen(launch, secret, job)
            return self._listener.hello_entries()

        warn = partial(self.log, "warning")
        self._joined_job = join_job(launch, self.config, hello, open_listener, warn)
        self.secret = self._joined_job.secret

    def _listen(
        self, launch: launch_environment.LaunchInfo, secret: bytes, job: str
    ) -> LinkListener:
        config = self.config
        rank, size, single_host = launch.rank, launch.size, launch.single_host
        if config.elastic:
            # Ranks and hosts may change in the next epoch, so accept any rank, and
            # listen on loopback only if the coordinator does.
            coordinator = address.parse(config.rendezvous)
            single_host = all(address.is_loopback(host) for host, _ in coordinator)
            rank, size = -1, 0
        return LinkListener(
            secret,
            job,
            rank=rank,
            size=size,
            hosts=listening_hosts(config, single_host=single_host),
            log=lambda text: self.log("warning", text),
            failed=self.on_thread_failure,
            tls=config.tls,
        )

    # -- devices -----------------------------------------------------------------------

    @property
    def cuda_absence(self) -> str:
        """Why this rank has no CUDA device, or "" if its driver shows a device."""
        return "" if self.devices.counts[self.rank] else devices.absence(self.config)

    @property
    def cuda_for_lanes(self) -> dict[str, Any] | None:
        """The options for lanes of CUDA tensors, or None if no rank has a device."""
        if not self.devices.possible:
            return None
        has_device = self.devices.counts[self.rank] > 0
        first = (self.device_share or (0,))[0]
        return devices.lane_options(self.config, first if has_device else -1)

    @property
    def device_share(self) -> tuple[int, ...] | None:
        """This rank's devices if the ranks of its host divide them, otherwise None.

        The value is computed once, and does not change when the rank changes.
        """
        if self._device_share is None:
            self._device_share = devices.share(
                self.rank_info.local_rank,
                self.rank_info.local_size,
                devices=self.devices.counts[self.rank],
                per_rank=self.config.devices_per_rank,
            )
        return self._device_share

    def open_devices(self, numbers: Sequence[int], why_not: str = "") -> None:
        """Connects the device communicators, once. All ranks of the world must call it.

        A newcomer connects its devices when it becomes a member. `why_not` is the
        reason if this rank has no CUDA devices. Raises as `Devices.open` does.
        """
        if self.local_devices is not None:
            return
        self.local_devices = numbers, why_not
        is_member = self.epoch_info is not None
        if is_member and not epoch_devices.reconnect_devices(self):
            epoch_devices.restart_epoch(self, epoch_devices.LOST)

    def confirm(self) -> None:
        """Waits until all calls on devices have ended. Raises if a call has failed."""
        try:
            for communicator in self.devices.all_communicators():
                communicator.confirm()
            for lane in list(self.lanes.lanes.values()):
                lane.confirm()
        except _native.StatusError as error:
            raise from_status(error) from error

    # -- process sets ------------------------------------------------------------------

    def add(self, number: int, ranks: Sequence[int], what: str) -> None:
        """Connects a process set. All ranks of the world must call it.

        If ranks are lost meanwhile, the remaining ranks try again in the next epoch.
        But if a rank had already finished, it has reported the set to the coordinator,
        and the recovery connects the set on all ranks. If ranks disagree about the set,
        raises Mismatch and connects nothing.
        """
        while number not in self.sets:
            epoch_info, epoch = self.epoch_info, self.current_epoch
            if epoch_info is None or epoch is None:
                # A newcomer receives the ranks of the set when the newcomer becomes a
                # member.
                self.sets[number] = list(ranks)
                return
            try:
                self._add(epoch, number, ranks, what)
                break
            except Mismatch:
                raise
            except RingjaxError:
                if not self.is_over(epoch, epoch_devices.REVOKE_DELAY):
                    raise
            self.wait_for_next_epoch(epoch.number)
            if self.restart_pending or self.epoch_info is None:
                raise PeerLost(f"ringjax.{what}: another rank starts again")
            kept = {epoch_info.workers[rank] for rank in ranks}
            ranks = [r for r, w in enumerate(self.epoch_info.workers) if w in kept]
        included = self.rank in self.sets[number]
        # If another rank has reported the set, wait until the recovery connects it.
        self.wait(lambda: number in self.comm_table.active or not included)

    def _add(self, epoch: Epoch, number: int, ranks: Sequence[int], what: str) -> None:
        self.check_same_call(f"{what} {number}", ranks)
        both = (number, number | EAGER_LANE) if self.rank in ranks else ()
        try:
            for each in both:
                name = f"process set {number}"
                epoch.link(each, ranks, name, self.link_factory_of(epoch))
            self.install_process_set(epoch, number, ranks)
        except BaseException:
            for each in both:
                epoch.disconnect(each)
            raise
        try:
            self.devices.add(number, ranks)
        except BaseException:
            if not self.elastic:
                self._disconnect_set(number)
            raise

    def remove(self, number: int, ranks: Sequence[int], what: str) -> None:
        """Closes a process set. All ranks of the world must call it.

        An elastic job closes the communicators at the end of the epoch, because this
        rank cannot know whether all other ranks remove the set, too. A static job
        raises Mismatch, and closes nothing, if ranks disagree about the set.
        """
        if not self.elastic:
            self.check_same_call(f"{what} {number}", ranks)
            self.devices.remove(number)
            self._disconnect_set(number)
            return
        with self.changed:
            self._removed.add(number)
            self.devices.remove(number)

    def _disconnect_set(self, number: int) -> None:
        self.sets.pop(number, None)
        self.lanes.drop(number)
        for each in (number, number | EAGER_LANE):
            self.comm_table.active.pop(each, None)
            self.epoch.disconnect(each)

    def exchange(self, value: _Value, what: str) -> list[_Value]:
        """Returns the values of all ranks. `what` names the exchange in errors."""
        if self.client is None:
            return [value]
        seconds = self.config.start_timeout
        return self.client.exchange(value, seconds, what, self.epoch.number)

    def check_same_call(self, what: str, ranks: Sequence[int]) -> None:
        """Raises Mismatch on all ranks if the ranks make different calls."""
        text = str(list(ranks[:32])) + ("..." if len(ranks) > 32 else "")
        digest = hashlib.sha256(str(list(ranks)).encode()).hexdigest()[:16]
        own = f"{what} {text} {digest}"
        for rank, other in enumerate(self.exchange(own, f"ringjax.{what}")):
            if other != own:
                raise Mismatch(
                    f"ringjax.{what} of ranks {text}: rank {rank} calls "
                    f"{str(other)[:-17]}"
                )

    def prepare_call(self, what: str) -> None:
        """Starts solo mode if this rank is a newcomer. `what` is a collective."""
        if self.epoch_info is None and not self.comm_table.active:
            self.solo_mode.begin(what)

    # -- the end -----------------------------------------------------------------------

    def stop(self) -> None:
        self._end_telemetry()
        super().stop()
        self.end_profile()

    def close(self) -> None:
        """Leaves the job within a bounded time, even if `_join` has failed halfway.

        Telemetry and profile end first, because they read the communicators. Device
        communicators close before this rank leaves, because calls that still run on
        devices need all ranks.
        """
        self._end_telemetry()
        self.end_profile()
        call_records.end_job()
        self.solo_mode.end()
        in_order = not (self.failed or self._end or self.dismissed)
        if self.recovery is not None:
            self.recovery.close()
        epoch, client = self._epoch, self.client
        self.group.close()
        self.devices.close()
        if not self.elastic:
            self.lanes.close()
        if in_order and epoch is not None:
            epoch.leave()
        if in_order and client is not None and (epoch is not None or not self.elastic):
            progress = self._final_progress()
            client.leave(progress, self._last_joined, self._start_error)
        if self.elastic:
            self.stop()
            self.lanes.close()
        self.comm_table.clear()
        if epoch is not None:
            epoch.close()
        if self._epoch_builder is not None:
            self._epoch_builder.kept.close()
        if self._stack_probe is not None:
            self._stack_probe.close()
        if self._listener is not None:
            self._listener.close()
        self._registry.clear()
        if self._joined_job is not None:
            self._joined_job.close()
            if self.config.worker is not None:
                _left_jobs.add((self.config.job, self.config.worker))
        self._epoch = self._listener = self._joined_job = self.recovery = None

    def _final_progress(self) -> dict[int, CallProgress]:
        """Returns how many calls this rank has completed, for ranks still in a call."""
        if self.restart_pending or not self.elastic:
            return {}
        try:
            return self.halt(CLOSED, -1)
        except _native.StatusError as error:  # a thread is still executing a call
            self.log("info", f"leaving in the middle of a call: {error}")
            return {}

    def close_in_child(self) -> None:
        """Closes a forked child's copies of the sockets, and nothing else.

        These copies would keep the connections open after the death of the parent, and
        its peers would not detect the death. The threads of the core do not exist in
        the child, so the objects of the core must never be closed or destroyed there.
        """
        _kept_in_child.append(self)
        if isinstance(self._telemetry, TelemetryClient):
            self._telemetry.close_in_child()
        if self._epoch is not None:
            self._epoch.close_in_child()
        if self._epoch_builder is not None:
            self._epoch_builder.kept.close_in_child()
        if self._stack_probe is not None:
            self._stack_probe.close_in_child()
        if self._listener is not None:
            self._listener.close_in_child()
        if self._joined_job is not None:
            self._joined_job.close_in_child()
        if self.recovery is not None:
            self.recovery.close_in_child()


_kept_in_child: list[World] = []  # keeps the objects of the core alive


def _check_can_join(config: Config) -> None:
    if not config.rendezvous or config.worker is None:
        raise StartupError(
            "RINGJAX_ELASTIC is set, but RINGJAX_RENDEZVOUS or RINGJAX_WORKER is not: "
            "start elastic jobs by ringrun --min-np"
        )
    if (config.job, config.worker) in _left_jobs:
        raise StartupError(
            "this process has left its elastic job by ringjax.shutdown(), and cannot "
            "come back: another process would have to"
        )
