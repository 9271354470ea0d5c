"""Makes `WorkerNotificationManager` importable from Horovod's module path."""

from ringjax.elastic import HostUpdateResult, WorkerNotificationManager

__all__ = ["HostUpdateResult", "WorkerNotificationManager"]
