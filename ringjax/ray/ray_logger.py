"""What a worker tells the driver while it runs: Horovod's `ray_logger`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.queue import Empty, Queue

from ringjax import runtime

_queue: Any = None


def configure(queue: Any) -> None:
    """Where `log` puts what it is given; None: nowhere."""
    global _queue
    _queue = queue


def log(info_dict: Any, chief_only: bool = False) -> None:
    """Hands a dictionary to the `callbacks` of the driver.

    Args:
        info_dict: what to hand over; None: nothing.
        chief_only: only if this is rank 0.

    Raises:
        ValueError: it is no dictionary.
    """
    if info_dict is None or _queue is None:
        return
    if not isinstance(info_dict, Mapping):
        kind = type(info_dict).__name__
        raise ValueError(f"ray_logger.log: expected a dict, not {kind}")
    if not chief_only or not runtime.is_initialized() or runtime.rank() == 0:
        _queue.put(dict(info_dict))


class DriverLogger:
    """The driver's end: hands what comes to functions, whenever it is asked to."""

    def __init__(self, callbacks: Sequence[Callable[[Any], None]] | None) -> None:
        self._callbacks = list(callbacks or ())
        self.queue = Queue(actor_options={"num_cpus": 0}) if self._callbacks else None

    def __enter__(self) -> DriverLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.dispatch()
        if self.queue is not None:
            self.queue.shutdown()

    def dispatch(self) -> None:
        """Hands on what has come."""
        while self.queue is not None:
            try:
                message = self.queue.get_nowait()
            except Empty:
                return
            for callback in self._callbacks:
                callback(message)

    def wait_for(self, ref: Any) -> Any:
        """Waits for what the cluster does for this client; raises what it raised."""
        try:
            while not ray.wait([ref], timeout=0.1)[0]:
                self.dispatch()
            return ray.get(ref)
        except RayTaskError as error:
            raise error.cause from None
