"""AgentHandle: what ringrun knows about one agent."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ringjax.run.hosts.channel import Channel, Message


@dataclass(slots=True)
class AgentHandle:
    """The agent on a host, and what ringrun knows about it.

    Attributes:
        client_number: id of the client process (ssh, srun) that has started the agent.
        client_name: program name of the client, for error texts.
        by_engine: whether an engine has started the agent and has set its environment.
        rendezvous: address of the coordinator for ranks of this host, if
            `ringrun --join` has started the agent; otherwise empty.
        relay: the agent on another host that runs the client. Without a relay the
            agent on the machine of ringrun runs the client.
        started_at: when the client was started, by `time.monotonic`. It is infinite
            until a relay has started the client.
        has_answered: whether the agent has sent any message. silence_noted: whether
        ringrun has told the user that no message has arrived.
        ended: whether the agent has sent "bye", or counts as lost.
        end_requested: whether the agent received SIGTERM, because a batch system needs
            the host.
        orphaned_client: process id of the client after the local agent has died.
        numbers: ids of the processes that the agent runs or has been ordered to start.
        pids: process ids of running processes, by ringrun's id of the process.
    """

    host: str
    client_number: int
    client_name: str = ""
    by_engine: bool = False
    rendezvous: str = ""
    channel: Channel | None = None
    relay: AgentHandle | None = None
    started_at: float = field(default_factory=time.monotonic)
    has_answered: bool = False
    silence_noted: bool = False
    ended: bool = False
    end_requested: bool = False
    orphaned_client: int | None = None
    numbers: set[int] = field(default_factory=set)
    pids: dict[int, int] = field(default_factory=dict)

    def send(self, message: Message) -> None:
        if self.channel is not None:
            self.channel.send(message)

    def silence(self, now: float) -> float:
        """Returns seconds since the client's start, or 0 if a message has arrived."""
        known = self.has_answered or self.closed or self.rendezvous
        return 0.0 if known else now - self.started_at

    @property
    def closed(self) -> bool:
        """Whether the agent can send no more messages."""
        return self.ended or self.channel is None or self.channel.closed
