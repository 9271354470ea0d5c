"""The recording of a profile on one rank: a thread that empties the recorder.

Into a file, and beside the calls what is needed to lay all ranks on one time base, and
what the links have carried. Merging and reading are in profile/.
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
from ringjax.world.jax_trace import JaxTrace, loaded
from ringjax.world.part_file import PartFile
from ringjax.world.record import KEPT
from ringjax.world.report import host
from ringjax.world.steps import Steps

FORMAT = 1
POLL = 0.2  # seconds
KEPT_MEANWHILE = 1 << 14  # calls between two polls
QUESTIONS = 16  # of clocks, at the start and at the end
ANSWERS = 0.03  # seconds for them
JAX_SECONDS = 5.0  # of jax's trace, which is kept in memory
PARTS = "parts"  # folder in that of the profile


class Home(Protocol):
    """What the recording needs of its world."""

    recorder: _native.Recorder

    @property
    def present(self) -> Epoch | None:
        """The one in force; None: there is none, or none yet."""

    @property
    def communicators(self) -> dict[int, _native.Communicator]:
        """Those of now."""

    def log(self, level: str, text: str) -> None:
        """One line on standard error, if the level is wanted."""


def clock_of_this_process() -> str:
    """Alike for processes whose `time.monotonic` is the same clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return socket.gethostname()


class Recording:
    """Begins at once; ends by `end`, or by itself after `steps`.

    Args:
        directory: the profile's folder; the part gets into one below.
        run: what the parts of all ranks of this profile are called alike.
        who: "rank 3".
        steps: 0: no end.
        jax_trace: None: as soon as the program calls one of ours within JAX.

    Raises:
        OSError: nothing can be written there.

    Attributes:
        run: as it was given.
    """

    def __init__(
        self,
        home: Home,
        directory: Path,
        run: str,
        who: str,
        *,
        steps: int = 0,
        jax_trace: bool | None = None,
    ) -> None:
        self._home, self.run = home, run
        self._steps = Steps(steps) if steps else None
        self._wants_jax = jax_trace
        name = f"{run}.{who.replace(' ', '-')}"
        self._part = PartFile(
            directory.absolute() / PARTS / f"{name}.jsonl",
            lambda why: home.log("warning", f"the profile of {who} ends here: {why}"),
        )
        self._heartbeat: _native.Heartbeat | None = None
        self._epoch = -1
        self._sent: tuple[int, float] = (0, 0.0)
        self._asked = 0.0
        self._jax: JaxTrace | None = None
        self._jax_until = 0.0
        self._stop = threading.Event()
        home.recorder.keep(KEPT_MEANWHILE)
        self._seen = home.recorder.count
        self._part.head(
            format=FORMAT,
            run=run,
            who=who,
            pid=os.getpid(),
            host=socket.gethostname(),
            clock=clock_of_this_process(),
            monotonic=time.monotonic(),
            realtime=time.time(),
        )
        self._follow()
        if jax_trace:
            self._begin_jax()
        self._thread = threading.Thread(
            target=self._run, name="ringjax-profile", daemon=True
        )
        self._thread.start()

    def mark(self) -> None:
        """The program has come to the end of a step."""
        self._part.say(step=time.monotonic())

    def end(self) -> None:
        """Writes what is left. May be called twice, and at any time."""
        self._stop.set()
        self._thread.join(30.0)

    def _run(self) -> None:
        why = ""
        try:
            while not self._stop.wait(POLL) and not self._turn():
                pass
            self._ask(QUESTIONS)
            time.sleep(ANSWERS)  # they come on the heartbeat's thread, or get lost
            self._write_readings()
            if self._stop.is_set():
                self._turn()
        except Exception as error:  # whatever it is, the program goes on
            why = f"{type(error).__name__}: {error}"
            self._home.log("warning", f"the profile ends here: {why}")
        self._end_jax()
        self._home.recorder.keep(KEPT)
        self._part.say(end=time.monotonic(), why=why)
        self._part.close()

    def _turn(self) -> bool:
        """Writes what is new; returns whether there have been enough steps."""
        self._follow()
        if time.monotonic() - self._asked > 1.0:
            self._ask(2)
        self._write_readings()
        self._write_links()
        self._seen, lost, lines = self._home.recorder.lines_since(self._seen)
        if lost:
            self._part.say(lost=lost, at=time.monotonic())
        steps = self._steps
        if steps is not None:
            if steps.over:
                return True
            lines = steps.within(lines)
        self._part.write(lines)
        if self._wants_jax is None and loaded() and b'"compiled"' in lines:
            self._begin_jax()
        if self._jax is not None and time.monotonic() > self._jax_until:
            self._end_jax()
        return steps is not None and steps.over

    # Who this is now, and what its clock shows.

    def _follow(self) -> None:
        epoch = self._home.present
        communicator = self._home.communicators.get(0)
        if epoch is None or communicator is None or communicator.epoch == self._epoch:
            return
        self._heartbeat, self._epoch = epoch.heartbeat, communicator.epoch
        rank = epoch.standing.rank
        self._part.head(
            epoch=self._epoch,
            rank=rank,
            size=epoch.standing.size,
            host=host(epoch, rank) or socket.gethostname(),
            at=time.monotonic(),
        )
        self._ask(QUESTIONS)

    def _ask(self, times: int) -> None:
        self._asked = time.monotonic()
        if self._heartbeat is not None:
            self._heartbeat.ask_clock(times)

    def _write_readings(self) -> None:
        if self._heartbeat is None:
            return
        taken = self._heartbeat.take_clocks()
        if taken:
            rank, when, ahead, trip = min(taken, key=lambda reading: reading[3])
            self._part.say(
                clock=rank, epoch=self._epoch, when=when, ahead=ahead, trip=trip
            )

    def _write_links(self) -> None:
        sent, exposed = 0, 0.0
        for communicator in list(self._home.communicators.values()):
            stats = communicator.stats()
            exposed += stats.get("overlap", {}).get("exposed_seconds", 0.0)
            sent += sum(seen.get("sent_bytes", 0) for seen in stats.values())
        if (sent, exposed) != self._sent:
            self._sent = (sent, exposed)
            self._part.say(sent=sent, exposed=exposed, at=time.monotonic())

    # JAX's own trace.

    def _begin_jax(self) -> None:
        self._wants_jax = False
        if not loaded():
            return
        try:
            self._jax = JaxTrace(self._part.path.with_suffix(".jax"))
            self._jax_until = time.monotonic() + JAX_SECONDS
        except Exception as error:  # the program's own trace, for one
            self._part.say(jax_absent=f"{type(error).__name__}: {error}")

    def _end_jax(self) -> None:
        trace, self._jax = self._jax, None
        if trace is None:
            return
        try:
            name, began = trace.end()
            self._part.say(jax=name, began=began)
        except Exception as error:
            self._part.say(jax_absent=f"{type(error).__name__}: {error}")
