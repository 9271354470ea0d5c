"""The agent on a host, as ringrun knows it; the program itself is agent.py."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ringjax.run.hosts.channel import Channel


@dataclass(slots=True)
class AgentHandle:
    """The agent on a host.

    Attributes:
        client: what reaches it from here: ssh, srun.
        by_engine: an engine has set its environment.
        rendezvous: where its ranks find the job, for one that has come by itself.
        since: when it was started, by `time.monotonic`.
        answers: whether anything has come from it.
        noted: whether it has been said that nothing has.
        asked_back: somebody there wants the host back: it got SIGTERM.
        orphan: the process of its client, once the guardian that owned it is gone.
        names: the processes that it has and had to start.
    """

    host: str
    number: int
    client: str = ""
    by_engine: bool = False
    rendezvous: str = ""
    channel: Channel | None = None
    since: float = field(default_factory=time.monotonic)
    answers: bool = False
    noted: bool = False
    ended: bool = False
    asked_back: bool = False
    orphan: int | None = None
    names: set[int] = field(default_factory=set)
    pids: dict[int, int] = field(default_factory=dict)

    def silence(self, now: float) -> float:
        """Seconds since its start, if nothing has come from it; else 0."""
        known = self.answers or self.done or self.rendezvous
        return 0.0 if known else now - self.since

    @property
    def done(self) -> bool:
        """Whether nothing will come from it any more."""
        return self.ended or self.channel is None or self.channel.closed
