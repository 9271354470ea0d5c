"""`ringrun --join HOST:PORT`: an agent that connects to `ringrun --listen` by itself.

The agent proves that it has the job's secret, as a rank does (control/handshake.py),
and sends the name of its host and its slots. From then on it works like any other
agent. Its ranks keep the variables that an engine has set on this node. If the ringrun
of an elastic job is gone, the ranks go on, their output goes to the output of this
process, and the agent looks for a ringrun at the same address. A new ringrun there
takes the ranks over (elastic/takeover.py). The other end is agent_listener.py.
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
from ringjax.control.connecting import SERVER_RANK, connect_to_server, enable_keepalive
from ringjax.control.handshake import HandshakeRequest, Purpose
from ringjax.control.polling import wait_writable
from ringjax.control.sealed_messages import SessionKeys
from ringjax.control.tls import offer_for
from ringjax.errors import AuthenticationError
from ringjax.run.hosts import processes
from ringjax.run.hosts.agent import Agent
from ringjax.run.hosts.channel import Message

_PAUSE = 0.5  # seconds between two attempts, at most
_SAID = 30.0  # seconds between two lines about waiting; the first comes after _SOON
_SOON = 3.0
_STATUS = 10.0  # seconds for ringrun to say how the job ended, once all is done here
_REMEMBERED = 1024  # ranks that have ended


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Whom an agent calls, and as whom.

    Attributes:
        address: where ringrun listens: "host:port".
        secret, job: the job's.
        host, slots: of this machine.
        patience: seconds to look for ringrun the first time.
        silence: seconds without an answer until the connection counts as lost.
        tls: whether the connection is encrypted, as in RINGJAX_TLS.
    """

    address: str
    secret: bytes = field(repr=False)
    job: str
    host: str
    slots: int
    patience: float
    silence: float
    tls: str = "auto"


class JoiningAgent(Agent):
    """An agent on the connection that it has built up."""

    def __init__(self, calling: JoinOptions) -> None:
        hangup = signal.getsignal(signal.SIGHUP)
        super().__init__()
        if hangup == signal.SIG_IGN:  # nohup
            signal.signal(signal.SIGHUP, hangup)
        self._calling = calling
        self._token = secrets.token_hex(8)  # tells this agent from others of its host
        self._patience = 0.0  # to look for another ringrun
        self._welcomed = False  # ever
        self._here = False  # ringrun knows of us on this connection
        self._memory: Message = {}  # what another ringrun will have to know
        self._ended: dict[int, int] = {}  # ranks of here -> their exit codes
        self._seats: dict[int, int] = {}  # all of them -> their local rank
        self._leaving = self._bye = False
        self._found: tuple[socket.socket, SessionKeys, str] | None = None
        self._failure = ""
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._bell, selectors.EVENT_READ, self._answered)
        self._until(calling.patience)
        self._dial(0.0)

    # Finding ringrun.

    def _until(self, patience: float) -> None:
        self._patient, self._deadline = patience, time.monotonic() + patience

    def _dial(self, pause: float, failure: str = "") -> None:
        """A thread looks for it. Nothing is started meanwhile, so forks are safe."""
        self._found, self._failure = None, failure
        self._thread = threading.Thread(
            target=self._look, args=(pause,), name="ringjax-dialling", daemon=True
        )
        self._thread.start()

    def _look(self, pause: float) -> None:
        calling = self._calling
        tls = offer_for(calling.tls)
        who = HandshakeRequest(calling.job, Purpose.AGENT, 0, SERVER_RANK, tls=tls)
        say = time.monotonic() + _SOON
        while True:
            time.sleep(pause)  # nobody is there who could tell when to call again
            pause = min(2 * pause or 0.02, _PAUSE)
            try:
                self._found = connect_to_server(
                    calling.address, calling.secret, who, self._deadline, "ringrun"
                )
                break
            except AuthenticationError as error:
                self._failure = str(error)
                if "secret" in self._failure:
                    self._failure += " (RINGJAX_SECRET, or RINGJAX_SECRET_FILE)"
                # Later it may be a stranger on the port that the right one will take.
                if not self._welcomed:
                    break
            except OSError as error:
                self._failure = f"{error}, for {self._patient:g} s"
            now = time.monotonic()
            if now + pause >= self._deadline:
                break
            if now >= say:
                say = now + _SAID
                left = self._deadline - now
                _note(f"waits up to {left:.0f} s more: {self._failure}")
        os.eventfd_write(self._bell, 1)

    def _answered(self) -> None:
        os.eventfd_read(self._bell)
        self._thread.join()
        if self._found is None:
            self._give_up(self._failure)
        sock, keys, _ = self._found
        enable_keepalive(sock, self._calling.silence)
        descriptor = sock.detach()
        self.connect(descriptor, os.dup(descriptor), keys).send(self._hello())

    def _hello(self) -> Message:
        running = {name: pid for pid, name in self._ids.items()}
        ranks = [
            {"id": name, "pid": running.get(name, 0), "seat": seat}
            | ({"code": self._ended[name]} if name in self._ended else {})
            for name, seat in self._seats.items()
        ]
        return {
            "is": "hello",
            "host": self._calling.host,
            "slots": self._calling.slots,
            "token": self._token,
            "via": self._calling.address.rpartition(":")[0],
            "ranks": ranks,
            "memory": self._memory,
        }

    def _cut(self) -> None:
        """The connection is lost."""
        self._channel, self._here = None, False
        where = self._calling.address
        if self._bye:
            os._exit(1)
        if not self._welcomed:
            self._dial(_PAUSE)
        elif not self._patience:
            self._give_up(f"the ringrun at {where} is gone")
        else:
            count = len(self._ids)
            _note(
                f"the ringrun at {where} is gone: {count} rank{'s' * (count != 1)} "
                f"here go on, and another is looked for, up to {self._patience:g} s"
            )
            self._until(self._patience)
            self._dial(0.0)

    def _give_up(self, why: str) -> NoReturn:
        _note(why)
        self._abandon()

    # What ringrun asks for.

    def _obey(self, message: Message) -> None:
        match message.get("do"):
            case "welcome":
                if not self._welcomed:
                    where = self._calling.address
                    _note(f"joined the job at {where} as host {self._calling.host}")
                if self._memory.get("job", message["job"]) != message["job"]:
                    self._forget()
                self._welcomed = self._here = True
                self._patience = float(message["patience"])
                if self._leaving:
                    self._leave()
            case "refuse":
                self._refused(message["text"], message["again"])
            case "remember":
                self._memory = message["memory"]
            case "status":
                os._exit(message["code"])
            case _:
                super()._obey(message)

    def _forget(self) -> None:
        """Another job has begun meanwhile: ends the ranks of the one before."""
        _note("another job has begun: the ranks of the one before are ended")
        self._pause()
        self._paused.clear()
        for child in self._children.values():
            for descriptor in child.pipes.values():
                os.close(descriptor)
        processes.sweep(limit=1.0)
        self._memory = {}
        for known in (self._children, self._ids, self._ended, self._seats):
            known.clear()

    def _refused(self, why: str, again: bool) -> None:
        """ringrun does not want us, or not yet."""
        assert self._channel is not None
        if not again or time.monotonic() > self._deadline:
            self._give_up(f"refused: {why}")
        if why != self._failure:
            _note(f"not yet: {why}")
        self._channel.close()
        self._channel = None
        self._dial(1.0, why)

    def _start(self, order: Message, env: dict[str, str], task: bytes | None) -> None:
        self._seats[order["id"]] = int(env.get("RINGJAX_LOCAL_RANK", 0))
        super()._start(order, env, task)

    def _say(self, message: Message) -> None:
        if message["is"] == "exited":  # another ringrun hears of it from `_hello`
            self._ended[message["id"]] = message["code"]
            while len(self._ended) > _REMEMBERED:
                oldest = next(iter(self._ended))
                del self._ended[oldest], self._seats[oldest]
        if self._here:
            super()._say(message)

    def _hand_on(self, name: int, stream: str, data: bytes) -> None:
        if self._here:
            super()._hand_on(name, stream, data)
            return
        descriptor = 2 if stream == "stderr" else 1
        with contextlib.suppress(OSError):
            while data:
                wait_writable(descriptor)
                data = data[os.write(descriptor, data) :]

    # How it ends.

    def _asked_to_end(self, number: int) -> None:
        """SIGTERM: the ranks leave at their next commit. Again, or another: at once.

        SIGUSR1 is what Slurm is told to send before (--signal).
        """
        asks = number in (signal.SIGTERM, signal.SIGUSR1)
        if not asks or self._leaving or not self._ids:
            self._goodbye()
            self._abandon(128 + number)
        self._leaving = True
        self._leave()

    def _leave(self) -> None:
        if self._here and self._patience:  # it is elastic: ringrun knows what to do
            self._say({"is": "leaving"})
            return
        for name in self._ids.values():
            self._children[name].signal(signal.SIGTERM, alone=True)

    def _after_turn(self) -> None:
        super()._after_turn()
        if self._leaving and not self._ids and self._drained and self._ending is None:
            self._goodbye()
            self._abandon(128 + signal.SIGTERM)

    def _finish(self, deadline: float) -> None:
        """Says goodbye, and waits for how the job ended."""
        late = time.monotonic() > deadline
        if self._bye and late:
            os._exit(1)
        if not self._bye and (self._drained or late):
            self._bye = True
            self._ending = time.monotonic() + _STATUS
            self._goodbye()


def _note(text: str) -> None:
    stderr.line(f"ringrun --join: {text}")


def join(calling: JoinOptions) -> NoReturn:
    """Serves as an agent of a job until it is over; ends this process as the job ends.

    With 128 + SIGTERM if it was asked to end by that signal, and with 1 if the job was
    not to be found or did not want this host, which is said.
    """
    JoiningAgent(calling).run()
