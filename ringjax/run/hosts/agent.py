"""The agent on each host, which owns the ranks: `python -m ringjax.run.hosts.agent`.

ringrun starts an agent on its own machine. On every other host ssh or an engine such as
Slurm starts the agent, and the ranks there keep the engine's environment variables. An
agent reads the job's secret, the command and the directory from standard input, so that
no secret is on a command line. It writes the output and the exit codes of its ranks to
standard output. joining_agent.py is the agent that connects to ringrun by itself. An
agent that is a relay also runs the clients (ssh) that start the agents on other hosts.

No rank outlives ringrun, even if ringrun is killed: when the standard input of an agent
is closed, or the agent's parent process ends, the agent kills all its descendants and
exits.
"""

from __future__ import annotations

import base64
import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from ringjax.control import open_files
from ringjax.control.polling import wait_readable
from ringjax.run import environ
from ringjax.run.hosts import processes, profile_files
from ringjax.run.hosts.channel import (
    Channel,
    Message,
    PipeChannel,
    dispatch,
    standard_streams,
)
from ringjax.run.hosts.pipe_writer import PipeWriter
from ringjax.run.hosts.telemetry_relay import TelemetryRelay
from ringjax.settings import mpi_library

if TYPE_CHECKING:
    from ringjax.control.sealed_messages import SessionKeys

_CHUNK = 1 << 16
# If more bytes than this are waiting to be sent to ringrun, the agent stops reading the
# output of ranks, or drops their telemetry.
_BACKLOG = 1 << 20
_TELEMETRY_BACKLOG = 1 << 18
_GRACE = 1.0  # seconds between SIGTERM and SIGKILL to ranks after the end of ringrun


class Agent:
    """A selector loop for messages of ringrun, output of children, and signals."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._channel: Channel | None = None
        # Running and ended children, by the id that ringrun has given to each child.
        self._children: dict[int, processes.ChildProcess] = {}
        self._telemetry = TelemetryRelay(
            self._selector, self._children, self._send_telemetry
        )
        # Standard input of clients to which ringrun sends "write" orders, by id.
        self._inputs: dict[int, PipeWriter] = {}
        # process id -> ringrun's id of each running child.
        self._numbers: dict[int, int] = {}
        self._descriptor_socket: socket.socket | None = None
        # File descriptors that ringrun has sent, the oldest first.
        self._descriptors: deque[int] = deque()
        self._paused: list[tuple[int, Callable[[], None]]] = []
        self._exit_deadline: float | None = None
        self._watches_parent = self._end_requested = False
        self._started_at = time.time()
        # Signals wake the selector up through this pipe. A Python signal handler alone
        # would run only after `select` has returned.
        self._wakeup, wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in (
            signal.SIGCHLD,
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
            signal.SIGQUIT,
            signal.SIGUSR1,
        ):
            signal.signal(number, lambda *_: None)
        # Slurm and MPI start programs with the signal SIGCHLD blocked, so unblock all
        # signals.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._selector.register(
            self._wakeup, selectors.EVENT_READ, self._handle_signals
        )

    def connect(
        self, reader: int, writer: int, keys: SessionKeys | None = None
    ) -> Channel:
        """Makes the channel to ringrun: two pipes, or one socket with `keys`."""
        self._channel = PipeChannel(
            self._selector,
            reader,
            writer,
            self._handle_message,
            self._connection_lost,
            keys,
        )
        return self._channel

    def run(self) -> NoReturn:
        """Runs the agent until the job is over, and then ends this process."""
        processes.become_subreaper()
        while True:
            dispatch(self._selector, self._selector.select(self._timeout()))
            self._resume()
            self._telemetry.close_silent()
            self._after_events()

    def _timeout(self) -> float | None:
        if self._exit_deadline is not None:
            return max(0.0, min(0.05, self._exit_deadline - time.monotonic()))
        return self._telemetry.timeout()

    def _after_events(self) -> None:
        idle = not (self._numbers or self._watches_parent or self._exit_deadline)
        if self._end_requested and idle:
            self._exit_deadline = time.monotonic() + 0.5
        if self._exit_deadline is not None:
            self._finish(self._exit_deadline)

    def _send(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.send(message)

    # -- orders from ringrun -----------------------------------------------------------

    def _handle_message(self, message: Message) -> None:
        match message.get("do"):
            case "watch":
                self._watch_parent(message["pid"])
                self._open_descriptor_socket(message["descriptors"])
            case "spawn":
                self._spawn(message)
            case "write":
                self._write(message["id"], base64.b64decode(message["data"]))
            case "signal":
                alone = message.get("alone", False)
                for number in message.get("ids", list(self._children)):
                    if number in self._children:
                        self._children[number].signal(message["signal"], alone=alone)
            case "monitor":
                self._telemetry.set_interval(float(message["every"]))
            case "fetch":
                for piece in profile_files.read_files(message, self._started_at):
                    self._send(piece)
                    if self._channel is not None and self._pending > _BACKLOG:
                        self._channel.flush(limit=10.0)
            case "end":
                self._report_exits(processes.kill_descendants(limit=1.0))
                self._exit_deadline = time.monotonic() + 0.5

    def _spawn(self, message: Message) -> None:
        payload = message.get("payload")
        task = None if payload is None else base64.b64decode(payload)
        open_files.raise_limit(5 * len(message["children"]))
        with contextlib.suppress(OSError):
            os.chdir(message["cwd"])  # this host may not have ringrun's directory
        env = message["env"]
        if env is None:  # a client finds ssh's keys by the variables of this agent
            env = environ.inherited()
        if message.get("account"):
            env = {**environ.account_variables(), **env}
        if message.get("engine"):
            env = {**env, **environ.engine_variables()}
        for order in message["children"]:
            own = {**env, **order["env"]}
            own |= mpi_library.variables(own)
            if not own.get(mpi_library.VARIABLE):  # jaxlib would end the process
                own.pop(mpi_library.VARIABLE, None)
            self._start_child(order, own, task)

    def _start_child(
        self, order: Message, env: dict[str, str], task: bytes | None
    ) -> None:
        number = order["id"]
        argv = order["argv"]
        # Clients and local commands have negative ids, and send no telemetry.
        if number >= 0 and (address := self._telemetry.start_listening()):
            env = {**env, "RINGJAX_MONITOR": address}
        # ringrun may send file descriptors for standard input and standard output.
        given = self._next_descriptors(order.get("descriptors", 0))
        stdin, stdout = (*given, None, None)[:2]
        if order.get("relayed"):
            stdin = self._open_input(number)
        try:
            child = processes.start(
                argv,
                env,
                payload=task if stdin is None else None,
                stdin=stdin,
                stdout=stdout,
                outlives=order.get("outlives", False),
            )
        except (OSError, ValueError, RuntimeError) as error:
            self._close_input(number)
            code = 127 if isinstance(error, FileNotFoundError) else 126
            text = f"cannot run {argv[0]!r}: {explain_start_error(argv[0], error)}"
            self._send({"is": "exited", "id": number, "code": code, "text": text})
            return
        child.kills_group = order.get("kills_group", False)
        self._children[number] = child
        self._numbers[child.pid] = number
        for stream, descriptor in child.pipes.items():
            self._selector.register(
                descriptor,
                selectors.EVENT_READ,
                lambda n=number, s=stream, d=descriptor: self._forward_output(n, s, d),
            )
        self._send({"is": "started", "id": number, "pid": child.pid})

    def _open_input(self, number: int) -> int:
        """Returns the standard input for a client, to which `_write` writes."""
        stdin, writer = os.pipe()

        def report(count: int) -> None:
            self._send({"is": "written", "id": number, "count": count})

        lost = partial(self._close_input, number)
        self._inputs[number] = PipeWriter(self._selector, writer, lost, report)
        return stdin

    def _write(self, number: int, data: bytes) -> None:
        """Writes to a client, unless it has ended. Empty `data` ends its input.

        ringrun waits for the reports of written bytes, so the queue remains short.
        """
        if not data:
            self._close_input(number)
        elif number in self._inputs:
            self._inputs[number].add(data)

    def _close_input(self, number: int) -> None:
        if number in self._inputs:
            self._inputs.pop(number).close()

    def _open_descriptor_socket(self, descriptor: int) -> None:
        """Opens the socket over which ringrun sends file descriptors for children."""
        self._descriptor_socket = socket.socket(fileno=descriptor)
        self._descriptor_socket.setblocking(False)
        os.set_inheritable(descriptor, False)
        self._selector.register(
            self._descriptor_socket, selectors.EVENT_READ, self._receive_descriptors
        )

    def _receive_descriptors(self) -> None:
        assert self._descriptor_socket is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(self._descriptor_socket, 1, 2)
        except BlockingIOError:
            return  # an earlier call has received the descriptors already
        if not data:
            self._kill_all_and_exit()
        self._descriptors.extend(descriptors)

    def _next_descriptors(self, count: int) -> list[int]:
        """Returns descriptors that ringrun has sent for the order of a new child."""
        while len(self._descriptors) < count:
            assert self._descriptor_socket is not None
            wait_readable(self._descriptor_socket)
            self._receive_descriptors()
        return [self._descriptors.popleft() for _ in range(count)]

    def _watch_parent(self, parent: int) -> None:
        """Ends this agent when `parent` dies, even if a fork keeps the pipe open."""
        self._watches_parent = True
        try:
            descriptor = os.pidfd_open(parent)
        except ProcessLookupError:
            self._kill_all_and_exit()
        except OSError:
            return  # the kernel has no pidfd; the agent still ends with its pipe
        else:
            self._selector.register(
                descriptor, selectors.EVENT_READ, self._kill_all_and_exit
            )

    # -- output and exits of children --------------------------------------------------

    def _forward_output(self, number: int, stream: str, descriptor: int) -> None:
        data = os.read(descriptor, _CHUNK)
        if not data:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            self._children[number].pipes.pop(stream, None)
        self._send_output(number, stream, data)
        if self._pending > _BACKLOG and self._exit_deadline is None:
            self._pause()

    def _send_output(self, number: int, stream: str, data: bytes) -> None:
        text = base64.b64encode(data).decode()
        self._send({"is": "output", "id": number, "stream": stream, "data": text})

    def _send_rest(self, number: int) -> None:
        """Sends what an ended client has written, before the report of its exit.

        Otherwise ringrun could conclude that the agent behind the client has never
        answered.
        """
        descriptor = self._children[number].pipes.get("stdout")
        while descriptor is not None and wait_readable(descriptor, 0.0):
            if not (data := os.read(descriptor, _CHUNK)):
                return  # `_forward_output` reads the end of the stream again
            self._send_output(number, "stdout", data)

    def _send_telemetry(self, message: Message) -> None:
        if self._pending < _TELEMETRY_BACKLOG:
            self._send(message)

    @property
    def _pending(self) -> int:
        return 0 if self._channel is None else self._channel.pending

    def _pause(self) -> None:
        """Stops reading the output of ranks, so that a rank with a full pipe blocks."""
        for child in self._children.values():
            for descriptor in child.pipes.values():
                with contextlib.suppress(KeyError):
                    key = self._selector.unregister(descriptor)
                    self._paused.append((descriptor, key.data))

    def _resume(self) -> None:
        if self._paused and (self._exit_deadline or self._pending < _BACKLOG // 2):
            for descriptor, callback in self._paused:
                self._selector.register(descriptor, selectors.EVENT_READ, callback)
            self._paused.clear()

    def _handle_signals(self) -> None:
        numbers = set(os.read(self._wakeup, 256))
        self._report_exits(processes.reap(self._group_leaders()))
        for number in numbers:
            if number != signal.SIGCHLD:
                self._handle_end_signal(number)

    def _group_leaders(self) -> set[int]:
        """Returns the process ids of those children whose failure kills their group."""
        return {
            self._children[number].pid
            for number in self._numbers.values()
            if self._children[number].kills_group
        }

    def _report_exits(self, ended: list[tuple[int, int]]) -> None:
        for pid, code in ended:
            number = self._numbers.pop(pid, None)
            if number is None:
                continue  # the process is an orphan that this agent has adopted
            process = self._children[number].process
            # `reap` has collected this process, so Popen must not wait for it again.
            process.returncode = code
            if number in self._inputs:
                self._send_rest(number)
                self._close_input(number)
            self._send({"is": "exited", "id": number, "code": code})

    # -- the end of the job ------------------------------------------------------------

    def _handle_end_signal(self, number: int) -> None:
        """Handles any signal to this agent except SIGCHLD.

        A batch system sends SIGTERM when it needs the host, and SIGKILL some seconds
        later. The agent forwards SIGTERM to its ranks and continues, so that the ranks
        can use these seconds. Clients receive no SIGTERM, because they still carry
        messages of other hosts. SIGUSR1 is meant for ranks and has no effect here.
        """
        if number == signal.SIGTERM:
            self._end_requested = True
            self._send({"is": "end requested"})
            for child in self._numbers.values():
                if child >= 0:
                    self._children[child].signal(signal.SIGTERM, alone=True)
        elif number != signal.SIGUSR1:
            self._kill_all_and_exit()

    def _connection_lost(self) -> None:
        self._kill_all_and_exit()

    def _finish(self, deadline: float) -> None:
        """Exits when all output has been forwarded, or at the deadline."""
        if self._output_complete or time.monotonic() > deadline:
            self._send_bye()
            os._exit(0)

    @property
    def _output_complete(self) -> bool:
        return not any(child.pipes for child in self._children.values())

    def _send_bye(self) -> None:
        # After "bye" ringrun does not count the processes of this agent as lost. After
        # SIGTERM the agent sends no "bye", because ringrun may have sent an order to
        # start a process, which the agent will not start.
        if not self._end_requested:
            self._send({"is": "bye"})
        if self._channel is not None:
            self._channel.flush(limit=5.0)

    def _kill_all_and_exit(self, code: int = 1) -> NoReturn:
        for number in list(self._inputs):
            self._close_input(number)  # the agents of other hosts end, too
        for child in self._children.values():
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        processes.reap()
        while not processes.has_no_children() and time.monotonic() < deadline:
            time.sleep(0.01)
            processes.reap()
        processes.kill_descendants(limit=2.0)
        os._exit(code)


def explain_start_error(program: str, error: Exception) -> str:
    """Returns the reason why a program cannot be run, with a hint for the user."""
    reason = getattr(error, "strerror", None) or str(error)
    if not os.path.isfile(program):
        return reason
    if isinstance(error, FileNotFoundError) and "/" in program:
        first = b""
        with contextlib.suppress(OSError), open(program, "rb") as file:
            first = file.readline(200).removesuffix(b"\n")
        if first.startswith(b"#!"):
            name = first[2:].decode(errors="replace")
            windows = " (lines end as on Windows)" if first.endswith(b"\r") else ""
            return f"there is no interpreter {name!r}{windows}"
    return f"{reason}; is it python {program}?" if program.endswith(".py") else reason


def main() -> NoReturn:
    agent = Agent()
    channel = agent.connect(*standard_streams())
    channel.end_greeting()
    channel.send({"is": "here"})
    agent.run()


if __name__ == "__main__":
    if sys.platform != "linux":
        raise SystemExit("ringjax.run.hosts.agent needs Linux")
    main()
