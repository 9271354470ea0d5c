"""`ringrun --listen`: accepts agents that join by themselves (`ringrun --join`).

A list (-H), a script (discovery.py) and this listener are the three ways in which a job
gets its hosts. An agent that proves that it has the job's secret, and then sends a
hello with the name of its host and its slots, makes that host part of the job for as
long as the connection lasts. If the connection of an elastic job breaks, the same agent
may come back within the failure timeout and nothing is lost. Another agent of the same
name counts as a new host. The other end is joining_agent.py.
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
from ringjax.control.connecting import enable_keepalive
from ringjax.control.handshake import HandshakeRequest, Purpose, callee_steps
from ringjax.control.sealed_messages import SessionKeys
from ringjax.control.tls import offer_for
from ringjax.run.hosts.agent_handle import AgentHandle
from ringjax.run.hosts.agent_pool import AgentPool
from ringjax.run.hosts.channel import Channel, Message
from ringjax.run.hosts.job_spec import JobSpec
from ringjax.run.hosts.slots import HostSlots, check_name

_MOST = 1 << 31  # numbers of workers are less
_TAKEN = 5.0  # seconds for a ringrun that was there before to let the port go


@dataclass(slots=True, eq=False)
class _Connection:
    """The other end of one connection.

    Attributes:
        agent: what it is for the fleet, once it has said hello.
        gone: when the connection has ended.
    """

    where: str
    channel: Channel | None = None
    token: str = ""
    agent: AgentHandle | None = None
    gone: float = math.inf


class AgentListener:
    """Takes agents in.

    Args:
        spec: says where, and who is wanted.
        fleet: gets the agents.
        note: takes sentences for people.
        welcome: is told of a host and of what its agent has said.
        job_for: the id of the job that an agent belongs to which remembers something
            of a job. With one, the job is elastic: when ringrun is gone, the ranks go
            on, and wait for another.

    Raises:
        StartupError: it cannot listen there.
    """

    name, trouble, hopeless = "--listen", "", False  # as a `HostDiscovery` has them

    def __init__(
        self,
        spec: JobSpec,
        fleet: AgentPool,
        note: Callable[[str], None],
        welcome: Callable[[str, Message], None] = lambda host, message: None,
        job_for: Callable[[Message], str] | None = None,
    ) -> None:
        assert spec.listening is not None
        listening = self._listening = spec.listening
        self._fleet, self._note, self._welcome = fleet, note, welcome
        self._job_for = job_for or (lambda memory: "")
        self._patience = listening.patience if job_for else 0.0
        self._own = list(listening.own)
        self._guests: dict[str, _Connection] = {}  # by host
        self._slots: dict[str, int] = {}  # of those that do not leave
        self._selector = selectors.EpollSelector()
        offered = offer_for(spec.tls)
        self._acceptor = Acceptor(
            addresses.listen_on(listening.addresses, listening.port, _TAKEN),
            self._selector,
            lambda sock: callee_steps(
                listening.secret, listening.job, self._accepts, offered
            ),
            self._admit,
            note,
        )
        fleet.selector.register(
            self._selector.fileno(), selectors.EVENT_READ, self._turn
        )

    @property
    def hosts(self) -> list[HostSlots]:
        """The hosts that there are now, in the order in which they came."""
        return [*self._own, *(HostSlots(*known) for known in self._slots.items())]

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._acceptor.expire()
        for guest in list(self._guests.values()):
            if now - guest.gone > self._listening.silence:
                self._lose(guest)

    def without_own(self) -> None:
        """The hosts that need not come are none any more."""
        self._own.clear()

    def close(self) -> None:
        """Takes nobody any more; who is here stays."""
        self._selector.close()
        self._acceptor.close()

    def _turn(self) -> None:
        run_once(self._selector, 0.0, self._acceptor.on_error)

    @staticmethod
    def _accepts(introduction: HandshakeRequest) -> str:
        if introduction.purpose == Purpose.AGENT:
            return ""
        return "is no agent: ranks have an address of their own"

    def _admit(
        self,
        sock: socket.socket,
        where: str,
        introduction: HandshakeRequest,
        keys: SessionKeys,
    ) -> None:
        del introduction
        enable_keepalive(sock, self._listening.silence)
        guest = _Connection(where)
        descriptor = sock.detach()
        guest.channel = Channel(
            self._fleet.selector,
            descriptor,
            os.dup(descriptor),
            lambda message: self._heard(guest, message),
            lambda: self._left(guest),
            keys,
        )

    def _heard(self, guest: _Connection, message: Message) -> None:
        if guest.agent is None:
            self._greet(guest, message)
        elif message.get("is") == "leaving":
            self._slots.pop(guest.agent.host, None)
        else:
            self._fleet.heard(guest.agent, message)

    def _greet(self, guest: _Connection, message: Message) -> None:
        assert guest.channel is not None
        why, again = self._refuses(message)
        if why:
            guest.channel.send({"do": "refuse", "text": why, "again": again})
            guest.channel.flush(1.0)
            guest.channel.close()
            if not again:
                self._note(f"refused an agent from {guest.where}: {why}")
            return
        host, guest.token = message["host"], message["token"]
        before = self._guests.get(host)
        job = self._job_for(message["memory"])
        if message["memory"].get("job", job) != job:  # it ends these ranks
            message = {**message, "ranks": [], "memory": {}}
        guest.channel.send({"do": "welcome", "patience": self._patience, "job": job})
        if before is not None and before.token == guest.token:
            self._come_back(before, guest, message)
            return
        if before is not None:
            self._lose(before)
        self._guests[host], self._slots[host] = guest, message["slots"]
        via = addresses.show(message["via"], self._listening.port + 1)
        ranks = {rank["id"] for rank in message["ranks"] if "code" not in rank}
        guest.agent = self._fleet.take(host, guest.channel, via, ranks)
        count = message["slots"]
        self._note(f"host {host} has come, with {count} slot{'s' * (count != 1)}")
        self._welcome(host, message)

    def _come_back(
        self, before: _Connection, guest: _Connection, message: Message
    ) -> None:
        """Its connection was broken, and nothing else."""
        agent, guest.agent = before.agent, before.agent
        assert before.channel is not None and agent is not None
        before.channel.close()
        self._guests[agent.host], agent.channel = guest, guest.channel
        codes = {rank["id"]: rank.get("code") for rank in message["ranks"]}
        for name in sorted(agent.names):
            ended: Message = {"is": "exited", "id": name, "code": codes.get(name, 255)}
            if name not in codes:
                ended["text"] = "the order to start it was lost"
            if ended["code"] is not None:
                self._fleet.heard(agent, ended)

    def _refuses(self, message: Message) -> tuple[str, bool]:
        """Why a host is not taken, nothing if it is; and whether it may come again."""
        host, token = message.get("host"), message.get("token")
        slots, via = message.get("slots"), message.get("via")
        if message.get("is") != "hello" or not isinstance(token, str):
            return "it said no hello", False
        if not (isinstance(host, str) and isinstance(via, str) and via):
            return "it said no host", False
        try:
            check_name(host)
            _check_ranks(message)
        except (ValueError, TypeError, LookupError) as error:
            return str(error), False
        if type(slots) is not int or not 0 < slots <= 1 << 16:
            return f"host {host} has {slots!r} slots", False
        known = self._guests.get(host)
        if known is not None and known.token != token and known.gone == math.inf:
            return f"a host {host} is here already, from {known.where}", True
        if any(host == own.name for own in self._own):
            return f"{host} is a host of ringrun's own", False
        return "", False

    def _left(self, guest: _Connection) -> None:
        """A connection has ended."""
        guest.gone = time.monotonic()
        if guest.agent is not None and (guest.agent.ended or not self._patience):
            self._lose(guest)

    def _lose(self, guest: _Connection) -> None:
        assert guest.agent is not None
        host = guest.agent.host
        del self._guests[host]
        self._slots.pop(host, None)
        self._fleet.lose(guest.agent, "lost its host, whose agent is gone")


def _check_ranks(message: Message) -> None:
    for rank in message["ranks"]:
        numbers = (rank["id"], rank["pid"], rank["seat"], rank.get("code", 0))
        if not all(type(number) is int and 0 <= number < _MOST for number in numbers):
            raise ValueError(f"it has a rank {rank!r}")
    memory = message["memory"] or {"job": "", "next": 0, "places": []}
    if not re.fullmatch("([0-9a-f]{16})?", memory["job"]):
        raise ValueError(f"it remembers job {memory['job']!r}")
    places = dict(memory["places"])
    numbers = (memory["next"], *places)
    if not all(type(number) is int and 0 <= number < _MOST for number in numbers):
        raise ValueError(f"it remembers {memory!r}")
    if not all(isinstance(host, str) for host in places.values()):
        raise ValueError(f"it remembers hosts {places!r}")
