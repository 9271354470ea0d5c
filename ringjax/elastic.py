"""Training that starts again after a loss: committed state and the loop around it.

Framework-neutral, with the meaning of Horovod's elastic mode: what a state may hold is
told by `ringjax.torch.elastic` and others. Not here: who is in the job and who replaces
a lost rank; a reset is a shutdown and an init, with whoever then takes part.
"""

from __future__ import annotations

import abc
import copy
import enum
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ringjax import runtime
from ringjax.errors import (
    HostsUpdatedInterrupt,
    InvalidArgument,
    NotInitialized,
    RingjaxError,
)

__all__ = [
    "HostUpdateResult",
    "ObjectState",
    "State",
    "WorkerNotificationManager",
    "notification_manager",
    "run",
    "run_fn",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound="State")


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


class State(abc.ABC):
    """What training needs to go on after a reset; subclasses know what that is.

    Args:
        bcast_object: returns rank 0's object on every rank.
        get_rank: returns this process's rank.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], Any]]) -> None:
        """Adds functions to call after every reset, when rank and size are known again.

        Their place is what depends on the size, such as the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called after the job has come together again, before `sync`."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Remembers a change of the hosts until `check_host_updates`; any thread."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves the state in this process's memory, then `check_host_updates`.

        All ranks call it at the same step. A failure undoes what came after the last
        commit, and each commit copies the state: choose how often.

        Raises:
            HostsUpdatedInterrupt: as `check_host_updates`.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Starts training again, on all ranks, if rank 0 has heard of other hosts.

        Raises:
            HostsUpdatedInterrupt: it has; `run` catches this.
        """
        before = latest = self._last_updated_timestamp
        update = HostUpdateResult.no_update
        while True:
            try:
                timestamp, result = self._host_messages.get_nowait()
            except queue.Empty:
                break
            if timestamp > latest:
                latest = timestamp
                update |= HostUpdateResult(result)
        # Not every rank hears at the same time; what rank 0 knows counts for all.
        before, latest, result = self._bcast_object((before, latest, int(update)))
        self._last_updated_timestamp = latest
        if latest > before:
            raise HostsUpdatedInterrupt(result == HostUpdateResult.removed)

    @abc.abstractmethod
    def save(self) -> None:
        """Keeps a copy of the state for `restore`. A subclass says how."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Brings back what `save` kept last. A subclass says how."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Gives all ranks the state of rank 0. A subclass says how."""

    def reset(self) -> None:  # noqa: B027  (most states have nothing to do)
        """Adapts to another rank or size, after a reset and before `sync`."""


class ObjectState(State):
    """Plain Python objects as attributes, which survive a reset.

    Args:
        bcast_object: returns rank 0's object on every rank.
        get_rank: returns this process's rank.
        **kwargs: the attributes and their first values. They are what is committed;
            attributes that are added later are not.

    Example:
        >>> state = ObjectState(lambda obj: obj, lambda: 0, epoch=0, losses=[])
        >>> state.epoch = 1
        >>> state.commit()
        >>> state.losses.append(0.5)
        >>> state.restore()
        >>> state.epoch, state.losses
        (1, [])
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any],
        get_rank: Callable[[], int],
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state: dict[str, Any] = kwargs
        self._set_attrs(kwargs)
        ObjectState.save(self)

    def save(self) -> None:
        """Keeps the attributes; lists, dicts, sets and arrays are copied."""
        self._saved_state = {name: _kept(obj) for name, obj in self._current().items()}

    def restore(self) -> None:
        """Sets the attributes to what they were at the last `save`."""
        self._set_attrs({name: _kept(obj) for name, obj in self._saved_state.items()})

    def sync(self) -> None:
        """Sets the attributes to rank 0's, and saves them."""
        if self._saved_state:
            self._set_attrs(self._bcast_object(self._current()))
            ObjectState.save(self)

    def _current(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _set_attrs(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def _kept(obj: Any) -> Any:
    """A copy, if it is something that programs change in place and that has copies."""
    if isinstance(obj, list | dict | set | bytearray) or hasattr(obj, "__dlpack__"):
        try:
            return copy.deepcopy(obj)
        except TypeError:  # it holds a lock, a file or the like
            return obj
    return obj


def run_fn(
    func: Callable[Concatenate[_S, _P], _R], reset: Callable[[], None]
) -> Callable[Concatenate[_S, _P], _R]:
    """Wraps a training function so that it starts again after a loss.

    Args:
        func: takes a `State` first. It continues where the state is.
        reset: brings the job together again.

    Returns:
        A function of the same arguments. It synchronises the state, then calls `func`,
        until that returns. After a `RingjaxError` the state goes back to the last
        commit and everything starts again; after a `HostsUpdatedInterrupt` it starts
        again with what is there. Errors in how ringjax is called are not caught.
    """

    @functools.wraps(func)
    def wrapper(state: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        notification_manager.init()
        notification_manager.register_listener(state)
        skip_sync = False
        try:
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except (InvalidArgument, NotInitialized):
                    raise  # the next attempt would fail in the same way
                except RingjaxError:
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                reset()
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def run(
    func: Callable[Concatenate[_S, _P], _R],
) -> Callable[Concatenate[_S, _P], _R]:
    """Decorates a training function: `run_fn` with a shutdown and an init as reset.

    Collectives belong inside the function. A rank that joins calls it with the state as
    its first operation, so the others must not be elsewhere.

    Example:
        >>> import ringjax
        >>> from ringjax import elastic
        >>> @elastic.run
        ... def train(state, steps):
        ...     while state.step < steps:
        ...         state.step += 1
        ...         state.commit()
        ...     return state.step
        >>> train(elastic.ObjectState(lambda obj: obj, ringjax.rank, step=0), 3)
        3
    """
    return run_fn(func, reset)


def reset() -> None:
    """Leaves the job and joins it again, with whoever is there then."""
    runtime.shutdown()
    runtime.init()
