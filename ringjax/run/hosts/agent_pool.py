"""The agents of a job, one on each host: starts them, sends orders, receives reports.

The agent on this machine (the guardian) owns the ranks here, the clients (ssh, srun) of
the other hosts, and short commands such as a discovery script. Behind each client is
the agent that owns the ranks of that host. If the guardian is killed, the clients go
on, and the next order for this machine starts another guardian. This module does not
decide anything: each event becomes a call of the `ProcessObserver`.
"""

from __future__ import annotations

import array
import base64
import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from ringjax.run import environ, keyboard
from ringjax.run.console import Console
from ringjax.run.hosts import name_lookup, processes
from ringjax.run.hosts.agent_handle import AgentHandle
from ringjax.run.hosts.channel import Channel, Message
from ringjax.run.hosts.job_spec import JobSpec, agent_command, client_command
from ringjax.run.hosts.local_commands import LocalCommands
from ringjax.run.hosts.profile_files import FileReceiver
from ringjax.run.hosts.slots import is_local

_SOON = 10.0  # seconds without an answer of a host until that is said
_SHELL = "a login script there may wait for something, or replace the shell"


class ProcessObserver(Protocol):
    """What a job wants to know of its processes; `name` is its number for one."""

    def started(self, name: int, pid: int) -> None:
        """It runs."""

    def wrote(self, name: int, stream: str, data: bytes) -> None:
        """It has written something; no data: the stream has ended."""

    def exited(self, name: int, code: int, text: str) -> None:
        """It has ended; `text` if there is more to say than its exit code."""

    def host_lost(self, names: Sequence[int], text: str) -> None:
        """The processes of this name went with their host."""


class AgentPool:
    """Starts agents and talks to them; `turn` is the job's one loop."""

    def __init__(
        self, spec: JobSpec, console: Console, observer: ProcessObserver
    ) -> None:
        self._spec = spec
        self._console = console
        self._observer = observer
        self.selector = selectors.DefaultSelector()
        self._guardian: subprocess.Popen[bytes] | None = None
        self._descriptors: socket.socket | None = None
        self._local = AgentHandle("localhost", 0)
        self._remote: dict[str, AgentHandle] = {}
        self._own: dict[str, bool] = {}  # host -> whether it is this machine
        self._clients: dict[int, AgentHandle] = {}  # by the name of their client
        self._errands = LocalCommands()
        self._incoming: FileReceiver | None = None
        self._names = 0  # of clients and errands: they count downwards
        self._every = 0.0
        # Takes what a rank tells of itself: its number, a line.
        self.on_told: Callable[[int, str], None] = lambda name, text: None

    # Agents.

    def start(self) -> None:
        """Start the agent on this machine, or another one when it was killed."""
        if self._guardian is not None and self._descriptors is not None:
            self._guardian.kill()
            self._guardian.wait()
            self._descriptors.close()
            self._local = AgentHandle("localhost", 0)
        ours, theirs = socket.socketpair()
        self._descriptors = ours
        with theirs:
            self._guardian = subprocess.Popen(
                agent_command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**environ.inherited(), "PYTHONPATH": environ.agent_path()},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C on the terminal is for ringrun alone
            )
            assert self._guardian.stdin is not None
            assert self._guardian.stdout is not None
            self._local.channel = self._open(
                self._local,
                os.dup(self._guardian.stdout.fileno()),
                os.dup(self._guardian.stdin.fileno()),
            )
            self._guardian.stdin.close()
            self._guardian.stdout.close()
            watch = {"pid": os.getpid(), "descriptors": theirs.fileno()}
            self._tell(self._local, {"do": "watch", **watch})
            self._tell(self._local, {"do": "monitor", "every": self._every})

    def is_local(self, host: str) -> bool:
        """Whether a host is this machine; asks the resolver once for each."""
        if self.has_come(host):
            return False
        if host not in self._own:
            self._own[host] = is_local(host)
        return self._own[host]

    def remote(self, hosts: Iterable[str]) -> list[str]:
        """The hosts of these that are not this machine."""
        hosts = list(hosts)
        if len(hosts) > 1:  # at the same time
            name_lookup.ask(host.rpartition("@")[2] for host in hosts)
        return [host for host in hosts if not self.is_local(host)]

    @property
    def asked_back(self) -> str:
        """Why the batch system seems to want all its hosts back; empty if not so."""
        agents = self._remote.values()
        ours = self._spec.allocation is not None and bool(agents)
        back = ours and all(agent.asked_back for agent in agents)
        return "SIGTERM on the other hosts" if back else ""

    def _agent(self, host: str) -> AgentHandle:
        """The agent on a host; started if there is none, or none any more."""
        if self.is_local(host):
            return self._here()
        agent = self._remote.get(host)
        if agent is None or (agent.done and not agent.rendezvous):
            agent = self._remote[host] = self._connect(host)
        return agent

    def _here(self) -> AgentHandle:
        """The agent on this machine."""
        if self._local.done:
            self.start()
        return self._local

    def _connect(self, host: str) -> AgentHandle:
        here = self._here()
        self._names -= 1
        argv, env, by_engine = client_command(host, self._spec)
        client = os.path.basename(argv[0])
        agent = AgentHandle(host, self._names, client, by_engine)
        self._clients[agent.number] = agent
        self._console.labels[agent.number] = host
        stdin, ours = os.pipe()
        mine, stdout = os.pipe()
        agent.channel = self._open(agent, mine, ours)
        self._give(stdin, stdout)
        order = {
            "id": agent.number,
            "argv": argv,
            "env": {},
            "descriptors": 2,
            "outlives": True,
        }
        self._order(here, [order], env, None)
        self._tell(agent, {"do": "monitor", "every": self._every})
        return agent

    def take(
        self, host: str, channel: Channel, via: str, names: set[int]
    ) -> AgentHandle:
        """An agent that has come by itself, and has processes of these names.

        `via`: where its ranks find the job, from there.
        """
        agent = AgentHandle(host, 0, "", True, via, channel, names=names)
        self._remote[host] = agent
        self._tell(agent, {"do": "monitor", "every": self._every})
        return agent

    def give_input(self) -> None:
        """Before an order here with one descriptor: it reads what ringrun is given."""
        self._give(keyboard.connect())

    def _give(self, *descriptors: int) -> None:
        """Sends descriptors to the agent on this machine, and closes them here."""
        try:
            assert self._descriptors is not None
            with contextlib.suppress(OSError):  # its end is noticed elsewhere
                rights = (
                    socket.SOL_SOCKET,
                    socket.SCM_RIGHTS,
                    array.array("i", descriptors),
                )
                self._descriptors.sendmsg([b"+"], [rights])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _open(self, agent: AgentHandle, reader: int, writer: int) -> Channel:
        return Channel(
            self.selector,
            reader,
            writer,
            lambda message: self.heard(agent, message),
            lambda: self._closed(agent),
        )

    # What is asked of them.

    def spawn(
        self,
        host: str,
        orders: Sequence[Message],
        env: Mapping[str, str],
        payload: bytes | None = None,
    ) -> None:
        """Start processes on a host: orders with `id`, `argv` and `env`."""
        agent = self._agent(host)
        agent.names.update(order["id"] for order in orders)
        if agent is not self._local:
            env, kept = environ.for_host(env, self._spec.handed_on)
            via = {"RINGJAX_RENDEZVOUS": agent.rendezvous} if agent.rendezvous else {}
            orders = [
                {**order, "env": {**kept, **order["env"], **via}} for order in orders
            ]
        self._order(agent, orders, env, payload)
        if agent.ended and agent.rendezvous:  # it has just gone
            self._lost_names(agent, "lost its host")

    def errand(self, argv: Sequence[str], done: Callable[[int, str, str], None]) -> int:
        """Run a command here; `done` gets its exit code, output and error output.

        Returns:
            Its name, for `signal`.
        """
        self._names -= 1
        self._errands.add(self._names, done)
        order = {"id": self._names, "argv": list(argv), "env": {}}
        self._order(self._here(), [order], environ.inherited(), None)
        return self._names

    def _order(
        self,
        agent: AgentHandle,
        orders: Sequence[Message],
        env: Mapping[str, str],
        payload: bytes | None,
    ) -> None:
        try:
            folder = os.getcwd()
        except FileNotFoundError:
            raise FileNotFoundError("the current folder has been deleted") from None
        message: Message = {
            "do": "spawn",
            "cwd": folder,
            "env": dict(env),
            "engine": agent.by_engine,
            "account": agent is not self._local,
            "children": list(orders),
        }
        if payload is not None:
            message["payload"] = base64.b64encode(payload).decode()
        self._tell(agent, message)

    def signal(
        self, number: int, names: Sequence[int] | None = None, *, alone: bool = False
    ) -> None:
        """Signal the groups of these processes, or of all; or they `alone`."""
        message: Message = {"do": "signal", "signal": int(number), "alone": alone}
        for agent in (self._local, *self._remote.values()):
            # Never the clients: what they still have to carry would be lost, and
            # their agents would believe that we are gone.
            known = set(agent.names)
            if agent is self._local:
                known |= self._errands.names()
            if ids := sorted(known if names is None else known.intersection(names)):
                self._tell(agent, {**message, "ids": ids})

    def monitor(self, every: float) -> None:
        """Ranks tell how they are, each so many seconds; 0: no more."""
        self._every = every
        for agent in (self._local, *self._remote.values()):
            self._tell(agent, {"do": "monitor", "every": every})

    def has_come(self, host: str) -> bool:
        """Whether the agent of a host has come by itself."""
        return host in self._remote and bool(self._remote[host].rendezvous)

    def remember(self, memory: Message) -> None:
        """Agents that came by themselves keep this for the next ringrun."""
        for agent in self._remote.values():
            if agent.rendezvous:
                self._tell(agent, {"do": "remember", "memory": memory})

    def _tell(self, agent: AgentHandle, message: Message) -> None:
        if agent.channel is not None:
            agent.channel.send(message)

    # What they report.

    def turn(self, timeout: float, first: Callable[[], None] | None = None) -> bool:
        """Wait for something and handle it, after `first`; False if nothing came."""
        events = self.selector.select(timeout)
        self._look_for_silence(time.monotonic())
        if first is not None:
            first()
        for key, _ in events:
            if self.selector.get_map().get(key.fd) is key:
                key.data()
        return bool(events)

    def _look_for_silence(self, now: float) -> None:
        """Gives up hosts whose agents do not answer within the start timeout."""
        for agent in self._remote.values():
            silence, limit = agent.silence(now), self._spec.start_timeout
            why = f"no answer over {agent.client} in"
            if silence >= limit:
                order = {"do": "signal", "signal": int(signal.SIGKILL)}
                self._tell(self._local, {**order, "ids": [agent.number]})
                self.lose(agent, f"{why} {limit:g} s; {_SHELL}")
            elif silence >= _SOON and not agent.noted:
                agent.noted = True
                self._console.note(f"{agent.host}: {why} {_SOON:g} s; {_SHELL}")

    def heard(self, agent: AgentHandle, message: Message) -> None:
        """An agent has said something."""
        agent.answers = True
        name = message.get("id", 0)
        match message.get("is"):
            case "output":
                stream, data = message["stream"], base64.b64decode(message["data"])
                if not self._errands.wrote(name, stream, data):
                    self._observer.wrote(name, stream, data)
            case "started":
                agent.pids[name] = message["pid"]
                if name >= 0:
                    self._observer.started(name, message["pid"])
            case "exited":
                agent.pids.pop(name, None)
                self._exited(agent, name, message["code"], message.get("text", ""))
            case "told":
                self.on_told(name, message["text"])
            case "asked back":
                agent.asked_back = True
            case "file" | "files" if self._incoming is not None:
                self._incoming.take(message)
            case "bye":
                agent.ended = True

    def _exited(self, agent: AgentHandle, name: int, code: int, text: str) -> None:
        agent.names.discard(name)
        if self._errands.exited(name, code, text):
            return
        if name >= 0:
            self._observer.exited(name, code, text)
        elif not self._clients[name].ended:
            client = self._clients[name]
            why = f": {text}" if text else ""
            self.lose(client, f"lost its host, {client.client} ended ({code}){why}")

    def lose(self, agent: AgentHandle, text: str) -> None:
        """The connection of an agent without a client of ours has ended."""
        agent.ended = True
        self._lost_names(agent, text)

    def _closed(self, agent: AgentHandle) -> None:
        if agent.ended:
            return
        if agent is self._local:
            agent.ended = True
            self._guardian_died()
        elif agent.orphan is not None:
            self.lose(agent, "lost its host")
        # Else the exit of its client follows, and says more.

    def _guardian_died(self) -> None:
        pids = dict(self._local.pids)
        for client in self._clients.values():
            if not client.ended:
                client.orphan = pids.pop(client.number, 0)
                if client.done:
                    self.lose(client, "lost its host")
        text = "its agent on this host died"
        self._lost_names(self._local, text)
        for pid in pids.values():  # its children got SIGKILL, theirs may live
            processes.kill_group(pid)
        self._errands.fail(text)

    def _lost_names(self, agent: AgentHandle, text: str) -> None:
        names = sorted(agent.names)
        agent.names.clear()
        agent.pids.clear()
        if names:
            self._observer.host_lost(names, text)

    # The end.

    def let_go(self) -> None:
        """Agents that have come by themselves go on, and look for another ringrun."""
        for host, agent in list(self._remote.items()):
            if agent.rendezvous:
                del self._remote[host]
                if agent.channel is not None:
                    agent.channel.flush(1.0)
                    agent.channel.close()

    def end(self, limit: float) -> None:
        """Have every agent kill what is left, and read the last output."""
        if folder := self._spec.env.get("RINGJAX_PROFILE"):
            self._incoming = FileReceiver(folder)
            agents = list(self._remote.values())
            self._incoming.fetch(agents, self._tell, self.turn, self._console.note)
        remote = list(self._remote.values())
        for agents in (remote, [self._local]):  # the local one holds the clients
            deadline = time.monotonic() + limit
            for agent in agents:
                self._tell(agent, {"do": "end"})
            while time.monotonic() < deadline and not all(
                agent.done for agent in agents
            ):
                for key, _ in self.selector.select(0.05):
                    if self.selector.get_map().get(key.fd) is key:
                        key.data()
            for agent in agents:
                if agent.orphan and not agent.done:
                    processes.kill_group(agent.orphan)
                if agent.channel is not None and not agent.rendezvous:
                    agent.channel.close()

    def close(self, limit: float, code: int = 1) -> None:
        """Wait for the agent on this machine, and forget everything.

        Agents that came by themselves end with `code`.
        """
        came = [agent for agent in self._remote.values() if agent.rendezvous]
        for agent in came:
            self._tell(agent, {"do": "status", "code": code})
        deadline = time.monotonic() + limit
        for agent in came:
            if agent.channel is not None:
                agent.channel.flush(max(0.0, deadline - time.monotonic()))
                agent.channel.close()
        if self._descriptors is not None:
            self._descriptors.close()
        if self._guardian is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guardian.wait(timeout=limit)
            # If it is still at work it ends by itself; it is not ours to wait for.
            self._guardian.returncode = self._guardian.returncode or 0
        self.selector.close()
