"""Horovod's notifications about changes of hosts, for launchers other than ringrun.

In an elastic job of ringrun, the coordinator notifies the ranks without this module.
"""

from __future__ import annotations

import enum
import threading
from typing import Protocol


class HostUpdateResult(enum.IntFlag):
    """Whether hosts were added to the job or removed from the job."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class Listener(Protocol):
    """An object to notify about changes of hosts, in practice a `State`."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Handles a change of the hosts. Any thread may call this method."""


class WorkerNotificationManager:
    """Forwards notifications to the states that are being trained."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []

    def init(self) -> None:
        """Does nothing; exists because Horovod's class has this method."""

    def register_listener(self, listener: Listener) -> None:
        """Adds a listener, which is notified of every later change."""
        with self._lock:
            self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Removes a listener. Does nothing if the listener is not registered."""
        with self._lock:
            self._listeners = [each for each in self._listeners if each is not listener]

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Notifies all listeners."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()
