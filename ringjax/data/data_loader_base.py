"""Horovod's loaders: batches of a program's own, read ahead by a thread.

Horovod's module path and names; a loader says in `_iterate` what its batches are.
"""

from __future__ import annotations

import abc
import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

_LOOK_EVERY = 0.01  # seconds, while a thread comes to its end


class BaseDataLoader(abc.ABC):
    """Something that gives batches, epoch by epoch.

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
        """How many batches an epoch has."""

    @abc.abstractmethod
    def _iterate(self) -> Iterator[Any]:
        """The batches of an epoch."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """What becomes of a batch before it is handed out; for trainers to override."""
        return batch


class _Epoch:
    """A thread that reads one epoch into a queue.

    A rank's processes end although it may still read: it is a daemon.
    """

    def __init__(self, batches: Iterator[Any], room: int) -> None:
        self._batches = batches
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(room)
        self._unwanted = threading.Event()
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
        return not self._unwanted.is_set()

    def __iter__(self) -> Iterator[Any]:
        while True:
            kind, value = self._queue.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value

    def close(self) -> None:
        """Ends the thread; batches that were read are forgotten."""
        self._unwanted.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):  # it may wait for room
                while True:
                    self._queue.get_nowait()
            self._thread.join(_LOOK_EVERY)


class AsyncDataLoaderMixin:
    """Comes before a `BaseDataLoader` among the base classes, and reads ahead.

    The first iteration starts a thread that reads; when an epoch has been handed out,
    the next one is being read already, as in Horovod.

    Args:
        async_loader_queue_size: how many batches are read ahead; 0: none, and there is
            no thread.
        debug_data_loader: accepted and ignored.
        *args: for the loader, as is `kwargs`.
        **kwargs: see there.

    Raises:
        ValueError: the size is negative.

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
        self._epoch: _Epoch | None = None
        self._closed = False
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """Ends the thread, and waits for that. The loader gives no batches then."""
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
        try:
            for batch in epoch:
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            epoch.close()
        if not self._closed:
            self._epoch = self._read()

    def _read(self) -> _Epoch:
        return _Epoch(
            self._iterate(),  # type: ignore[attr-defined]
            self.async_loader_queue_size,
        )
