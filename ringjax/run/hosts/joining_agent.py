"""`ringrun --join HOST:PORT`: an agent that connects to `ringrun --listen`.

The agent proves that it has the job's secret, as a rank does (control/handshake.py),
and sends a hello with the name and the slots of its host. Then it works like an agent
that ringrun has started. Its ranks keep the variables that an engine has set on this
host. If the ringrun of an elastic job ends, the ranks continue, and the agent prints
their output and waits for a new ringrun at the old address. The new ringrun takes over
the ranks (elastic/takeover.py). agent_listener.py accepts the agent's connection.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import NoReturn

from ringjax import stderr
from ringjax.config import Config
from ringjax.control.addresses import enable_keepalive
from ringjax.control.connecting import SERVER_RANK, connect_to_server
from ringjax.control.handshake import HandshakeRequest, Purpose
from ringjax.control.polling import wait_writable
from ringjax.control.sealed_messages import SessionKeys
from ringjax.control.tls import offer_for
from ringjax.errors import AuthenticationError
from ringjax.run.hosts import processes
from ringjax.run.hosts.agent import Agent
from ringjax.run.hosts.channel import Message

_MAX_PAUSE = 0.5  # most seconds between two attempts to connect
_FIRST_NOTE = 3.0  # seconds until the user reads that the agent waits for ringrun
_NOTE_INTERVAL = 30.0  # seconds between later lines about the wait
_STATUS_TIMEOUT = 10.0  # seconds to wait until ringrun sends the exit code of the job
_MAX_EXIT_CODES = 1024  # most ended ranks that the hello to the next ringrun reports


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """The address of the ringrun that an agent joins, and the agent's host.

    Attributes:
        address: the address of ringrun, as "host:port".
        secret, job: the secret and the id of the job.
        host: name of this host.
        slots: number of ranks that this host can run.
        config: the settings. `elastic_timeout` limits how many seconds the agent tries
            to connect to the first ringrun.
    """

    address: str
    secret: bytes = field(repr=False)
    job: str
    host: str
    slots: int
    config: Config


class JoiningAgent(Agent):
    """An agent that connects to ringrun by itself."""

    def __init__(self, options: JoinOptions) -> None:
        hangup = signal.getsignal(signal.SIGHUP)
        super().__init__()
        # nohup makes this process ignore SIGHUP, so continue to ignore the signal.
        if hangup == signal.SIG_IGN:
            signal.signal(signal.SIGHUP, hangup)
        self._options = options
        # A random text that distinguishes this agent from other agents on this host.
        self._token = secrets.token_hex(8)
        # How long to wait for another ringrun, as ringrun has sent it; 0 in a static
        # job.
        self._reconnect_timeout = 0.0
        self._welcomed = False  # whether any ringrun has ever accepted this agent
        self._accepted = False  # whether ringrun has accepted the current connection
        # The record that this agent stores for the next ringrun; see takeover.py.
        self._job_state: Message = {}
        # Exit codes of ended ranks of this host, by the rank's process id in ringrun.
        self._exit_codes: dict[int, int] = {}
        # Local ranks of all ranks of this host, by the rank's process id in ringrun.
        self._local_ranks: dict[int, int] = {}
        self._leaving = self._bye_sent = False
        self._connection: tuple[socket.socket, SessionKeys, str] | None = None
        self._failure = ""
        self._connect_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(
            self._connect_event, selectors.EVENT_READ, self._finish_connecting
        )
        self._set_deadline(options.config.elastic_timeout)
        self._start_connecting(0.0)

    # -- connecting --------------------------------------------------------------------

    def _set_deadline(self, timeout: float) -> None:
        self._connect_timeout = timeout
        self._deadline = time.monotonic() + timeout

    def _start_connecting(self, pause: float, failure: str = "") -> None:
        """Connects in a thread, so that the main loop continues to forward output.

        Only ringrun orders this agent to start processes, and no ringrun is connected
        while the thread runs. Therefore no fork can copy a lock that the thread holds.
        """
        self._connection, self._failure = None, failure
        self._thread = threading.Thread(
            target=self._connect_loop,
            args=(pause,),
            name="ringjax-dialling",
            daemon=True,
        )
        self._thread.start()

    def _connect_loop(self, pause: float) -> None:
        options = self._options
        tls = offer_for(options.config.tls)
        introduction = HandshakeRequest(
            options.job, Purpose.AGENT, 0, SERVER_RANK, tls=tls
        )
        next_note = time.monotonic() + _FIRST_NOTE
        while True:
            # Nothing reports when ringrun starts to listen, so try repeatedly.
            time.sleep(pause)
            pause = min(2 * pause or 0.02, _MAX_PAUSE)
            try:
                self._connection = connect_to_server(
                    options.address,
                    options.secret,
                    introduction,
                    self._deadline,
                    "ringrun",
                )
                break
            except AuthenticationError as error:
                self._failure = str(error)
                if "secret" in self._failure:
                    self._failure += " (RINGJAX_SECRET, or RINGJAX_SECRET_FILE)"
                # Before the first welcome, the user has probably given a wrong secret.
                # After it, another program may have occupied the port for a while, so
                # try again.
                if not self._welcomed:
                    break
            except OSError as error:
                self._failure = f"{error}, for {self._connect_timeout:g} s"
            now = time.monotonic()
            if now + pause >= self._deadline:
                break
            if now >= next_note:
                next_note = now + _NOTE_INTERVAL
                left = self._deadline - now
                _note(f"waits up to {left:.0f} s more: {self._failure}")
        os.eventfd_write(self._connect_event, 1)

    def _finish_connecting(self) -> None:
        os.eventfd_read(self._connect_event)
        self._thread.join()
        if self._connection is None:
            self._give_up(self._failure)
        sock, keys, _ = self._connection
        enable_keepalive(sock, self._options.config.failure_timeout)
        descriptor = sock.detach()
        self.connect(descriptor, os.dup(descriptor), keys).send(self._hello())

    def _hello(self) -> Message:
        running = {number: pid for pid, number in self._numbers.items()}
        ranks = [
            {"id": number, "pid": running.get(number, 0), "local_rank": local_rank}
            | ({"code": self._exit_codes[number]} if number in self._exit_codes else {})
            for number, local_rank in self._local_ranks.items()
        ]
        return {
            "is": "hello",
            "host": self._options.host,
            "slots": self._options.slots,
            "token": self._token,
            "via": self._options.address.rpartition(":")[0],
            "ranks": ranks,
            "state": self._job_state,
        }

    def _connection_lost(self) -> None:
        self._channel, self._accepted = None, False
        where = self._options.address
        if self._bye_sent:
            os._exit(1)
        if not self._welcomed:
            self._start_connecting(_MAX_PAUSE)
        elif not self._reconnect_timeout:
            self._give_up(f"the ringrun at {where} is gone")
        else:
            count = len(self._numbers)
            limit = self._reconnect_timeout
            _note(
                f"the ringrun at {where} is gone: {count} rank{'s' * (count != 1)} "
                f"here go on, and another is looked for, up to {limit:g} s"
            )
            self._set_deadline(limit)
            self._start_connecting(0.0)

    def _give_up(self, why: str) -> NoReturn:
        _note(why)
        self._kill_all_and_exit()

    # -- orders from ringrun -----------------------------------------------------------

    def _handle_message(self, message: Message) -> None:
        match message.get("do"):
            case "welcome":
                if not self._welcomed:
                    where = self._options.address
                    _note(f"joined the job at {where} as host {self._options.host}")
                if self._job_state.get("job", message["job"]) != message["job"]:
                    self._end_old_job()
                self._welcomed = self._accepted = True
                self._reconnect_timeout = float(message["reconnect_timeout"])
                if self._leaving:
                    self._leave()
            case "refuse":
                self._refused(message["text"], message["retry"])
            case "save_state":
                self._job_state = message["state"]
            case "status":
                os._exit(message["code"])
            case _:
                super()._handle_message(message)

    def _end_old_job(self) -> None:
        """Ends the ranks of this host, because the new ringrun runs another job."""
        _note("another job has begun: the ranks of the one before are ended")
        self._pause()
        self._paused.clear()
        for child in self._children.values():
            for descriptor in child.pipes.values():
                os.close(descriptor)
        processes.kill_descendants(limit=1.0)
        self._job_state = {}
        for numbers in (
            self._children,
            self._numbers,
            self._exit_codes,
            self._local_ranks,
        ):
            numbers.clear()

    def _refused(self, why: str, again: bool) -> None:
        """Exits, or connects again later if ringrun has allowed another attempt."""
        assert self._channel is not None
        if not again or time.monotonic() > self._deadline:
            self._give_up(f"refused: {why}")
        if why != self._failure:
            _note(f"not yet: {why}")
        self._channel.close()
        self._channel = None
        self._start_connecting(1.0, why)

    def _start_child(
        self, order: Message, env: dict[str, str], task: bytes | None
    ) -> None:
        self._local_ranks[order["id"]] = int(env.get("RINGJAX_LOCAL_RANK", 0))
        super()._start_child(order, env, task)

    def _send(self, message: Message) -> None:
        # Store the exit code, because the hello to the next ringrun reports it.
        if message["is"] == "exited":
            self._exit_codes[message["id"]] = message["code"]
            while len(self._exit_codes) > _MAX_EXIT_CODES:
                oldest = next(iter(self._exit_codes))
                del self._exit_codes[oldest], self._local_ranks[oldest]
        if self._accepted:
            super()._send(message)

    def _send_output(self, number: int, stream: str, data: bytes) -> None:
        if self._accepted:
            super()._send_output(number, stream, data)
            return
        descriptor = 2 if stream == "stderr" else 1
        with contextlib.suppress(OSError):
            while data:
                wait_writable(descriptor)
                data = data[os.write(descriptor, data) :]

    # -- the end of the job ------------------------------------------------------------

    def _handle_end_signal(self, number: int) -> None:
        """Makes the ranks leave at their next commit, or ends the ranks immediately.

        SIGTERM and SIGUSR1 make the ranks leave. (`sbatch --signal` makes Slurm send
        SIGUSR1 some time before SIGTERM.) A second signal, or any other signal, ends
        all ranks immediately.
        """
        asks = number in (signal.SIGTERM, signal.SIGUSR1)
        if not asks or self._leaving or not self._numbers:
            self._send_bye()
            self._kill_all_and_exit(128 + number)
        self._leaving = True
        self._leave()

    def _leave(self) -> None:
        # In an elastic job ringrun makes these ranks and their groups leave.
        if self._accepted and self._reconnect_timeout:
            self._send({"is": "leaving"})
            return
        for number in self._numbers.values():
            self._children[number].signal(signal.SIGTERM, alone=True)

    def _after_events(self) -> None:
        super()._after_events()
        complete = not self._numbers and self._output_complete
        if self._leaving and complete and self._exit_deadline is None:
            self._send_bye()
            self._kill_all_and_exit(128 + signal.SIGTERM)

    def _finish(self, deadline: float) -> None:
        """Sends "bye". ringrun replies with "status", the exit code of the job."""
        late = time.monotonic() > deadline
        if self._bye_sent and late:
            os._exit(1)
        if not self._bye_sent and (self._output_complete or late):
            self._bye_sent = True
            self._exit_deadline = time.monotonic() + _STATUS_TIMEOUT
            self._send_bye()


def _note(text: str) -> None:
    stderr.line(f"ringrun --join: {text}")


def join(options: JoinOptions) -> NoReturn:
    """Runs the agent until the job is over, and exits with the job's exit code.

    The exit code is 128 + SIGTERM if SIGTERM has ended the agent. If no ringrun was
    found or ringrun refused this host, prints the reason, and exits with 1.
    """
    JoiningAgent(options).run()
