"""Who hears that hosts come or go: Horovod's notifications, for other launchers.

In an elastic job of ringrun the coordinator tells the ranks itself.
"""

from __future__ import annotations

import enum
import threading
from typing import Protocol


class HostUpdateResult(enum.IntFlag):
    """What has happened to the hosts of the job."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class Listener(Protocol):
    """Who wants to hear that hosts come or go: a `State`."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Called from any thread."""


class WorkerNotificationManager:
    """Hands what is heard about hosts on to the states that are being trained."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []

    def init(self) -> None:
        """Called when training starts, before a listener registers."""

    def register_listener(self, listener: Listener) -> None:
        """From now on it hears of every change."""
        with self._lock:
            self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        """From now on it hears nothing; nothing happens if it did not before."""
        with self._lock:
            self._listeners = [one for one in self._listeners if one is not listener]

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Tells all listeners."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()
