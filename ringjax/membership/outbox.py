"""Outbox: messages and events that wait to be sent, and workers that are gone forever.

membership.py and epochs.py add messages and events, and coordinator.py sends them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ringjax.control.member import JsonObject

OutgoingMessage = tuple[int, JsonObject, bool]  # worker, message, last
LauncherEvent = tuple[Any, ...]  # see `Coordinator.events`


class Outbox:
    """Collects messages for workers and events for the launcher, in order.

    Attributes:
        fenced: workers that were declared lost, and why.
        dismissed: workers that have left without an error.

    Example:
        >>> outbox = Outbox()
        >>> outbox.fence(3, "it died")
        >>> outbox.drain()
        ([(3, {'type': 'fenced', 'text': 'it died'}, True)], [])
    """

    def __init__(self) -> None:
        self.fenced: dict[int, str] = {}
        self.dismissed: set[int] = set()
        self._messages: list[OutgoingMessage] = []
        self._events: list[LauncherEvent] = []

    def drain(self) -> tuple[list[OutgoingMessage], list[LauncherEvent]]:
        """Removes and returns all messages and all events."""
        found = self._messages, self._events
        self._messages, self._events = [], []
        return found

    def send(self, worker: int, message: JsonObject, *, last: bool = False) -> None:
        self._messages.append((worker, message, last))

    def send_all(self, workers: Iterable[int], message: JsonObject) -> None:
        self._messages += [(worker, message, False) for worker in workers]

    def publish(self, *event: Any) -> None:
        """Adds an event for the launcher."""
        self._events.append(event)

    def fence(self, worker: int, why: str) -> None:
        """Excludes a worker forever. The process of this worker must not continue."""
        self.fenced[worker] = why
        self.send(worker, {"type": "fenced", "text": why}, last=True)

    def dismiss(self, worker: int, text: str) -> None:
        """Makes a worker leave without an error, because the job does not need it."""
        self.dismissed.add(worker)
        self.publish("dismissed", worker, text)
        self.send(worker, {"type": "dismissed", "text": text}, last=True)
