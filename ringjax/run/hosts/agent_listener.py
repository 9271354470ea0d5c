"""`ringrun --listen`: accepts hosts on which somebody has run `ringrun --join`.

A job's hosts come from a list (-H), from a script (discovery.py) or from this listener.
An agent proves that it has the job's secret, and then sends a hello with the name and
the slots of its host. The host belongs to the job as long as the agent is connected. If
the connection breaks in an elastic job, the agent may reconnect within the failure
timeout, and no rank is lost. If another agent with that host name connects, its host
counts as a new host. joining_agent.py implements these agents.
"""

from __future__ import annotations

import math
import os
import re
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from ringjax.control import addresses
from ringjax.control.acceptor import Acceptor, run_once
from ringjax.control.addresses import enable_keepalive
from ringjax.control.handshake import HandshakeRequest, Purpose, callee_steps
from ringjax.control.sealed_messages import SessionKeys
from ringjax.control.tls import offer_for
from ringjax.run.hosts.agent_handle import AgentHandle
from ringjax.run.hosts.agent_pool import AgentPool
from ringjax.run.hosts.channel import Channel, Message, PipeChannel
from ringjax.run.hosts.job_spec import JobSpec
from ringjax.run.hosts.slots import HostSlots, check_host_name

_MAX_NUMBER = 1 << 31  # numbers of workers in a hello must be smaller
_PORT_TIMEOUT = 5.0  # seconds to wait until an earlier ringrun releases the port


@dataclass(slots=True, eq=False)
class _Connection:
    """A connection that an agent has opened.

    Attributes:
        peer: address of the agent, for error texts. agent: the agent in the pool, or
        None until ringrun has accepted the agent's hello.
        lost_at: the time at which the connection ended.
    """

    peer: str
    channel: Channel | None = None
    token: str = ""
    agent: AgentHandle | None = None
    lost_at: float = math.inf


class AgentListener:
    """Accepts connections of agents, and adds the agents to the pool.

    Args:
        note: prints a line for the user. on_joined: called with the name of a host and
        the hello of the host's agent. resolve_job: `Takeover.resolve_job`, or None in a
        static job.

    Raises StartupError if it cannot listen at the address.
    """

    # `Job` reads these attributes of its listener or of its `ScriptDiscovery`.
    name, problem, unusable = "--listen", "", False

    def __init__(
        self,
        spec: JobSpec,
        agents: AgentPool,
        note: Callable[[str], None],
        on_joined: Callable[[str, Message], None] = lambda host, message: None,
        resolve_job: Callable[[Message], str] | None = None,
    ) -> None:
        assert spec.listening is not None
        listening = self._listening = spec.listening
        self._failure_timeout = spec.config.failure_timeout
        self._agents, self._note, self._on_joined = agents, note, on_joined
        self._resolve_job = resolve_job or (lambda state: "")
        self._reconnect_timeout = spec.config.elastic_timeout if resolve_job else 0.0
        self._static_hosts = list(listening.static_hosts)
        self._connections: dict[str, _Connection] = {}  # connections by host
        # The number of slots by host, without hosts that are leaving the job.
        self._slots: dict[str, int] = {}
        self._selector = selectors.EpollSelector()
        offered = offer_for(spec.config.tls)
        self._acceptor = Acceptor(
            addresses.listen_on(listening.addresses, listening.port, _PORT_TIMEOUT),
            self._selector,
            lambda sock: callee_steps(
                listening.secret, listening.job, self._accepts, offered
            ),
            self._admit,
            note,
        )
        agents.selector.register(
            self._selector.fileno(), selectors.EVENT_READ, self._process_events
        )

    @property
    def hosts(self) -> list[HostSlots]:
        """The static hosts, then the joined hosts in the order in which they joined."""
        joined = (HostSlots(name, count) for name, count in self._slots.items())
        return [*self._static_hosts, *joined]

    def tick(self, now: float) -> None:
        self._acceptor.expire()
        for connection in list(self._connections.values()):
            if now - connection.lost_at > self._failure_timeout:
                self._remove(connection)

    def drop_static_hosts(self) -> None:
        """Removes the hosts of -H, because their agents end with this ringrun."""
        self._static_hosts.clear()

    def close(self) -> None:
        """Stops listening. Agents that were accepted stay connected."""
        self._selector.close()
        self._acceptor.close()

    def _process_events(self) -> None:
        run_once(self._selector, 0.0, self._acceptor.on_error)

    @staticmethod
    def _accepts(introduction: HandshakeRequest) -> str:
        if introduction.purpose == Purpose.AGENT:
            return ""
        return "is no agent: ranks have an address of their own"

    def _admit(
        self,
        sock: socket.socket,
        peer: str,
        introduction: HandshakeRequest,
        keys: SessionKeys,
    ) -> None:
        del introduction
        enable_keepalive(sock, self._failure_timeout)
        connection = _Connection(peer)
        descriptor = sock.detach()
        connection.channel = PipeChannel(
            self._agents.selector,
            descriptor,
            os.dup(descriptor),
            lambda message: self._handle_message(connection, message),
            lambda: self._connection_lost(connection),
            keys,
        )

    def _handle_message(self, connection: _Connection, message: Message) -> None:
        if connection.agent is None:
            self._handle_hello(connection, message)
        elif message.get("is") == "leaving":
            self._slots.pop(connection.agent.host, None)
        else:
            self._agents.handle_message(connection.agent, message)

    def _handle_hello(self, connection: _Connection, message: Message) -> None:
        assert connection.channel is not None
        why, again = self._check_hello(message)
        if why:
            connection.channel.send({"do": "refuse", "text": why, "retry": again})
            connection.channel.flush(1.0)
            connection.channel.close()
            if not again:
                self._note(f"refused an agent from {connection.peer}: {why}")
            return
        host, connection.token = message["host"], message["token"]
        before = self._connections.get(host)
        job = self._resolve_job(message["state"])
        if message["state"].get("job", job) != job:
            # This agent comes from another job, and ends its ranks when it receives
            # "welcome".
            message = {**message, "ranks": [], "state": {}}
        connection.channel.send(
            {"do": "welcome", "reconnect_timeout": self._reconnect_timeout, "job": job}
        )
        if before is not None and before.token == connection.token:
            self._resume(before, connection, message)
            return
        if before is not None:
            self._remove(before)
        self._connections[host], self._slots[host] = connection, message["slots"]
        via = addresses.show(message["via"], self._listening.port + 1)
        ranks = {rank["id"] for rank in message["ranks"] if "code" not in rank}
        connection.agent = self._agents.add_joined(host, connection.channel, via, ranks)
        count = message["slots"]
        self._note(f"host {host} has come, with {count} slot{'s' * (count != 1)}")
        self._on_joined(host, message)

    def _resume(
        self, before: _Connection, connection: _Connection, message: Message
    ) -> None:
        """Replaces the broken connection of an agent by the agent's new connection.

        The hello contains the exits of processes that the agent could not report
        before. A process that is not in the hello counts as ended, because the order to
        start it was lost with the old connection.
        """
        agent, connection.agent = before.agent, before.agent
        assert before.channel is not None and agent is not None
        before.channel.close()
        self._connections[agent.host] = connection
        agent.channel = connection.channel
        codes = {rank["id"]: rank.get("code") for rank in message["ranks"]}
        for number in sorted(agent.numbers):
            code = codes.get(number, 255)
            ended: Message = {"is": "exited", "id": number, "code": code}
            if number not in codes:
                ended["text"] = "the order to start it was lost"
            if code is not None:
                self._agents.handle_message(agent, ended)

    def _check_hello(self, message: Message) -> tuple[str, bool]:
        """Checks the contents of a hello, which may be invalid.

        Returns the reason why ringrun refuses the host, or "" if ringrun accepts the
        host, and whether the agent may try again.
        """
        host, token = message.get("host"), message.get("token")
        slots, via = message.get("slots"), message.get("via")
        if message.get("is") != "hello" or not isinstance(token, str):
            return "it said no hello", False
        if not (isinstance(host, str) and isinstance(via, str) and via):
            return "it said no host", False
        try:
            check_host_name(host)
            _check_ranks(message)
        except (ValueError, TypeError, LookupError) as error:
            return str(error), False
        if type(slots) is not int or not 0 < slots <= 1 << 16:
            return f"host {host} has {slots!r} slots", False
        known = self._connections.get(host)
        if known is not None and known.token != token and known.lost_at == math.inf:
            return f"a host {host} is here already, from {known.peer}", True
        if any(host == static.name for static in self._static_hosts):
            return f"{host} is a host of ringrun's own", False
        return "", False

    def _connection_lost(self, connection: _Connection) -> None:
        connection.lost_at = time.monotonic()
        agent = connection.agent
        if agent is not None and (agent.ended or not self._reconnect_timeout):
            self._remove(connection)

    def _remove(self, connection: _Connection) -> None:
        assert connection.agent is not None
        host = connection.agent.host
        del self._connections[host]
        self._slots.pop(host, None)
        self._agents.lose_agent(connection.agent, "lost its host, whose agent is gone")


def _check_ranks(message: Message) -> None:
    """Raises an error if an id, a code or a host in a hello has a wrong type."""
    for rank in message["ranks"]:
        numbers = (rank["id"], rank["pid"], rank["local_rank"], rank.get("code", 0))
        if not all(
            type(number) is int and 0 <= number < _MAX_NUMBER for number in numbers
        ):
            raise ValueError(f"it has a rank {rank!r}")
    state = message["state"] or {"job": "", "next": 0, "hosts": []}
    if not re.fullmatch("([0-9a-f]{16})?", state["job"]):
        raise ValueError(f"it remembers job {state['job']!r}")
    hosts = dict(state["hosts"])
    numbers = (state["next"], *hosts)
    if not all(type(number) is int and 0 <= number < _MAX_NUMBER for number in numbers):
        raise ValueError(f"it remembers {state!r}")
    if not all(isinstance(host, str) for host in hosts.values()):
        raise ValueError(f"it remembers hosts {hosts!r}")
