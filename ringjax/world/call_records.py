"""The records of the calls of this process, which its two possible worlds share.

From `init` to `shutdown` a process is in the world of its job, and while ringjax runs
JAX's own collectives it is in a world apart, too. Either may begin first. All calls
enter one recorder, so statistics, samples and the timeline show both. The world apart
has readers of its own only where `init` has not been called.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ringjax import _native
from ringjax.config import Config
from ringjax.errors import StartupError
from ringjax.world.epoch import Epoch
from ringjax.world.profile_recording import ProfileRecording
from ringjax.world.rank_info import RankInfo
from ringjax.world.recorder import create_recorder
from ringjax.world.telemetry_client import TelemetryClient
from ringjax.world.time_spent import spent

if TYPE_CHECKING:
    from ringjax.world.reporter import Reporter


class RecordedWorld(Protocol):
    """The attributes of `World` and of `WorldApart` that show their calls."""

    recorder: _native.Recorder
    tuned: str

    @property
    def current_epoch(self) -> Epoch | None:
        """The epoch in force, or None while this process is in no epoch."""

    @property
    def epoch(self) -> Epoch:
        """The epoch in force. Raises RingjaxError if there is none."""

    @property
    def rank_info(self) -> RankInfo: ...

    @property
    def communicators(self) -> dict[int, _native.Communicator]:
        """The communicators on which the program's calls run, by id."""

    def log(self, level: str, text: str) -> None: ...


_lock = threading.Lock()  # guards the creation of the first `ApartRecords`
_of_job: _native.Recorder | None = None  # the recorder, while `init` is in force
_apart: ApartRecords | None = None  # the first one, which has the readers


def begin_job(config: Config, name: str, job: str) -> _native.Recorder:
    """Returns the recorder for the calls of a job's world, in which `init` has begun.

    The readers of a world apart end, because the job's world has readers, too. Only its
    timeline continues; see `take_timeline`.
    """
    global _of_job
    if _apart is not None:
        _apart.end_readers()
    _of_job = _apart.recorder if _apart else create_recorder(config, name, job)
    return _of_job


def end_job() -> None:
    global _of_job
    _of_job = None


def take_timeline() -> _native.Timeline | None:
    """Returns the timeline that a world apart has opened; the caller must close it."""
    if _apart is None:
        return None
    timeline, _apart.timeline = _apart.timeline, None
    return timeline


def world_apart() -> RecordedWorld | None:
    """Returns the world of JAX's own collectives, or None if ringjax runs none."""
    return None if _apart is None else _apart.world


def configured_timeline(config: Config) -> _native.Timeline | None:
    """Opens the timeline that RINGJAX_TIMELINE names; returns None without a name.

    Raises:
        StartupError: the file cannot be written.
    """
    if config.timeline in ("", "DYNAMIC"):
        return None
    try:
        return _native.Timeline(config.timeline, config.timeline_mark_cycles)
    except _native.StatusError as error:
        raise StartupError(f"RINGJAX_TIMELINE: {error}") from error


def start_telemetry(
    world: RecordedWorld, config: Config
) -> TelemetryClient | Reporter | None:
    """Starts to send samples to ringrun, or to print reports, if configured."""
    if config.monitor:
        client_id = config.rank if config.worker is None else config.worker
        return TelemetryClient(world, config.monitor, client_id or 0)
    if config.report > 0:
        # Imported here, because few programs need it, and JAX makes its client faster.
        from ringjax.world.reporter import Reporter, write_to_stderr

        return Reporter(world, config.report, write_to_stderr)
    return None


class ApartRecords:
    """The records of a world apart, until `close`.

    All worlds apart of this process have one recorder, and the first has the readers.

    Args:
        config: the settings of the process.
        job: the id of the world apart, equal on all its processes.

    Attributes:
        recorder: receives the calls of the world.
        timeline: the timeline that has been opened here, if any.
    """

    recorder: _native.Recorder

    def __init__(
        self, world: RecordedWorld, config: Config, rank: int, job: str
    ) -> None:
        global _apart
        self.world, self._config = world, config
        self._rank, self._job = rank, job
        self.timeline: _native.Timeline | None = None
        self._telemetry: TelemetryClient | Reporter | None = None
        self._profile: ProfileRecording | None = None
        with _lock:
            if _apart is not None:
                self.recorder = _apart.recorder
                return
            name = f"JAX process {rank}"
            self.recorder = _of_job or create_recorder(config, name, job)
            _apart = self

    def open(self, *, samples: bool) -> None:
        """Starts the readers that are configured, unless a job's world has them.

        `samples` says whether ringrun, or rank 0, may take this world for the job.

        Raises:
            StartupError: the timeline cannot be written.
        """
        if _of_job is not None or _apart is not self:
            return
        self._open_timeline()
        spent.begin(self.recorder)
        if samples:
            self._telemetry = start_telemetry(self.world, self._config)
        if self._config.profile:
            try:
                self._profile = self._begin_profile(Path(self._config.profile))
            except OSError as error:  # the program does not depend on its profile
                self.world.log("warning", f"no profile of rank {self._rank}: {error}")

    def _open_timeline(self) -> None:
        config = self._config
        # The rank of the job, as after `init`, because process 0 of another world apart
        # in this job would write the same file.
        if (self._rank if config.rank is None else config.rank) == 0:
            self.timeline = configured_timeline(config)
            self.recorder.tell(self.timeline)

    def _begin_profile(self, directory: Path) -> ProfileRecording:
        run, name = self._job[:8], f"rank {self._rank}"
        return ProfileRecording(self.world, directory, run, name)

    def end_readers(self) -> None:
        """Sends the last sample, and ends the profile. Further calls do nothing."""
        for reader in (self._telemetry, self._profile):
            if isinstance(reader, ProfileRecording):
                reader.end()
            elif reader is not None:
                reader.close()
        self._telemetry = self._profile = None

    def close(self) -> None:
        """Ends everything, before the world apart closes its communicators."""
        global _apart
        self.end_readers()
        if self.timeline is not None:
            self.recorder.tell(None)
            self.timeline.close()
            self.timeline = None
        if _apart is self:
            _apart = None

    def close_in_child(self) -> None:
        """Closes a forked child's copy of the socket, and nothing else."""
        if isinstance(self._telemetry, TelemetryClient):
            self._telemetry.close_in_child()
