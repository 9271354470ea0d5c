"""Sends messages of workers to the driver while a job runs: Horovod's `ray_logger`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.queue import Empty, Queue

from ringjax import runtime
from ringjax.ray.ray_types import Callbacks, ObjectRef, RayQueue

_queue: RayQueue = None


def configure(queue: RayQueue) -> None:
    """Sets the queue into which `log` puts messages. With None `log` does nothing."""
    global _queue
    _queue = queue


def log(info_dict: object, chief_only: bool = False) -> None:
    """Sends a dictionary to the `callbacks` of the driver.

    Args:
        info_dict: the message; None means no message.
        chief_only: whether only rank 0 sends its message.

    Raises:
        ValueError: `info_dict` is no dictionary.
    """
    if info_dict is None or _queue is None:
        return
    if not isinstance(info_dict, Mapping):
        kind = type(info_dict).__name__
        raise ValueError(f"ray_logger.log: expected a dict, not {kind}")
    if not chief_only or not runtime.is_initialized() or runtime.rank() == 0:
        _queue.put(dict(info_dict))


class DriverLogger:
    """Receives the workers' messages in the driver, and passes them to callbacks.

    Attributes:
        queue: the queue of the messages; None if there are no callbacks.
    """

    def __init__(self, callbacks: Callbacks | None) -> None:
        self._callbacks = list(callbacks or ())
        self.queue = Queue(actor_options={"num_cpus": 0}) if self._callbacks else None

    def __enter__(self) -> DriverLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.dispatch()
        if self.queue is not None:
            self.queue.shutdown()

    def dispatch(self) -> None:
        """Calls the callbacks with the messages that have arrived."""
        while self.queue is not None:
            try:
                message = self.queue.get_nowait()
            except Empty:
                return
            for callback in self._callbacks:
                callback(message)

    def wait_for(self, ref: ObjectRef) -> Any:
        """Waits for a call in the cluster, and dispatches messages while it waits."""
        try:
            while not ray.wait([ref], timeout=0.1)[0]:
                self.dispatch()
            return ray.get(ref)
        except RayTaskError as error:
            raise error.cause from None
