"""Starts an agent on each host of a job, sends orders to agents, and reads messages.

The agent on this machine (the guardian) owns the ranks on this machine, the clients
(ssh, srun) that start the agents on other hosts, and short commands such as a discovery
script. If the guardian is killed, its clients continue, and the next order for this
machine starts another guardian. This module makes no decisions: it calls a method of
the `ProcessObserver` for each event. job_spec.py makes the commands of clients.

In a static job with many hosts some agents on other hosts are relays: they run the
clients for further hosts (relays.py). A relay that is lost takes these hosts along.
Therefore elastic jobs have no relays; a static job ends at its first loss anyway.
Hosts of an allocation and of --agent-command have no relays either, because srun, qrsh
and a user's command may need the environment of ringrun and its machine.
"""

from __future__ import annotations

import array
import base64
import contextlib
import math
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Protocol

from ringjax.run import environ
from ringjax.run.console import Console, pipe_standard_input
from ringjax.run.hosts import name_lookup, processes
from ringjax.run.hosts.agent_handle import AgentHandle
from ringjax.run.hosts.channel import (
    Channel,
    Message,
    PipeChannel,
    dispatch,
    open_process,
)
from ringjax.run.hosts.job_spec import (
    JobSpec,
    agent_command,
    client_command,
    is_by_engine,
)
from ringjax.run.hosts.local_commands import LocalCommands
from ringjax.run.hosts.profile_files import FileReceiver
from ringjax.run.hosts.relayed_channel import RelayedChannel
from ringjax.run.hosts.relays import assign_relays
from ringjax.run.hosts.slots import is_local

_NOTE_SILENCE_AFTER = 10.0  # seconds until the user reads that a host is silent
_SHELL = "a login script there may wait for something, or replace the shell"


class ProcessObserver(Protocol):
    """Receives the events of a job's processes, which are identified by ids."""

    def started(self, number: int, pid: int) -> None: ...

    def wrote(self, number: int, stream: str, data: bytes) -> None:
        """Handles output of a process. Empty `data` marks the end of the stream."""

    def exited(self, number: int, code: int, text: str) -> None:
        """Handles the end of a process. `text` may explain the exit code."""

    def host_lost(self, numbers: Sequence[int], text: str) -> None:
        """Handles the loss of a host, whose processes had the ids `numbers`."""


class AgentPool:
    """The agents of one job. `poll` exchanges messages with the agents.

    The job chooses the ids of its processes, from 0 on. This class chooses negative ids
    for clients and local commands, because an agent runs these processes, too.
    """

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
        self._remote: dict[str, AgentHandle] = {}  # agents on other hosts, by host
        self._clients: dict[int, AgentHandle] = {}  # agents by client number
        # Channels through relays, open and closed, by client number.
        self._relayed: dict[int, RelayedChannel] = {}
        self._relay_failed = False  # whether the user knows that a relay has failed
        self._commands = LocalCommands()
        self._receiver: FileReceiver | None = None
        self._last_number = 0  # the latest number of a client or local command
        self._telemetry_interval = 0.0
        # Called with the id of a rank's process and with a line of telemetry from the
        # rank.
        self.on_sample: Callable[[int, str], None] = lambda number, text: None

    # -- agents ------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the agent on this machine, or replaces an agent that was killed."""
        if self._guardian is not None and self._descriptors is not None:
            self._guardian.kill()
            self._guardian.wait()
            self._descriptors.close()
            self._local = AgentHandle("localhost", 0)
        ours, theirs = socket.socketpair()
        self._descriptors = ours
        with theirs:
            self._guardian, self._local.channel = open_process(
                agent_command(),
                [theirs.fileno()],
                self.selector,
                *self._callbacks(self._local),
            )
            watch = {"pid": os.getpid(), "descriptors": theirs.fileno()}
            self._local.send({"do": "watch", **watch})
            self._local.send(self._monitor_order())

    def is_local(self, host: str) -> bool:
        return not self.has_joined(host) and is_local(host)

    def remote_hosts(self, hosts: Iterable[str]) -> list[str]:
        hosts = list(hosts)
        if len(hosts) > 1:  # look up all names at the same time
            name_lookup.start(host.rpartition("@")[2] for host in hosts)
        return [host for host in hosts if not self.is_local(host)]

    @property
    def end_requested(self) -> str:
        """Why all ranks must leave, if the agents of all other hosts got SIGTERM."""
        agents = self._remote.values()
        ours = self._spec.allocation is not None and bool(agents)
        back = ours and all(agent.end_requested for agent in agents)
        return "SIGTERM on the other hosts" if back else ""

    def _agent_for(self, host: str) -> AgentHandle:
        """Returns the agent on a host. Starts an agent if the host has none."""
        if self.is_local(host):
            return self._local_agent()
        agent = self._remote.get(host)
        if agent is None or (agent.closed and not agent.rendezvous):
            agent = self._remote[host] = self._connect(host)
        return agent

    def _local_agent(self) -> AgentHandle:
        if self._local.closed:
            self.start()
        return self._local

    @cached_property
    def _relays(self) -> Mapping[str, str]:
        """The hosts of a static job that have a relay, and the host of this relay."""
        named = dict.fromkeys(slot.host for slot in self._spec.slots)
        remote = self.remote_hosts(named)
        return assign_relays([h for h in remote if not is_by_engine(h, self._spec)])

    def _connect(self, host: str) -> AgentHandle:
        agent = AgentHandle(host, 0, by_engine=is_by_engine(host, self._spec))
        if relay := self._relays.get(host):
            agent.relay, agent.started_at = self._agent_for(relay), math.inf
        self._start_client(agent)
        agent.send(self._monitor_order())
        return agent

    def _start_client(self, agent: AgentHandle) -> None:
        """Makes a relay or the local agent start a client."""
        self._last_number -= 1
        number = agent.client_number = self._last_number
        relayed = agent.relay is not None
        argv, env = client_command(agent.host, self._spec, relayed=relayed)
        agent.client_name = os.path.basename(argv[0])
        self._clients[number] = agent
        self._console.labels[number] = agent.host
        order = {"id": number, "argv": argv, "env": {}, "outlives": True}
        if agent.relay is None:
            agent.channel = self._send_pipes(agent)
            self._send_spawn(self._local, [{**order, "descriptors": 2}], env, None)
            return
        agent.client_name += f" on {agent.relay.host}"
        assert agent.relay.channel is not None
        agent.channel = self._relayed[number] = RelayedChannel(
            agent.relay.channel, number, partial(self.handle_message, agent)
        )
        self._send_spawn(agent.relay, [{**order, "relayed": True}], None, None)

    def _send_pipes(self, agent: AgentHandle) -> Channel:
        """Returns a channel over two new pipes, which a client of this machine gets.

        The local agent owns the client, so the client ends with the other processes of
        the job. This process makes the client's pipes and sends one end of each to the
        local agent, so that messages of the host do not pass through the local agent.
        """
        self._local_agent()
        stdin, ours = os.pipe()
        mine, stdout = os.pipe()
        channel = PipeChannel(self.selector, mine, ours, *self._callbacks(agent))
        self._send_descriptors(stdin, stdout)
        return channel

    def add_joined(
        self, host: str, channel: Channel, rendezvous: str, numbers: set[int]
    ) -> AgentHandle:
        """Adds an agent of `ringrun --join`, which may already run processes.

        Ranks of this host reach the coordinator at the address `rendezvous`.
        """
        agent = AgentHandle(host, 0, "", True, rendezvous, channel, numbers=numbers)
        self._remote[host] = agent
        agent.send(self._monitor_order())
        return agent

    def connect_stdin(self) -> None:
        """Sends a pipe with ringrun's standard input to the agent on this machine.

        Call this before ordering a process with one descriptor, which will read the
        pipe.
        """
        self._send_descriptors(pipe_standard_input())

    def _send_descriptors(self, *descriptors: int) -> None:
        """Sends file descriptors to the agent on this machine, and closes them here."""
        try:
            assert self._descriptors is not None
            # If the agent has died, `poll` handles the end of its channel.
            with contextlib.suppress(OSError):
                rights = (
                    socket.SOL_SOCKET,
                    socket.SCM_RIGHTS,
                    array.array("i", descriptors),
                )
                self._descriptors.sendmsg([b"+"], [rights])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _callbacks(
        self, agent: AgentHandle
    ) -> tuple[Callable[[Message], None], Callable[[], None]]:
        return partial(self.handle_message, agent), partial(self._closed, agent)

    # -- orders to the agents ----------------------------------------------------------

    def spawn(
        self,
        host: str,
        orders: Sequence[Message],
        env: Mapping[str, str],
        payload: bytes | None = None,
    ) -> None:
        """Starts processes on a host.

        Args:
            orders: for each process a dict with `id`, `argv` and `env`. env: variables
            for all processes. payload: standard input for each process.
        """
        agent = self._agent_for(host)
        agent.numbers.update(order["id"] for order in orders)
        if agent is not self._local:
            env, kept = environ.split_for_host(env, self._spec.forwarded)
            via = {"RINGJAX_RENDEZVOUS": agent.rendezvous} if agent.rendezvous else {}
            orders = [
                {**order, "env": {**kept, **order["env"], **via}} for order in orders
            ]
        self._send_spawn(agent, orders, env, payload)
        # The host may have left since ringrun decided to start processes on it.
        if agent.ended and agent.rendezvous:
            self._report_lost(agent, "lost its host")

    def run_command(
        self, argv: Sequence[str], done: Callable[[int, str, str], None]
    ) -> int:
        """Runs a command on this machine. Returns the command's id for `signal`.

        Calls `done` with the exit code, the output and the error output of the command.
        """
        self._last_number -= 1
        self._commands.add(self._last_number, done)
        order = {"id": self._last_number, "argv": list(argv), "env": {}}
        self._send_spawn(self._local_agent(), [order], environ.inherited(), None)
        return self._last_number

    def _send_spawn(
        self,
        agent: AgentHandle,
        orders: Sequence[Message],
        env: Mapping[str, str] | None,
        payload: bytes | None,
    ) -> None:
        """Orders processes. Without `env` they get the environment of the agent."""
        try:
            folder = os.getcwd()
        except FileNotFoundError:
            raise FileNotFoundError("the current folder has been deleted") from None
        message: Message = {
            "do": "spawn",
            "cwd": folder,
            "env": env if env is None else dict(env),
            "engine": agent.by_engine,
            "account": agent is not self._local,
            "children": list(orders),
        }
        if payload is not None:
            message["payload"] = base64.b64encode(payload).decode()
        agent.send(message)

    def signal(
        self, number: int, numbers: Sequence[int] | None = None, *, alone: bool = False
    ) -> None:
        """Sends a signal to the processes with these ids, or to all processes.

        Clients never receive a signal: messages that a client still carries would be
        lost, and the client's agent would conclude that ringrun has ended. With
        `alone`, other processes in the process groups receive no signal.
        """
        message: Message = {"do": "signal", "signal": int(number), "alone": alone}
        for agent in self._all_agents():
            own = set(agent.numbers)
            if agent is self._local:
                own |= self._commands.numbers()
            if ids := sorted(own if numbers is None else own.intersection(numbers)):
                agent.send({**message, "ids": ids})

    def set_telemetry_interval(self, seconds: float) -> None:
        """Makes all ranks send a sample every `seconds`; with 0 they send none."""
        self._telemetry_interval = seconds
        for agent in self._all_agents():
            agent.send(self._monitor_order())

    def _monitor_order(self) -> Message:
        return {"do": "monitor", "every": self._telemetry_interval}

    def _all_agents(self) -> tuple[AgentHandle, ...]:
        return self._local, *self._remote.values()

    def has_joined(self, host: str) -> bool:
        """Returns whether `ringrun --join` has started the agent of a host."""
        return host in self._remote and bool(self._remote[host].rendezvous)

    def save_job_state(self, state: Message) -> None:
        """Makes the agents of `ringrun --join` store `state` for the next ringrun."""
        for agent in self._remote.values():
            if agent.rendezvous:
                agent.send({"do": "save_state", "state": state})

    # -- reports from the agents -------------------------------------------------------

    def poll(self, timeout: float, first: Callable[[], None] | None = None) -> bool:
        """Waits for events and handles them. Returns whether there were any events.

        Calls `first` after the wait, before it handles the events.
        """
        events = self.selector.select(timeout)
        self._check_silence(time.monotonic())
        if first is not None:
            first()
        dispatch(self.selector, events)
        return bool(events)

    def _check_silence(self, now: float) -> None:
        """Handles a host as lost if its agent is silent during the start timeout."""
        for agent in self._remote.values():
            silence, limit = agent.silence(now), self._spec.config.start_timeout
            why = f"no answer over {agent.client_name} in"
            if silence >= limit:
                order = {"do": "signal", "signal": int(signal.SIGKILL)}
                runner = agent.relay or self._local
                runner.send({**order, "ids": [agent.client_number]})
                self.lose_agent(agent, f"{why} {limit:g} s; {_SHELL}")
            elif silence >= _NOTE_SILENCE_AFTER and not agent.silence_noted:
                agent.silence_noted = True
                seconds = f"{_NOTE_SILENCE_AFTER:g} s"
                self._console.note(f"{agent.host}: {why} {seconds}; {_SHELL}")

    def handle_message(self, agent: AgentHandle, message: Message) -> None:
        agent.has_answered = True
        number = message.get("id", 0)
        match message.get("is"):
            case "output":
                stream, data = message["stream"], base64.b64decode(message["data"])
                self._take_output(number, stream, data)
            case "written":
                self._relayed[number].grant(message["count"])
            case "started":
                agent.pids[number] = message["pid"]
                if number >= 0:
                    self._observer.started(number, message["pid"])
                elif number in self._clients:
                    self._clients[number].started_at = time.monotonic()
            case "exited":
                agent.pids.pop(number, None)
                self._exited(agent, number, message["code"], message.get("text", ""))
            case "sample":
                self.on_sample(number, message["text"])
            case "end requested":
                agent.end_requested = True
            case "file" | "files" if self._receiver is not None:
                self._receiver.receive(message)
            case "bye":
                agent.ended = True

    def _take_output(self, number: int, stream: str, data: bytes) -> None:
        if number in self._relayed and stream == "stdout":
            # After the end of this stream, `_exited` handles the exit of the client.
            self._relayed[number].receive(data)
        elif not self._commands.add_output(number, stream, data):
            self._observer.wrote(number, stream, data)

    def _exited(self, agent: AgentHandle, number: int, code: int, text: str) -> None:
        agent.numbers.discard(number)
        if self._commands.record_exit(number, code, text):
            return
        if number >= 0:
            self._observer.exited(number, code, text)
        elif not self._clients[number].ended:
            lost = self._clients[number]
            why = f": {text}" if text else ""
            how = f"{lost.client_name} ended ({code}){why}"
            unsent = self._relayed.get(number)
            if unsent is None or unsent.closed or lost.has_answered:
                self.lose_agent(lost, f"lost its host, {how}")
            else:
                self._start_directly(lost, unsent, how)

    def _start_directly(self, agent: AgentHandle, unsent: Channel, why: str) -> None:
        """Starts the agent of a host that a relay could not reach."""
        if not self._relay_failed:
            self._relay_failed = True
            self._console.note(
                f"{agent.host}: {why}, so ringrun connects to this host directly, and "
                "to further hosts without another note"
            )
        agent.relay = None
        self._start_client(agent)
        assert agent.channel is not None
        agent.channel.resend(unsent)

    def lose_agent(self, agent: AgentHandle, text: str) -> None:
        """Handles the loss of an agent, with which all its processes are lost.

        The loss of a relay is also the loss of the hosts whose clients it runs.
        """
        agent.ended = True
        self._report_lost(agent, text)
        for other in self._remote.values():
            if other.relay is agent and not other.ended:
                how = f"{other.host} was reached through {agent.host}, which is lost"
                self.lose_agent(other, f"lost its host: {how}")

    def _closed(self, agent: AgentHandle) -> None:
        if agent.ended:
            return
        if agent is self._local:
            agent.ended = True
            self._guardian_died()
        elif agent.orphaned_client is not None:
            self.lose_agent(agent, "lost its host")
        # Otherwise wait until the guardian reports the exit of the client, because this
        # report contains the reason.

    def _guardian_died(self) -> None:
        """Reports the guardian's ranks as lost, and keeps the hosts of its clients.

        Clients were started with `outlives`, so they continue without the guardian. But
        no agent can report the exit of a client now, so a host counts as lost when the
        pipe of its client is closed.
        """
        pids = dict(self._local.pids)
        for client in self._clients.values():
            if not client.ended and client.relay is None:
                client.orphaned_client = pids.pop(client.client_number, 0)
                if client.closed:
                    self.lose_agent(client, "lost its host")
        text = "its agent on this host died"
        self._report_lost(self._local, text)
        # The kernel has sent SIGKILL to the guardian's children only, so kill the
        # remaining processes of their groups here.
        for pid in pids.values():
            processes.kill_group(pid)
        self._commands.fail_all(text)

    def _report_lost(self, agent: AgentHandle, text: str) -> None:
        numbers = sorted(agent.numbers)
        agent.numbers.clear()
        agent.pids.clear()
        if numbers:
            self._observer.host_lost(numbers, text)

    # -- the end of the job ------------------------------------------------------------

    def detach_joined(self) -> None:
        """Drops the agents of `ringrun --join`, which continue without ringrun."""
        for host, agent in list(self._remote.items()):
            if agent.rendezvous:
                del self._remote[host]
                if agent.channel is not None:
                    agent.channel.flush(1.0)
                    agent.channel.close()

    def end(self, limit: float) -> None:
        """Makes every agent kill its remaining processes, and reads their last output.

        Agents with a relay end first, and the local agent ends last, because a client
        must not end before its agent. Waits up to `limit` seconds for the agents with a
        relay, for the other hosts, and for the local agent.
        """
        if folder := self._spec.env.get("RINGJAX_PROFILE"):
            self._receiver = FileReceiver(folder)
            agents = list(self._remote.values())
            self._receiver.fetch(agents, self.poll, self._console.note)
        remote = list(self._remote.values())
        behind = [agent for agent in remote if agent.relay is not None]
        direct = [agent for agent in remote if agent.relay is None]
        for agents in (behind, direct, [self._local]):
            deadline = time.monotonic() + limit
            for agent in agents:
                agent.send({"do": "end"})
            while time.monotonic() < deadline and not all(
                agent.closed for agent in agents
            ):
                dispatch(self.selector, self.selector.select(0.05))
            for agent in agents:
                if agent.orphaned_client and not agent.closed:
                    processes.kill_group(agent.orphaned_client)
                if agent.channel is not None and not agent.rendezvous:
                    agent.channel.close()

    def close(self, limit: float, code: int = 1) -> None:
        """Waits up to `limit` seconds for the local agent, and closes all channels.

        Agents of `ringrun --join` exit with `code`, which is the exit code of the job.
        """
        joined = [agent for agent in self._remote.values() if agent.rendezvous]
        for agent in joined:
            agent.send({"do": "status", "code": code})
        deadline = time.monotonic() + limit
        for agent in joined:
            if agent.channel is not None:
                agent.channel.flush(max(0.0, deadline - time.monotonic()))
                agent.channel.close()
        if self._descriptors is not None:
            self._descriptors.close()
        if self._guardian is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guardian.wait(timeout=limit)
            # A guardian that is still busy ends by itself. Setting returncode keeps
            # Popen from warning about a child process that nobody has waited for.
            self._guardian.returncode = self._guardian.returncode or 0
        self.selector.close()
