"""The state that ringrun keeps for each agent. The program itself is agent.py."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ringjax.run.hosts.channel import Channel


@dataclass(slots=True)
class AgentHandle:
    """The agent on a host, as ringrun sees it.

    Attributes:
        client_number: number of the client process (ssh, srun) that reaches the agent.
        client_name: program name of that client, for error texts.
        by_engine: an engine has started the agent and has set its environment.
        rendezvous: address of the coordinator for ranks of this host. Set only if the
            agent has joined by itself (`ringrun --join`).
        started_at: when the agent was started, by `time.monotonic`.
        has_answered: whether any message has come from the agent.
        silence_noted: whether the user was told that no message has come.
        end_requested: the agent got SIGTERM, so a batch system wants the host back.
        orphaned_client: process id of the client after its guardian has died.
        numbers: numbers of the processes that the agent runs or was told to start.
        pids: process ids of the running ones, by number.
    """

    host: str
    client_number: int
    client_name: str = ""
    by_engine: bool = False
    rendezvous: str = ""
    channel: Channel | None = None
    started_at: float = field(default_factory=time.monotonic)
    has_answered: bool = False
    silence_noted: bool = False
    ended: bool = False
    end_requested: bool = False
    orphaned_client: int | None = None
    numbers: set[int] = field(default_factory=set)
    pids: dict[int, int] = field(default_factory=dict)

    def silence(self, now: float) -> float:
        """Returns the seconds since the start without any message; else 0."""
        known = self.has_answered or self.closed or self.rendezvous
        return 0.0 if known else now - self.started_at

    @property
    def closed(self) -> bool:
        """Whether no more messages can come from the agent."""
        return self.ended or self.channel is None or self.channel.closed
