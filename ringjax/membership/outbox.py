"""What a coordinator has to send and to tell, and who is never to be let in again.

Messages wait here until somebody takes them: membership.py decides, coordinator.py
sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

OutgoingMessage = tuple[int, dict[str, Any], bool]  # worker, message, last
LauncherEvent = tuple[Any, ...]  # for the launcher, see `Coordinator.events`


class Outbox:
    """Outgoing messages, in order.

    Attributes:
        out: workers that are lost for good -> why.
        dismissed: workers that were sent away in good order.

    Example:
        >>> outbox = Outbox()
        >>> outbox.fence(3, "it died")
        >>> outbox.take()
        ([(3, {'type': 'fenced', 'text': 'it died'}, True)], [])
    """

    def __init__(self) -> None:
        self.out: dict[int, str] = {}
        self.dismissed: set[int] = set()
        self._mail: list[OutgoingMessage] = []
        self._news: list[LauncherEvent] = []

    def take(self) -> tuple[list[OutgoingMessage], list[LauncherEvent]]:
        """What is to be sent, and what the launcher is to be told."""
        found = self._mail, self._news
        self._mail, self._news = [], []
        return found

    def send(self, worker: int, message: dict[str, Any], *, last: bool = False) -> None:
        """To one worker."""
        self._mail.append((worker, message, last))

    def tell(self, workers: Iterable[int], message: dict[str, Any]) -> None:
        """To several workers the same."""
        self._mail += [(worker, message, False) for worker in workers]

    def report(self, *news: Any) -> None:
        """To the launcher."""
        self._news.append(news)

    def fence(self, worker: int, why: str) -> None:
        """It is lost for good, and must not go on."""
        self.out[worker] = why
        self.send(worker, {"type": "fenced", "text": why}, last=True)

    def dismiss(self, worker: int, text: str) -> None:
        """It is not needed any more."""
        self.dismissed.add(worker)
        self.report("dismissed", worker, text)
        self.send(worker, {"type": "dismissed", "text": text}, last=True)
