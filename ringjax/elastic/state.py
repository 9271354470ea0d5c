"""The training state. Each commit keeps a snapshot of the state in memory.

`loop.py` calls the training function, and `checkpointer.py` writes the state to disk.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from ringjax import eager, failpoints, runtime
from ringjax.elastic import handlers, sync_plan, transfer, values
from ringjax.elastic.array_files import ArrayFiles, CheckpointLayout
from ringjax.elastic.donation import Donation
from ringjax.elastic.handlers import SamplerStateHandler, StateHandler
from ringjax.elastic.notifications import HostUpdateResult
from ringjax.elastic.values import Attributes
from ringjax.errors import HostsUpdatedInterrupt
from ringjax.world.time_spent import spent


class State:
    """The training state: attributes that `commit` saves and `elastic.run` restores.

    Assign to the attributes and call `commit` at the end of a step, on all ranks. When
    a rank is lost, the other ranks finish the step without that rank, and nothing is
    undone. If this is not possible, or after an exception, all ranks return to the last
    commit. A rank that joins receives the state of rank 0.

    An attribute may be a number, string, list, tuple or dict, an array of numpy or JAX,
    a tree of JAX (parameters, an optimizer's state, a flax TrainState), all nested, or
    an object with `state_dict()` and `load_state_dict()`, like an `ElasticSampler`.

    A commit copies all values except JAX's arrays, which are immutable. The committed
    values need memory in addition to the current values. If the program donates arrays
    of the state to its step (`donate_argnums`), the step frees the memory of these
    arrays. So the first commits copy JAX's arrays, until two commits show whether the
    program donates. If the program donates, every commit copies the arrays. Either
    donate in every step or in no step.

    Args:
        bcast_object: a function that returns rank 0's object on every rank, as in
            Horovod. If None, plain data and arrays are sent, and nothing is pickled.
        get_rank: a function that returns this process's rank, as in Horovod.
        **kwargs: the attributes and their first values, with the same structure on all
            ranks. Attributes that the program adds later are not saved.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> state = ringjax.elastic.State(step=0, losses=[])
        >>> state.step = 1
        >>> state.commit()
        >>> state.losses.append(0.5)
        >>> state.restore()
        >>> state.step, state.losses
        (1, [])
    """

    _allow_pickle = False

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        self._handlers: dict[str, StateHandler] = {}
        self._given_broadcast = bcast_object is not None
        self._bcast_object = bcast_object or eager.broadcast_object
        self._rank = get_rank or runtime.rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], object]] = []
        self._after_save: Callable[[], None] | None = None
        self._change = 0  # the id of an announced change of the ranks, or 0
        self._commits = 0
        self._donation = Donation()
        self._saved_state: Attributes = {}
        for name, value in kwargs.items():
            handler = self._handler_of(value)
            if handler is None:
                self._saved_state[name] = value
            else:
                self._handlers[name] = handler
                if isinstance(handler, SamplerStateHandler):
                    value.wait = self._wait
            super().__setattr__(name, value)
        State.save(self)

    def __setattr__(self, name: str, value: Any) -> None:
        # A subclass may set attributes before it calls this class's __init__.
        if name in self.__dict__.get("_handlers", ()):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    # -- methods that training calls ---------------------------------------------------

    def commit(self) -> None:
        """Saves the state in memory, and then calls `check_host_updates`.

        All ranks call `commit` at the same step. A checkpointer, if there is one, then
        writes this commit to disk.

        Raises:
            HostsUpdatedInterrupt: see `check_host_updates`.
        """
        if runtime.is_newcomer():  # `warm_up` is running, and its changes are undone
            return
        self.save()
        self._commits += 1
        spent.commit()
        failpoints.passing("commit.saved")
        if self._after_save is not None:
            self._after_save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Makes `run` call the training function again on all ranks if ranks change.

        Raises:
            HostsUpdatedInterrupt: ranks join or leave; `run` catches this exception.
        """
        if runtime.elastic():
            self._check_membership()
        else:
            self._check_messages()

    def register_reset_callbacks(self, callbacks: list[Callable[[], object]]) -> None:
        """Adds functions to call after every reset, when rank and size are known again.

        Use callbacks to adapt values that depend on the size, such as the learning
        rate. A rank that joins calls the callbacks only if it has called collectives
        before `run`.
        """
        self._reset_callbacks.extend(callbacks)

    # -- methods that the loop calls ---------------------------------------------------

    def on_reset(self) -> None:
        """Adapts the state to a reset of the job, before `sync`."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Queues a change of hosts for `check_host_updates`, from any thread."""
        self._host_messages.put((timestamp, update_res))

    def save(self) -> None:
        """Waits until the attributes are computed, and saves their values in memory.

        Raises:
            JaxRuntimeError, PeerLost: an attribute could not be computed, for example
                because a rank was lost. The previous commit remains valid.
        """
        # A program may still be computing the state, and may fail because a rank is
        # lost. So wait before replacing any value of the previous commit.
        self._wait()
        runtime.confirm()
        for handler in self._handlers.values():
            handler.save()
        present = self._current()
        copied = self._donation.names_to_copy(present)
        self._saved_state = {
            name: values.kept(value, copied=name in copied)
            for name, value in present.items()
        }

    def restore(self) -> None:
        """Sets the attributes to their values at the last `save`."""
        for handler in self._handlers.values():
            handler.restore()
        # The next step may donate its inputs, so copy the arrays of the snapshot.
        restored = {
            name: values.kept(value, copied=self._donation.is_possible(name))
            for name, value in self._saved_state.items()
        }
        self._set_attrs(restored)
        self._donation.record_inputs(restored)

    def sync(self) -> None:
        """Sets the attributes to rank 0's values, and saves them.

        Raises:
            TypeError, ValueError: the attributes cannot be sent, or have another
                structure on this rank. Sender and receivers raise the error.
            PeerLost: a rank was lost.
        """
        sent = transfer.broadcast_state(
            self._to_be_sent(), allow_pickle=self._allow_pickle
        )
        for name, handler in self._handlers.items():
            if _has_own_sync(handler):
                handler.sync()
            elif sent is not None:
                handler.load(sent.pop(name))
        if sent is not None:
            self._set_attrs(sent)
        alone = self._given_broadcast and self._saved_state
        if alone:
            self._set_attrs(self._bcast_object(self._current()))
        self._reset_samplers()  # the sender resets its samplers, too
        if sent is not None or alone:
            self._donation.discard_inputs()
        State.save(self)

    def make_room(self) -> None:
        """Reserves memory for the state that a joining rank is going to receive."""
        transfer.preallocate(self._to_be_sent(), allow_pickle=self._allow_pickle)

    def reset(self) -> None:
        """Adapts samplers to the new ranks of the job, after a reset, before `sync`."""
        self._reset_samplers()

    # -- methods that a checkpointer calls ---------------------------------------------

    def after_save(self, call: Callable[[], None] | None) -> None:
        """Sets the function that each commit calls, or removes it if `call` is None."""
        self._after_save = call

    def committed(self) -> Attributes:
        """Returns the last commit. The caller must not change the commit."""
        saved = {name: handler.saved() for name, handler in self._handlers.items()}
        return {**self._saved_state, **saved}

    def adopt(self, committed: Attributes) -> None:
        """Replaces the attributes by the values of a checkpoint, and saves the state.

        Attributes that only the state has stay unchanged. Attributes that only the
        checkpoint has are ignored.
        """
        for name, handler in self._handlers.items():
            if name in committed:
                handler.load(committed[name])
        known = {n: v for n, v in committed.items() if n in self._saved_state}
        self._set_attrs(known)
        self._donation.discard_inputs()
        self.save()

    def files(self) -> CheckpointLayout:
        """Returns the layout of checkpoints of this class of state."""
        return ArrayFiles()

    # -- private -----------------------------------------------------------------------

    def _reset_samplers(self) -> None:
        """Makes samplers distribute the remaining samples to the current ranks."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()

    def _handler_of(self, value: object) -> StateHandler | None:
        return handlers.handler_of(value)

    def _current(self) -> Attributes:
        return {name: getattr(self, name) for name in self._saved_state}

    def _to_be_sent(self) -> Attributes:
        """Returns the values that `sync` sends, except those that handlers send."""
        plain = {} if self._given_broadcast else self._current()
        handled = {
            name: handler.state()
            for name, handler in self._handlers.items()
            if not _has_own_sync(handler)
        }
        return plain | handled

    def _set_attrs(self, attributes: Attributes) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)

    def _wait(self) -> None:
        """Waits until all arrays are computed. Raises if a computation has failed."""
        part = values.jax_part()
        if part is not None:
            part.wait(values.jax_arrays(self._current()))

    def _check_membership(self) -> None:
        if runtime.is_newcomer():
            return
        self._wait()
        self._change, epoch = runtime.check_updates()
        plan = sync_plan.current_plan()
        if self._change:
            raise HostsUpdatedInterrupt(skip_sync=False)
        if plan is not None and epoch != plan.epoch:
            # A rank was lost, and the other ranks have continued, so their states are
            # equal. But samplers must distribute the remaining samples again.
            raise HostsUpdatedInterrupt(skip_sync=True)

    def _check_messages(self) -> None:
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
        # Notifications reach ranks at different times, so use those of rank 0 on all
        # ranks.
        before, latest, result = self._bcast_object((before, latest, int(update)))
        self._last_updated_timestamp = latest
        if latest > before:
            raise HostsUpdatedInterrupt(result == HostUpdateResult.removed)


def _has_own_sync(handler: StateHandler) -> bool:
    """Returns whether a program's own handler has replaced `sync`."""
    return type(handler).sync is not StateHandler.sync


class ObjectState(State):
    """A `State` with the name and the required arguments of Horovod's class.

    Args:
        bcast_object: returns rank 0's object on every rank.
        get_rank: returns this process's rank.
        **kwargs: as for `State`.

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
        super().__init__(bcast_object, get_rank, **kwargs)
