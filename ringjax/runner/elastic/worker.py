"""Horovod's module path of `WorkerNotificationManager`; it only imports names."""

from ringjax.elastic import HostUpdateResult, WorkerNotificationManager

__all__ = ["HostUpdateResult", "WorkerNotificationManager"]
