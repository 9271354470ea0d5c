"""Records a profile on one rank: a thread writes the recorder's calls to a part file.

The file also gets what is needed to put all ranks on one time base (clock readings
against rank 0), and the bytes that the links have carried. profile/ merges and reads
the files of all ranks.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Protocol

from ringjax import _native
from ringjax.world.epoch import Epoch
from ringjax.world.jax_trace import JaxTrace, is_jax_loaded
from ringjax.world.part_file import PartFile
from ringjax.world.recorder import RECORDER_CAPACITY
from ringjax.world.step_counter import StepCounter

FORMAT = 1
PARTS = "parts"  # the folder of the part files, in the folder of the profile
_POLL_INTERVAL = 0.2  # seconds between two reads of the recorder
_CAPACITY = 1 << 14  # calls that the recorder keeps between two polls
_CLOCK_REQUESTS = 16  # clock requests at the start of each epoch and at the end
_CLOCK_INTERVAL = 1.0  # seconds between two clock readings
_CLOCK_TIMEOUT = 0.03  # seconds to wait for the last readings
_JAX_SECONDS = 5.0  # the length of JAX's trace, which is kept in memory


class ProfileSource(Protocol):
    """The attributes of `World` from which a profile is recorded."""

    recorder: _native.Recorder

    @property
    def current_epoch(self) -> Epoch | None:
        """The epoch in force; None while this rank has none."""

    @property
    def communicators(self) -> dict[int, _native.Communicator]:
        """The communicators that serve calls of the program, by id."""

    def log(self, level: str, text: str) -> None: ...


def clock_id() -> str:
    """Identifies the clock of `time.monotonic`: equal for processes that share it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return socket.gethostname()


class ProfileRecording:
    """A recording, which begins at once and ends by `end` or after some steps.

    Args:
        run: the id of this profile, equal on all ranks.
        name: the name of this process, such as "rank 3".
        steps: how many training steps to record; 0 for no limit.
        jax_trace: whether to record a trace by JAX, too; None to start one when a
            compiled program calls a collective.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        source: ProfileSource,
        directory: Path,
        run: str,
        name: str,
        *,
        steps: int = 0,
        jax_trace: bool | None = None,
    ) -> None:
        self._source, self.run = source, run
        self._steps = StepCounter(steps) if steps else None
        self._wants_jax = jax_trace
        self._part = PartFile(
            directory.absolute() / PARTS / f"{run}.{name.replace(' ', '-')}.jsonl",
            lambda why: source.log(
                "warning", f"the profile of {name} ends here: {why}"
            ),
        )
        self._heartbeat: _native.Heartbeat | None = None
        self._epoch = -1
        self._traffic: tuple[int, float] = (0, 0.0)
        self._clock_requested_at = 0.0
        self._jax: JaxTrace | None = None
        self._jax_until = 0.0
        self._stop = threading.Event()
        source.recorder.keep(_CAPACITY)
        self._seen_calls = source.recorder.count
        self._part.write_header(
            format=FORMAT,
            run=run,
            who=name,
            pid=os.getpid(),
            host=socket.gethostname(),
            clock=clock_id(),
            monotonic=time.monotonic(),
            realtime=time.time(),
        )
        self._check_epoch()
        if jax_trace:
            self._begin_jax_trace()
        self._thread = threading.Thread(
            target=self._run, name="ringjax-profile", daemon=True
        )
        self._thread.start()

    def mark_step(self) -> None:
        """Records that the program has reached the end of a training step."""
        self._part.write_record(step=time.monotonic())

    def end(self) -> None:
        """Writes the remaining calls and closes the file. Further calls do nothing."""
        self._stop.set()
        self._thread.join(30.0)

    def _run(self) -> None:
        why = ""
        try:
            while not self._stop.wait(_POLL_INTERVAL) and not self._poll():
                pass
            self._request_clock(_CLOCK_REQUESTS)
            time.sleep(_CLOCK_TIMEOUT)  # the heartbeat's thread receives the readings
            self._write_clock()
            if self._stop.is_set():
                self._poll()
        except Exception as error:  # the program must not depend on its profile
            why = f"{type(error).__name__}: {error}"
            self._source.log("warning", f"the profile ends here: {why}")
        self._end_jax_trace()
        self._source.recorder.keep(RECORDER_CAPACITY)
        self._part.write_record(end=time.monotonic(), why=why)
        self._part.close()

    def _poll(self) -> bool:
        """Writes new calls. Returns whether enough steps have been recorded."""
        self._check_epoch()
        if time.monotonic() - self._clock_requested_at > _CLOCK_INTERVAL:
            self._request_clock(2)
        self._write_clock()
        self._write_traffic()
        recorder = self._source.recorder
        self._seen_calls, lost, lines = recorder.lines_since(self._seen_calls)
        if lost:
            self._part.write_record(lost=lost, at=time.monotonic())
        steps = self._steps
        if steps is not None:
            if steps.over:
                return True
            lines = steps.cut(lines)
        self._part.write_lines(lines)
        if self._wants_jax is None and is_jax_loaded() and b'"compiled"' in lines:
            self._begin_jax_trace()
        if self._jax is not None and time.monotonic() > self._jax_until:
            self._end_jax_trace()
        return steps is not None and steps.over

    # -- ranks, clocks and links -------------------------------------------------------

    def _check_epoch(self) -> None:
        epoch = self._source.current_epoch
        communicator = self._source.communicators.get(0)
        if epoch is None or communicator is None or communicator.epoch == self._epoch:
            return
        self._heartbeat, self._epoch = epoch.heartbeat, communicator.epoch
        rank = epoch.rank_info.rank
        self._part.write_header(
            epoch=self._epoch,
            rank=rank,
            size=epoch.rank_info.size,
            host=epoch.hostname_of(rank) or socket.gethostname(),
            at=time.monotonic(),
        )
        self._request_clock(_CLOCK_REQUESTS)

    def _request_clock(self, times: int) -> None:
        self._clock_requested_at = time.monotonic()
        if self._heartbeat is not None:
            self._heartbeat.ask_clock(times)

    def _write_clock(self) -> None:
        if self._heartbeat is None:
            return
        readings = self._heartbeat.take_clocks()
        if readings:
            # The shortest round trip leaves least doubt about the offset.
            rank, when, ahead, trip = min(readings, key=lambda reading: reading[3])
            self._part.write_record(
                clock=rank, epoch=self._epoch, when=when, ahead=ahead, trip=trip
            )

    def _write_traffic(self) -> None:
        sent, exposed = 0, 0.0
        for communicator in list(self._source.communicators.values()):
            stats = communicator.stats()
            exposed += stats.get("overlap", {}).get("exposed_seconds", 0.0)
            sent += sum(entry.get("sent_bytes", 0) for entry in stats.values())
        if (sent, exposed) != self._traffic:
            self._traffic = (sent, exposed)
            self._part.write_record(sent=sent, exposed=exposed, at=time.monotonic())

    # -- JAX's own trace ---------------------------------------------------------------

    def _begin_jax_trace(self) -> None:
        self._wants_jax = False
        if not is_jax_loaded():
            return
        try:
            self._jax = JaxTrace(self._part.path.with_suffix(".jax"))
            self._jax_until = time.monotonic() + _JAX_SECONDS
        except Exception as error:  # for example, the program is recording a trace
            self._part.write_record(jax_absent=f"{type(error).__name__}: {error}")

    def _end_jax_trace(self) -> None:
        trace, self._jax = self._jax, None
        if trace is None:
            return
        try:
            name, began = trace.end()
            self._part.write_record(jax=name, began=began)
        except Exception as error:
            self._part.write_record(jax_absent=f"{type(error).__name__}: {error}")
