"""Runs the coordinator of an elastic job in a process of its own, and restarts it.

A coordinator that does not reply any more is killed and restarted, too. ringrun keeps
the listening sockets, so workers find the next coordinator at the same address. Workers
send the state of the job to this coordinator (membership/client.py), and ringrun sends
the list of running workers. The secret goes through a pipe, never into argv.

`python -m ringjax.run.elastic.coordinator_process` is the program of the process.
"""

from __future__ import annotations

import contextlib
import os
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
from ringjax.run import environ
from ringjax.run.elastic.liveness import LivenessProbe
from ringjax.run.hosts.channel import Channel, Message, dispatch, standard_streams
from ringjax.run.workers import take_events

# More restarts than this within the window end the job.
_MAX_RESTARTS = 5
_RESTART_WINDOW = 10.0
_MAX_ENDED = 1024  # most ended workers that are reported to a new coordinator
_END_TIMEOUT = 2.0  # seconds until the process is killed, if it does not end
_MIN_HANG_TIMEOUT = 5.0  # least seconds without a reply until the process is killed


class CoordinatorOptions(TypedDict, total=False):
    """Arguments of `Coordinator` that its process gets as JSON."""

    np: int
    min_np: int
    max_np: int
    group: int
    start_timeout: float
    elastic_timeout: float
    failure_timeout: float
    tls: str


class CoordinatorProcess:
    """Runs a `Coordinator` in another process, and has the same methods.

    Args:
        secret: the job's secret.
        job: the job's id.
        hosts, port: the addresses to listen on, and the port there.
        resume: whether an earlier ringrun, which has ended, began the job.
        note: shows a line when the process was lost.
        options: the other arguments of `Coordinator`.

    Raises:
        StartupError: it is not possible to listen there, or to encrypt as required.
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
        offer_for(
            options.get("tls", "auto")
        )  # errors in the options must occur before the process starts
        self._note = note
        # A fixed port may still belong to an earlier ringrun that is about to end, so
        # wait.
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
        # State for the next process: workers that run, workers that have ended without
        # an error and wait for a reply, ends, and workers that have finished.
        self._expected: set[int] = set()
        self._unanswered: set[int] = set()
        self._end_messages: dict[int, Message] = {}
        self._finished: list[int] = []
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
        """Starts the process, and sends it the state of the workers."""
        now = time.monotonic()
        recent = [then for then in self._start_times if now - then < _RESTART_WINDOW]
        self._start_times = [*recent, now]
        self._probe = LivenessProbe(self._hang_timeout)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ringjax.run.elastic.coordinator_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environ.inherited(), "PYTHONPATH": environ.agent_path()},
            pass_fds=[sock.fileno() for sock in self._listeners],
            start_new_session=True,  # only ringrun gets Ctrl-C from the terminal
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._channel = Channel(
            self._selector,
            os.dup(self._process.stdout.fileno()),
            os.dup(self._process.stdin.fileno()),
            self._handle_event,
            self._process_lost,
        )
        self._process.stdin.close()
        self._process.stdout.close()
        self._channel.send({**self._serve_message, "resume": self._job_begun})
        for worker in self._finished:
            self._channel.send({"do": "finished", "worker": worker})
        for worker in sorted(self._expected):
            self._channel.send({"do": "expected", "worker": worker})
        for lost in self._end_messages.values():
            self._channel.send(lost)
        for worker in sorted(self._unanswered):
            self._channel.send({"do": "ended", "worker": worker})

    def _handle_event(self, message: Message) -> None:
        event, *details = message["event"]
        if event == "pulse":
            self._probe.record_answer(time.monotonic())
            return
        if event == "members":
            # JSON has made texts of the worker numbers.
            details[2] = {int(worker): rank for worker, rank in details[2].items()}
            self._job_begun = True
        elif event == "finished":
            self._finished.append(details[0])
        elif event == "ended":
            self._unanswered.discard(details[0])
        self.events.put((event, *details))

    def _process_lost(self) -> None:
        """Starts another process, because the process has ended."""
        assert self._process is not None
        code = self._reap()
        if self._closing:
            return
        how = f"exit code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = f"killed by signal {-code} ({signal.Signals(-code).name})"
        if len(self._start_times) > _MAX_RESTARTS:
            self.events.put(("stop", f"the coordinator ends again and again ({how})"))
            return
        self._note(f"the coordinator ended ({how}); it is started again")
        self.start()

    def _reap(self) -> int:
        """Waits for the process, which has closed its pipes or is about to end."""
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
        """Probes the process, and kills the process if it does not reply.

        Call `clear` before, because a reply may be waiting in the pipe.
        """
        if self._probe.should_ask(now):
            self._send({"do": "pulse"})
        elif self._probe.hung and self._process is not None:
            silence = f"has not answered for {self._hang_timeout:g} s"
            self._note(f"the coordinator {silence}; it is ended")
            self._probe = LivenessProbe(self._hang_timeout)
            self._process.kill()  # the end of its pipe calls `_process_lost`

    def expected(self, worker: int) -> None:
        """Reports that a worker's process was started."""
        self._expected.add(worker)
        self._send({"do": "expected", "worker": worker})

    def ended(self, worker: int) -> None:
        """Reports an end without an error. The reply is an "ended" event."""
        self._unanswered.add(worker)
        self._send({"do": "ended", "worker": worker})

    def process_ended(self, worker: int, text: str, heirs: bool = True) -> None:
        """Reports that a worker's process has ended; see `Coordinator`."""
        self._expected.discard(worker)
        lost: Message = {"do": "lost", "worker": worker, "text": text}
        lost["heirs"] = heirs
        self._end_messages[worker] = lost
        while len(self._end_messages) > _MAX_ENDED:
            del self._end_messages[next(iter(self._end_messages))]
        self._send(lost)

    def _send(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.send(message)

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
    """The server in the process: a loop over the pipes and the coordinator's events."""

    def __init__(self, reader: int, writer: int) -> None:
        from ringjax.membership.coordinator import Coordinator

        self._make = Coordinator
        self._coordinator: Coordinator | None = None
        self._selector = selectors.DefaultSelector()
        self._channel = Channel(
            self._selector, reader, writer, self._handle_message, lambda: None
        )

    def run(self) -> None:
        """Serves until ringrun closes the pipe, or ends."""
        while not self._channel.closed:
            dispatch(self._selector, self._selector.select())
        if self._coordinator is not None:
            self._coordinator.close()

    def _handle_message(self, message: Message) -> None:
        coordinator = self._coordinator
        match message.get("do"):
            case "serve":
                self._serve(message)
            case "expected" if coordinator is not None:
                coordinator.expected(message["worker"])
            case "ended" if coordinator is not None:
                coordinator.ended(message["worker"])
            case "finished" if coordinator is not None:
                coordinator.finished(message["worker"])
            case "pulse" if coordinator is not None:
                coordinator.pulse()
            case "lost" if coordinator is not None:
                coordinator.process_ended(
                    message["worker"], message["text"], message["heirs"]
                )

    def _serve(self, message: Message) -> None:
        # A failpoint ends only the first process; else every restart would end, too.
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
    # A batch system may signal all processes of a job. This process ends with ringrun.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    _CoordinatorServer(*standard_streams()).run()


if __name__ == "__main__":
    main()
