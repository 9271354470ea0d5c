"""Horovod's place for what tells workers about hosts; only hands it on."""

from ringjax.elastic import HostUpdateResult, WorkerNotificationManager

__all__ = ["HostUpdateResult", "WorkerNotificationManager"]
