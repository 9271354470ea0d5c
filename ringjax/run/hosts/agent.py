"""The program on each host that owns its ranks: `python -m ringjax.run.hosts.agent`.

ringrun starts one on its own machine and has one started on every other, over ssh or by
an engine such as Slurm, whose variables the ranks there keep; all of them get
everything (environment with the secret, command, directory) on standard input and
forward output and exit codes on standard output, never anything in argv. One that comes
by itself is in joining_agent.py. An agent whose
standard input closes, or whose parent is gone, kills every process below it and ends:
that is why no rank outlives ringrun, however it dies. Knows no collective, no rank.
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
from typing import TYPE_CHECKING, NoReturn

from ringjax.control import open_files
from ringjax.control.polling import wait_readable
from ringjax.run import environ
from ringjax.run.hosts import processes, profile_files
from ringjax.run.hosts.channel import Channel, Message, standard_streams
from ringjax.run.hosts.telemetry_relay import TelemetryRelay

if TYPE_CHECKING:
    from ringjax.control.sealed_messages import SessionKeys

_CHUNK = 1 << 16
_BACKLOG = 1 << 20  # bytes not yet taken by ringrun before we stop reading the ranks
_NEWS = 1 << 18  # likewise, before we drop what ranks tell of themselves
_GRACE = 1.0  # seconds between SIGTERM and SIGKILL when ringrun is gone


class Agent:
    """One selector loop over the channel, the children's pipes and signals."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._channel: Channel | None = None
        self._children: dict[int, processes.ChildProcess] = {}
        self._tellers = TelemetryRelay(self._selector, self._children, self._told)
        self._ids: dict[int, int] = {}
        self._gifts: socket.socket | None = None
        self._descriptors: deque[int] = deque()  # that ringrun has sent, in its order
        self._paused: list[tuple[int, Callable[[], None]]] = []
        self._ending: float | None = None
        self._watches = self._asked_back = False
        self._began = time.time()
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
        # Slurm and MPI start programs with SIGCHLD blocked.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._signalled)

    def connect(
        self, reader: int, writer: int, keys: SessionKeys | None = None
    ) -> Channel:
        """From now on ringrun is at the other end; `keys` if it is a socket's."""
        channel = Channel(
            self._selector, reader, writer, self._obey, lambda: self._cut(), keys
        )
        self._channel = channel
        return channel

    def run(self) -> NoReturn:
        """Serve until the job is over; never returns."""
        processes.adopt_orphans()
        while True:
            for key, _ in self._selector.select(self._timeout()):
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
            self._resume()
            self._tellers.sweep()
            self._after_turn()

    def _timeout(self) -> float | None:
        if self._ending is not None:
            return max(0.0, min(0.05, self._ending - time.monotonic()))
        return self._tellers.timeout()

    def _after_turn(self) -> None:
        if self._asked_back and not (self._ids or self._watches or self._ending):
            self._ending = time.monotonic() + 0.5
        if self._ending is not None:
            self._finish(self._ending)

    def _say(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.send(message)

    # What ringrun asks for.

    def _obey(self, message: Message) -> None:
        match message.get("do"):
            case "watch":
                self._watch(message["pid"])
                self._accept(message["descriptors"])
            case "spawn":
                self._spawn(message)
            case "signal":
                alone = message.get("alone", False)
                for name in message.get("ids", list(self._children)):
                    if name in self._children:
                        self._children[name].signal(message["signal"], alone=alone)
            case "monitor":
                self._tellers.ask(float(message["every"]))
            case "fetch":
                for piece in profile_files.outgoing(message, self._began):
                    self._say(piece)
                    if self._channel is not None and self._pending > _BACKLOG:
                        self._channel.flush(limit=10.0)
            case "end":
                self._report(processes.sweep(limit=1.0))
                self._ending = time.monotonic() + 0.5

    def _spawn(self, message: Message) -> None:
        payload = message.get("payload")
        task = None if payload is None else base64.b64decode(payload)
        open_files.raise_limit(5 * len(message["children"]))
        with contextlib.suppress(OSError):
            # A directory that only the first host has: stay where ssh put us.
            os.chdir(message["cwd"])
        env = message["env"]
        if message.get("account"):
            env = {**environ.of_account(), **env}
        if message.get("engine"):
            env = {**env, **environ.of_engine()}
        for order in message["children"]:
            self._start(order, {**env, **order["env"]}, task)

    def _start(self, order: Message, env: dict[str, str], task: bytes | None) -> None:
        name = order["id"]
        argv = order["argv"]
        if name >= 0 and (address := self._tellers.open()):
            env = {**env, "RINGJAX_MONITOR": address}
        # Its standard input, or that and its standard output.
        stdin, stdout = (*self._take(order.get("descriptors", 0)), None, None)[:2]
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
            code = 127 if isinstance(error, FileNotFoundError) else 126
            text = f"cannot run {argv[0]!r}: {why_not(argv[0], error)}"
            self._say({"is": "exited", "id": name, "code": code, "text": text})
            return
        child.takes_group = order.get("takes_group", False)
        self._children[name] = child
        self._ids[child.pid] = name
        for stream, descriptor in child.pipes.items():
            self._selector.register(
                descriptor,
                selectors.EVENT_READ,
                lambda n=name, s=stream, d=descriptor: self._forward(n, s, d),
            )
        self._say({"is": "started", "id": name, "pid": child.pid})

    def _accept(self, descriptor: int) -> None:
        """Take descriptors for children from ringrun on this socket, as they come."""
        self._gifts = socket.socket(fileno=descriptor)
        self._gifts.setblocking(False)
        os.set_inheritable(descriptor, False)
        self._selector.register(self._gifts, selectors.EVENT_READ, self._receive)

    def _receive(self) -> None:
        assert self._gifts is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(self._gifts, 1, 2)
        except BlockingIOError:
            return  # `_take` was here before
        if not data:
            self._abandon()
        self._descriptors.extend(descriptors)

    def _take(self, count: int) -> list[int]:
        """The descriptors that ringrun has sent before this order."""
        while len(self._descriptors) < count:
            assert self._gifts is not None
            wait_readable(self._gifts)
            self._receive()
        return [self._descriptors.popleft() for _ in range(count)]

    def _watch(self, parent: int) -> None:
        """End when `parent` dies, even if a fork of it holds our pipe open."""
        self._watches = True
        try:
            descriptor = os.pidfd_open(parent)
        except ProcessLookupError:
            self._abandon()
        except OSError:
            return  # a kernel without pidfd: the pipe alone has to do
        else:
            self._selector.register(descriptor, selectors.EVENT_READ, self._abandon)

    # What the children do.

    def _forward(self, name: int, stream: str, descriptor: int) -> None:
        data = os.read(descriptor, _CHUNK)
        if not data:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            self._children[name].pipes.pop(stream, None)
        self._hand_on(name, stream, data)
        if self._pending > _BACKLOG and self._ending is None:
            self._pause()

    def _hand_on(self, name: int, stream: str, data: bytes) -> None:
        text = base64.b64encode(data).decode()
        self._say({"is": "output", "id": name, "stream": stream, "data": text})

    def _told(self, message: Message) -> None:
        if self._pending < _NEWS:
            self._say(message)

    @property
    def _pending(self) -> int:
        return 0 if self._channel is None else self._channel.pending

    def _pause(self) -> None:
        """Stop reading the ranks: they wait in their own writes, nothing piles up."""
        for child in self._children.values():
            for descriptor in child.pipes.values():
                with contextlib.suppress(KeyError):
                    key = self._selector.unregister(descriptor)
                    self._paused.append((descriptor, key.data))

    def _resume(self) -> None:
        if self._paused and (self._ending or self._pending < _BACKLOG // 2):
            for descriptor, callback in self._paused:
                self._selector.register(descriptor, selectors.EVENT_READ, callback)
            self._paused.clear()

    def _signalled(self) -> None:
        numbers = set(os.read(self._wakeup, 256))
        self._report(processes.reap(self._leaders()))
        for number in numbers:
            if number != signal.SIGCHLD:
                self._asked_to_end(number)

    def _leaders(self) -> set[int]:
        """The children that take what is left of their group with them."""
        return {
            self._children[name].pid
            for name in self._ids.values()
            if self._children[name].takes_group
        }

    def _report(self, ended: list[tuple[int, int]]) -> None:
        for pid, code in ended:
            name = self._ids.pop(pid, None)
            if name is None:
                continue  # an adopted orphan
            process = self._children[name].process
            process.returncode = code  # Popen must not wait for it again
            self._say({"is": "exited", "id": name, "code": code})

    # How it ends.

    def _asked_to_end(self, number: int) -> None:
        """SIGTERM: a batch system wants this host back, and insists on it later.

        The ranks here may use that time; ringrun hears of their end, or of its own.
        """
        if number == signal.SIGTERM:
            self._asked_back = True
            self._say({"is": "asked back"})
            for name in self._ids.values():
                if name >= 0:  # and no client: they carry what is said
                    self._children[name].signal(signal.SIGTERM, alone=True)
        elif number != signal.SIGUSR1:  # for the ranks, if they know what to do with it
            self._abandon()

    def _cut(self) -> None:
        """ringrun is gone."""
        self._abandon()

    def _finish(self, deadline: float) -> None:
        """After `end`: forward what is left in the pipes, say goodbye, exit."""
        if self._drained or time.monotonic() > deadline:
            self._goodbye()
            os._exit(0)

    @property
    def _drained(self) -> bool:
        """Whether the processes have closed their pipes."""
        return not any(child.pipes for child in self._children.values())

    def _goodbye(self) -> None:
        if not self._asked_back:  # ringrun may want something that we do not do
            self._say({"is": "bye"})
        if self._channel is not None:
            self._channel.flush(limit=5.0)

    def _abandon(self, code: int = 1) -> NoReturn:
        """End every process below us, then ourselves."""
        for child in self._children.values():
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        processes.reap()
        while not processes.childless() and time.monotonic() < deadline:
            time.sleep(0.01)
            processes.reap()
        processes.sweep(limit=2.0)
        os._exit(code)


def why_not(program: str, error: Exception) -> str:
    """Why a program cannot be run, and what may have been meant."""
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
    """Entry point."""
    agent = Agent()
    channel = agent.connect(*standard_streams())
    channel.end_greeting()
    channel.send({"is": "here"})
    agent.run()


if __name__ == "__main__":
    if sys.platform != "linux":
        raise SystemExit("ringjax.run.hosts.agent needs Linux")
    main()
