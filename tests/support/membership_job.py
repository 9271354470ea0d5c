"""The simulated job of test_membership.py: membership without I/O, and a clock."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from ringjax.membership.assembly import MembershipConfig
from ringjax.membership.membership import JobMembership


class Job:
    """A membership with a simulated clock, and all messages to the workers."""

    def __init__(
        self,
        np: int,
        min_np: int = 1,
        max_np: int = 0,
        group: int = 1,
        on_loss: Literal["repair", "stop"] = "repair",
        **more: Any,
    ) -> None:
        self.rules = MembershipConfig(
            np, min_np, max_np or np, group=group, on_loss=on_loss
        )
        self.membership = JobMembership(self.rules, **more)
        self.now = 0.0
        self.mail: dict[int, list[dict[str, Any]]] = {}
        self.news: list[tuple[Any, ...]] = []

    def take(self) -> None:
        mail, news = self.membership.drain()
        for worker, message, _ in mail:
            self.mail.setdefault(worker, []).append(message)
        self.news += news

    def hello(self, *workers: int, rejoin: Any = None, **hello: Any) -> Job:
        for worker in workers:
            self.membership.on_hello(worker, "h", hello, rejoin, self.now)
        self.take()
        return self

    def say(self, worker: int, kind: str, **more: Any) -> None:
        message = {"type": kind, "epoch": self.epoch} | more
        self.membership.on_message(worker, message, self.now)
        self.take()

    def report(self, *workers: int, line: tuple[int, int, bool] = (0, 0, True)) -> None:
        for worker in workers:
            self.say(worker, "report", lines={"0": line})

    def lose(self, worker: int, why: str = "EOF") -> None:
        self.membership.on_disconnected(worker, why, self.now)
        self.take()

    def wait(self, seconds: float) -> None:
        """Advances the clock from deadline to deadline, as the coordinator does."""
        end = self.now + seconds
        for _ in range(100):
            due = self.membership.deadline()
            if due is None or due > end:
                self.now = end
                return
            self.now = max(due, self.now)
            self.membership.tick(self.now)
            self.take()
        pytest.fail("it ticks for ever")

    @property
    def epoch(self) -> int:
        return self.membership.epoch.number

    def last(self, worker: int, kind: str = "") -> dict[str, Any]:
        found = [m for m in self.mail[worker] if not kind or m["type"] == kind]
        return found[-1]

    def order(self) -> list[int]:
        return self.membership.epoch.order


def started(np: int, *args: int) -> Job:
    return Job(np, *args).hello(*range(np))
