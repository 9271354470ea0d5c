"""State: what training needs to go on after a failure, kept in memory at each commit.

Not the loop around it, which is `loop.py`, and nothing on disks (`checkpointer.py`).
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from ringjax import eager, failpoints, runtime
from ringjax.elastic import handlers, sync_plan, transfer, values
from ringjax.elastic.array_files import ArrayFiles
from ringjax.elastic.checkpointer import CheckpointLayout
from ringjax.elastic.donation import Donation
from ringjax.elastic.handlers import SamplerStateHandler, StateHandler
from ringjax.elastic.notifications import HostUpdateResult
from ringjax.errors import HostsUpdatedInterrupt


class State:
    """Training state: attributes that `commit` keeps and `elastic.run` brings back.

    Assign to the attributes and call `commit` at the end of a step, on all ranks. When
    a rank is lost, the others finish the step without it and nothing is undone. After
    an exception, or where no such repair is possible, all ranks go back to the last
    commit. A rank that joins gets everything from rank 0.

    An attribute may be a number, string, list, tuple or dict, an array of numpy or JAX,
    a tree of JAX (parameters, an optimizer's state, a flax TrainState), all nested, or
    an object with `state_dict()` and `load_state_dict()`, like an `ElasticSampler`.

    What commit costs: JAX's arrays cannot be changed, so they are kept as they are,
    without a copy; everything else is copied. The price is that what was committed
    stays in memory beside the present values. If the program donates arrays of the
    state to its step (`donate_argnums`), their memory is gone after the step; the first
    commits copy the arrays until it is known, and those of a program that donates are
    copied in every commit. Either donate in every step or in none.

    Args:
        bcast_object: returns rank 0's object on every rank; Horovod's states need it.
            Without it plain data and arrays are sent as they are, never as pickles.
        get_rank: returns this process's rank; also for Horovod's sake.
        **kwargs: the attributes and their first values, of the same structure on all
            ranks. Attributes that are added later are not kept.

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
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._after_save: Callable[[], None] | None = None
        self._change = 0  # the number of an announced change of the ranks
        self._commits = 0
        self._donation = Donation()
        self._saved_state: dict[str, Any] = {}
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
        if name in self.__dict__.get("_handlers", ()):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    # -- what training calls ----------------------------------------------------------

    def commit(self) -> None:
        """Keeps the state in this process's memory, then `check_host_updates`.

        All ranks call it at the same step. Where a checkpointer is in use, this is also
        when it writes.

        Raises:
            HostsUpdatedInterrupt: as `check_host_updates`.
        """
        if runtime.is_newcomer():  # rehearses alone, and what it does is undone
            return
        self.save()
        self._commits += 1
        failpoints.passing("commit.saved")
        if self._after_save is not None:
            self._after_save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Starts the training function again, on all ranks, if ranks come or go.

        Raises:
            HostsUpdatedInterrupt: they do; `run` catches this.
        """
        if runtime.elastic():
            self._check_membership()
        else:
            self._check_messages()

    def register_reset_callbacks(self, callbacks: list[Callable[[], Any]]) -> None:
        """Adds functions to call after every reset, when rank and size are known again.

        Their place is what depends on the size, such as the learning rate. A rank that
        joins calls them only if it has called collectives before `run`.
        """
        self._reset_callbacks.extend(callbacks)

    # -- what the loop calls -----------------------------------------------------------

    def on_reset(self) -> None:
        """Called after the job has come together again, before `sync`."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Remembers a change of the hosts until `check_host_updates`; any thread."""
        self._host_messages.put((timestamp, update_res))

    def save(self) -> None:
        """Keeps the attributes, once all that is being computed of them is there.

        Raises:
            JaxRuntimeError, PeerLost: computing one of them has failed, or came to
                nothing because a rank was lost. What was kept before stays.
        """
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
        """Sets the attributes to what they were at the last `save`."""
        for handler in self._handlers.values():
            handler.restore()
        restored = {
            name: values.kept(value, copied=self._donation.possible(name))
            for name, value in self._saved_state.items()
        }
        self._set_attrs(restored)
        self._donation.witness(restored)

    def sync(self) -> None:
        """Sets the attributes to rank 0's, and saves them.

        Raises:
            TypeError, ValueError: they cannot be sent, or are made in another way here;
                on both ends.
            PeerLost: a rank is gone.
        """
        sent = transfer.broadcast_state(
            self._to_be_sent(), allow_pickle=self._allow_pickle
        )
        for name, handler in self._handlers.items():
            if _is_sent_by_itself(handler):
                handler.sync()
            elif sent is not None:
                handler.load(sent.pop(name))
        if sent is not None:
            self._set_attrs(sent)
        alone = self._given_broadcast and self._saved_state
        if alone:
            self._set_attrs(self._bcast_object(self._current()))
        self._cut()  # on the rank that has sent, too
        if sent is not None or alone:
            self._donation.forget()  # not what a step has left behind
        State.save(self)

    def make_room(self) -> None:
        """Called in a rank that joins, before it does: takes memory for what comes."""
        transfer.preallocate(self._to_be_sent(), allow_pickle=self._allow_pickle)

    def reset(self) -> None:
        """Adapts to another rank or size, after a reset and before `sync`."""
        self._cut()

    # -- what a checkpointer calls -----------------------------------------------------

    def after_save(self, call: Callable[[], None] | None) -> None:
        """Something to do in each commit, when everything is kept."""
        self._after_save = call

    def committed(self) -> dict[str, Any]:
        """What the last commit has kept, to be read only."""
        saved = {name: handler.saved() for name, handler in self._handlers.items()}
        return {**self._saved_state, **saved}

    def adopt(self, committed: dict[str, Any]) -> None:
        """Goes on from what another program has committed, as far as it has it."""
        for name, handler in self._handlers.items():
            if name in committed:
                handler.load(committed[name])
        known = {n: v for n, v in committed.items() if n in self._saved_state}
        self._set_attrs(known)
        self._donation.forget()
        self.save()

    def files(self) -> CheckpointLayout:
        """How a checkpointer writes it."""
        return ArrayFiles()

    # -- inside ------------------------------------------------------------------------

    def _cut(self) -> None:
        """New shares of what samplers have left: no `sync` follows if ranks only go."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()

    def _handler_of(self, value: Any) -> StateHandler | None:
        return handlers.handler_of(value)

    def _current(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _to_be_sent(self) -> dict[str, Any]:
        """All but what is sent in ways of its own."""
        plain = {} if self._given_broadcast else self._current()
        handled = {
            name: handler.state()
            for name, handler in self._handlers.items()
            if not _is_sent_by_itself(handler)
        }
        return plain | handled

    def _set_attrs(self, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)

    def _wait(self) -> None:
        """Until no program computes a part of the state, so that it cannot fail."""
        part = values.jax_part()
        if part is not None:
            part.wait(values.jax_arrays(self._current()))

    def _check_membership(self) -> None:
        if runtime.is_newcomer():  # rehearses alone
            return
        self._wait()
        self._change, epoch = runtime.check_updates()
        plan = sync_plan.current_plan()
        if self._change:
            raise HostsUpdatedInterrupt(skip_sync=False)
        if plan is not None and epoch != plan.epoch:
            # A rank was lost, and the others have gone on: time for new shares.
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
        # Not every rank hears at the same time; what rank 0 knows counts for all.
        before, latest, result = self._bcast_object((before, latest, int(update)))
        self._last_updated_timestamp = latest
        if latest > before:
            raise HostsUpdatedInterrupt(result == HostUpdateResult.removed)


def _is_sent_by_itself(handler: StateHandler) -> bool:
    """Whether a program's own handler has its own way to all ranks."""
    return type(handler).sync is not StateHandler.sync


class ObjectState(State):
    """Plain Python objects as attributes; Horovod's name for a `State` of such.

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
