"""Runs the coordinator of an elastic job in its own process, and restarts the process.

If the process ends or does not reply, ringrun starts another process. ringrun keeps the
listening sockets, so workers find the new coordinator at the old address. The workers
send what they know of the job to the new coordinator (membership/client.py), and
ringrun sends the list of running workers. The job's secret goes through a pipe, never
through the command line.
"""

from __future__ import annotations

import queue
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

from ringjax import failpoints
from ringjax.config import Config
from ringjax.control import addresses as address
from ringjax.control.tls import offer_for
from ringjax.run.hosts.channel import (
    Channel,
    Message,
    PipeChannel,
    dispatch,
    open_process,
    standard_streams,
)
from ringjax.run.outcome import signal_name
from ringjax.run.workers import take_events

# If the process restarts more often than this within the window, the job ends.
_MAX_RESTARTS = 5
_RESTART_WINDOW = 10.0
_MAX_ENDED = 1024  # most ended workers that ringrun reports to a new coordinator
_END_TIMEOUT = 2.0  # seconds until a process that should end is killed
_MIN_HANG_TIMEOUT = 5.0  # least seconds without a reply until the process is killed
_FIRST_REPLY_TIMEOUT = 60.0  # seconds to the first reply, while the process starts
_PROBE_INTERVAL = 1.0  # seconds between a reply and the next question
_MAX_STEP = 0.5  # the most seconds of silence that one call of `should_ask` adds


class CoordinatorOptions(TypedDict, total=False):
    """The arguments of `Coordinator` that ringrun sends to the process as JSON."""

    np: int
    min_np: int
    max_np: int
    group: int
    start_timeout: float
    elastic_timeout: float
    failure_timeout: float
    tls: str


class LivenessProbe:
    """Decides when to send a probe to a process, and whether the process hangs.

    At most one probe waits for its reply. The process counts as hung after `limit`
    seconds without a reply. Only time in which ringrun itself runs counts, because the
    process cannot reply while the machine is suspended.

    Example:
        >>> probe = LivenessProbe(5.0)
        >>> probe.should_ask(now=0.0), probe.should_ask(now=0.4)
        (True, False)
        >>> probe.record_answer(now=0.5)
        >>> probe.hung
        False
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        # Seconds since the probe that has no reply yet; None if no probe is pending.
        self._silence: float | None = None
        self._last_tick = self._next_question = float("-inf")
        self._allowed = max(limit, _FIRST_REPLY_TIMEOUT)

    def should_ask(self, now: float) -> bool:
        """Updates how long the process is silent. Returns whether to send a probe."""
        passed = min(now - self._last_tick, _MAX_STEP)
        self._last_tick = now
        if self._silence is not None:
            self._silence += passed
            return False
        if now < self._next_question:
            return False
        self._silence = 0.0
        return True

    def record_answer(self, now: float) -> None:
        self._silence, self._next_question = None, now + _PROBE_INTERVAL
        self._allowed = self._limit

    @property
    def hung(self) -> bool:
        """Whether the process has not replied for too long."""
        return self._silence is not None and self._silence >= self._allowed


class CoordinatorProcess:
    """Runs a `Coordinator` in another process, and offers the coordinator's methods.

    Args:
        secret, job: the secret and the id of the job. hosts, port: the addresses to
        listen on, and the port on these addresses. resume: whether the job was begun by
        an earlier ringrun, which has ended. note: prints a line for the user.

    Raises StartupError if the port is taken, or TLS is required and not available.
    """

    def __init__(
        self,
        secret: bytes,
        job: str,
        *,
        hosts: Sequence[str],
        port: int = 0,
        resume: bool = False,
        note: Callable[[str], None],
        **options: Unpack[CoordinatorOptions],
    ) -> None:
        # Raise errors about TLS here, because the other process could not show them.
        offer_for(options.get("tls", "auto"))
        self._note = note
        # An earlier ringrun that is about to end may still use a fixed port, so wait up
        # to 5 s for the port.
        self._listeners = address.listen_on(hosts, port, 5.0 if port else 0.0)
        self._serve_message: Message = {
            "do": "serve",
            "secret": secret.hex(),
            "job": job,
            "listeners": [sock.fileno() for sock in self._listeners],
            "numbers": options,
        }
        self._selector = selectors.EpollSelector()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        # The information that a restarted process must receive.
        self._expected: set[int] = set()  # running workers
        self._unanswered: set[int] = set()  # arguments of `ended` without a reply
        self._ends: dict[int, tuple[str, bool]] = {}  # see `process_ended`
        self._finished: list[int] = []  # workers at the end of their program
        self._job_begun = resume
        silence = options.get("failure_timeout", _MIN_HANG_TIMEOUT)
        self._hang_timeout = max(silence, _MIN_HANG_TIMEOUT)
        self._probe = LivenessProbe(self._hang_timeout)
        self._start_times: list[float] = []
        self._closing = False
        self.addresses = [address.show(*s.getsockname()[:2]) for s in self._listeners]
        self.events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.wakeup = self._selector.fileno()  # readable when the channel has data

    def start(self) -> None:
        """Starts the process, and sends it the list of workers."""
        now = time.monotonic()
        recent = [then for then in self._start_times if now - then < _RESTART_WINDOW]
        self._start_times = [*recent, now]
        self._probe = LivenessProbe(self._hang_timeout)
        self._process, self._channel = open_process(
            [sys.executable, "-P", "-m", "ringjax.run.elastic.coordinator_process"],
            [sock.fileno() for sock in self._listeners],
            self._selector,
            self._handle_event,
            self._process_lost,
        )
        self._channel.send({**self._serve_message, "resume": self._job_begun})
        for worker in self._finished:
            self._call("finished", worker)
        for worker in sorted(self._expected):
            self._call("expected", worker)
        for worker, end in self._ends.items():
            self._call("process_ended", worker, *end)
        for worker in sorted(self._unanswered):
            self._call("ended", worker)

    def _handle_event(self, message: Message) -> None:
        event, *details = message["event"]
        if event == "pulse":
            self._probe.record_answer(time.monotonic())
            return
        if event == "members":
            # JSON has converted the worker ids, which are keys, to strings.
            details[2] = {int(worker): rank for worker, rank in details[2].items()}
            self._job_begun = True
        elif event == "finished":
            self._finished.append(details[0])
        elif event == "ended":
            self._unanswered.discard(details[0])
        self.events.put((event, *details))

    def _process_lost(self) -> None:
        """Starts another process, because the coordinator's process has ended."""
        assert self._process is not None
        code = self._reap()
        if self._closing:
            return
        name = signal_name(-code)
        how = f"killed by {name}" if name else f"exit code {code}"
        if len(self._start_times) > _MAX_RESTARTS:
            self.events.put(("stop", f"the coordinator ends again and again ({how})"))
            return
        self._note(f"the coordinator ended ({how}); it is started again")
        self.start()

    def _reap(self) -> int:
        """Waits for a process that has closed its pipes. Kills it if it is late."""
        assert self._process is not None
        try:
            return self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def clear(self) -> None:
        """Handles all messages that have arrived, so that `wakeup` is not readable."""
        dispatch(self._selector, self._selector.select(0))

    def tick(self, now: float) -> None:
        """Sends a probe to the process, or kills the process if it hangs.

        Call `clear` before this method, because a reply may be in the pipe already.
        """
        if self._probe.should_ask(now):
            self._call("pulse")
        elif self._probe.hung and self._process is not None:
            silence = f"has not answered for {self._hang_timeout:g} s"
            self._note(f"the coordinator {silence}; it is ended")
            self._probe = LivenessProbe(self._hang_timeout)
            self._process.kill()  # then the channel closes and calls `_process_lost`

    def expected(self, worker: int) -> None:
        """Reports to the coordinator that a worker's process was started."""
        self._expected.add(worker)
        self._call("expected", worker)

    def ended(self, worker: int) -> None:
        """Reports a worker's end without an error. The reply is an event "ended"."""
        self._unanswered.add(worker)
        self._call("ended", worker)

    def process_ended(self, worker: int, text: str, heirs: bool = True) -> None:
        """Reports that a worker's process has ended; see `Coordinator`."""
        self._expected.discard(worker)
        self._ends[worker] = text, heirs
        while len(self._ends) > _MAX_ENDED:
            del self._ends[next(iter(self._ends))]
        self._call("process_ended", worker, text, heirs)

    def _call(self, method: str, *arguments: object) -> None:
        """Makes the process call a method of the coordinator."""
        if self._channel is not None:
            self._channel.send({"do": method, "arguments": arguments})

    def close(self) -> None:
        self._closing = True
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._reap()
        for sock in self._listeners:
            sock.close()
        self._selector.close()


class _CoordinatorServer:
    """The loop of the coordinator's process, which serves ringrun over two pipes."""

    def __init__(self, reader: int, writer: int) -> None:
        from ringjax.membership.coordinator import Coordinator

        self._make = Coordinator
        self._coordinator: Coordinator | None = None
        self._selector = selectors.DefaultSelector()
        self._channel = PipeChannel(
            self._selector, reader, writer, self._handle_message, lambda: None
        )

    def run(self) -> None:
        """Serves ringrun until ringrun closes its end of the pipe."""
        while not self._channel.closed:
            dispatch(self._selector, self._selector.select())
        if self._coordinator is not None:
            self._coordinator.close()

    def _handle_message(self, message: Message) -> None:
        if message["do"] == "serve":
            self._serve(message)
        else:
            getattr(self._coordinator, message["do"])(*message["arguments"])

    def _serve(self, message: Message) -> None:
        # Arm failpoints only in the first process, so that they do not end a restarted
        # one.
        if not message["resume"]:
            failpoints.arm(Config.from_env().failpoints, None)
        listeners = [socket.socket(fileno=number) for number in message["listeners"]]
        for sock in listeners:
            sock.set_inheritable(False)
        self._coordinator = self._make(
            bytes.fromhex(message["secret"]),
            message["job"],
            listeners=listeners,
            resume=message["resume"],
            **message["numbers"],
        )
        self._selector.register(
            self._coordinator.wakeup, selectors.EVENT_READ, self._forward
        )
        self._coordinator.start()

    def _forward(self) -> None:
        assert self._coordinator is not None
        for event in take_events(self._coordinator):
            self._channel.send({"event": list(event)})


def main() -> None:
    # A batch system may signal all processes of a job, but the coordinator must run
    # until ringrun closes its pipe.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    _CoordinatorServer(*standard_streams()).run()


if __name__ == "__main__":
    main()
