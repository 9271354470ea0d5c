"""Horovod's data loaders, which can prepare batches ahead of time in a thread.

The module has Horovod's path and names. A program defines `_iterate` of its loader.
"""

from __future__ import annotations

import abc
import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
_POLL_INTERVAL = 0.01  # seconds between two checks whether a thread has ended


class BaseDataLoader(abc.ABC):
    """An object that yields batches, epoch by epoch.

    Example:
        >>> class Loader(BaseDataLoader):
        ...     def __len__(self):
        ...         return 2
        ...     def _iterate(self):
        ...         yield from ([0, 1], [2, 3])
        >>> list(Loader())
        [[0, 1], [2, 3]]
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of batches of an epoch."""

    @abc.abstractmethod
    def _iterate(self) -> Iterator[Any]:
        """Yields the batches of an epoch."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Converts a batch before the loader yields it. Trainers may override this."""
        return batch


class _Epoch(Generic[_T]):
    """Reads the batches of one epoch into a queue, in a daemon thread."""

    def __init__(self, batches: Iterator[_T], size: int) -> None:
        self._batches = batches
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(size)
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._read, name="ringjax-loader", daemon=True
        )
        self._thread.start()

    def _read(self) -> None:
        try:
            for batch in self._batches:
                if not self._put("batch", batch):
                    return
        except BaseException as error:
            self._put("error", error)
        else:
            self._put("end", None)

    def _put(self, kind: str, value: Any) -> bool:
        self._queue.put((kind, value))
        return not self._closed.is_set()

    def __iter__(self) -> Iterator[_T]:
        while True:
            kind, value = self._queue.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value

    def close(self) -> None:
        """Ends the thread, and drops the batches in the queue."""
        self._closed.set()
        while self._thread.is_alive():
            # The thread checks the event only after it has put a batch into the queue.
            # Empty the queue repeatedly, because the thread may be blocked by a full
            # queue.
            with contextlib.suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
            self._thread.join(_POLL_INTERVAL)


class AsyncDataLoaderMixin:
    """Reads batches ahead in a thread. Put it before `BaseDataLoader` in the bases.

    The first iteration starts the thread. At the end of an epoch, the thread of the
    next epoch starts immediately, as in Horovod.

    Args:
        async_loader_queue_size: how many batches to read ahead. With 0 there is no
            thread.
        debug_data_loader: accepted and ignored.
        *args: positional arguments of the loader.
        **kwargs: keyword arguments of the loader.

    Raises:
        ValueError: the queue size is negative.

    Example:
        >>> class Loader(BaseDataLoader):
        ...     def __len__(self):
        ...         return 2
        ...     def _iterate(self):
        ...         yield from ([0, 1], [2, 3])
        >>> class AsyncLoader(AsyncDataLoaderMixin, Loader):
        ...     pass
        >>> loader = AsyncLoader(async_loader_queue_size=4)
        >>> list(loader), list(loader)
        ([[0, 1], [2, 3]], [[0, 1], [2, 3]])
        >>> loader.close_async_loader()
    """

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if async_loader_queue_size < 0:
            raise ValueError(
                f"async_loader_queue_size is {async_loader_queue_size}, expected at "
                "least 0"
            )
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self.started = False
        self._epoch: _Epoch[Any] | None = None
        self._closed = False
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """Ends the thread. The loader yields no batches after this call."""
        self._closed = True
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.close()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size == 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        if self._closed:
            raise RuntimeError("this loader was closed by close_async_loader()")
        self.started = True
        epoch, self._epoch = self._epoch or self._read(), None
        # If the program leaves the loop early, end the thread of this epoch.
        try:
            for batch in epoch:
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            epoch.close()
        if not self._closed:
            self._epoch = self._read()

    def _read(self) -> _Epoch[Any]:
        return _Epoch(
            self._iterate(),  # type: ignore[attr-defined]
            self.async_loader_queue_size,
        )
