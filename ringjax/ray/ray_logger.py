"""What rank 0 tells the driver while it runs: Horovod's `ray_logger`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.util.queue import Empty, Queue

from ringjax import runtime

_queue: Any = None


def configure(queue: Any) -> None:
    """Where `log` puts what it is given; None: nowhere."""
    global _queue
    _queue = queue


def log(info: Mapping[str, Any] | None) -> None:
    """Hands a dictionary to the `callbacks` of the driver; on rank 0 alone.

    Raises:
        ValueError: it is no dictionary.
    """
    if info is None or _queue is None:
        return
    if not isinstance(info, Mapping):
        raise ValueError(f"ray_logger.log: expected a dict, not {type(info).__name__}")
    if not runtime.is_initialized() or runtime.rank() == 0:
        _queue.put(dict(info))


class Callbacks:
    """The driver's end: hands what comes to functions, whenever it is asked to."""

    def __init__(self, callbacks: Sequence[Callable[[Any], None]] | None) -> None:
        self._callbacks = list(callbacks or ())
        self.queue = Queue(actor_options={"num_cpus": 0}) if self._callbacks else None

    def serve(self) -> None:
        """Hands on what has come."""
        while self.queue is not None:
            try:
                message = self.queue.get_nowait()
            except Empty:
                return
            for callback in self._callbacks:
                callback(message)

    def close(self) -> None:
        """Hands on the last, and ends the queue."""
        self.serve()
        if self.queue is not None:
            self.queue.shutdown()
