"""run: the loop around a training function that lives through the loss of ranks.

In an elastic job of ringrun the runtime repairs the job below, and this loop follows
it: at commits ranks come and go. In any other job a reset is a shutdown and an init,
with whoever then takes part.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from ringjax import errors, runtime
from ringjax.elastic import failures, sync_plan, transfer, values
from ringjax.elastic.checkpointer import Checkpointer
from ringjax.elastic.notifications import notification_manager
from ringjax.elastic.state import State
from ringjax.elastic.sync_plan import HeldState
from ringjax.errors import HostsUpdatedInterrupt, PeerLost, RingjaxError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound=State)
_Trainer = Callable[Concatenate[_S, _P], _R]

# Seconds within which SIGTERMs are one wish: a scheduler signals ringrun and its ranks,
# and ringrun hands it on.
_ONE_WISH = 1.0
_ATTEMPTS = 3  # restarts without a commit between them, for what is no loss of a rank


class _JobLoop(Protocol):
    """How ranks come together, again and again."""

    def begin(self) -> None:
        """Before each call of the training function."""

    def finish(self) -> None:
        """After its end, on this rank."""

    def failed(self, failure: RingjaxError) -> None:
        """After a failure in it, or in `begin`; raises if that was the last attempt."""

    def updated(self, interrupt: HostsUpdatedInterrupt) -> None:
        """Ranks have come or gone."""


class _StaticJobLoop:
    """A job whose ranks leave and come back."""

    def __init__(
        self, state: State, reset: Callable[[], None], load: Callable[[], bool] | None
    ) -> None:
        self._state = state
        self._reset = reset
        self._load = load
        self._first = True
        self._sync = True

    def begin(self) -> None:
        if self._first and self._load is not None and runtime.rank() == 0:
            self._load()
        self._first = False
        if self._sync:
            self._state.sync()

    def finish(self) -> None:
        pass

    def failed(self, failure: RingjaxError) -> None:
        self._state.restore()
        self._again(sync=True)

    def updated(self, interrupt: HostsUpdatedInterrupt) -> None:
        self._again(sync=not interrupt.skip_sync)

    def _again(self, *, sync: bool) -> None:
        self._reset()
        self._state.on_reset()
        self._sync = sync


class _ElasticJobLoop:
    """A job that the runtime repairs and lets grow."""

    def __init__(
        self,
        state: State,
        warm_up: Callable[[Any], Any] | None,
        load: Callable[[], bool] | None,
        save: Callable[[], None] | None,
    ) -> None:
        self._state = state
        self._load = load
        self._save = save
        self._held = HeldState.COMMITTED
        self._first = True
        # What a reset callback calls together with others finds everybody: a program
        # whose callbacks do that calls the same before `run`, where a rank that joins
        # was alone with it.
        self._resets = runtime.has_run_solo()
        self._change = 0
        self._vain = 0
        self._commits = -1
        self._joins = runtime.is_newcomer()
        if self._joins:
            self._held = HeldState.NOTHING
            self._rehearse(warm_up)

    def _rehearse(self, warm_up: Callable[[Any], Any] | None) -> None:
        """Compiles while the others train, and only then asks in."""
        if warm_up is not None:
            with runtime.solo_mode():
                warm_up(self._state)
            self._state.restore()  # it may have trained, and donated
        self._state.make_room()
        runtime.request_admission()

    def begin(self) -> None:
        change, self._change = self._change, 0
        if change:
            writes = self._save is not None and runtime.rank() == 0
            if not runtime.pause(change):
                if self._save is not None and writes:
                    self._save()  # perhaps they have all left
                raise SystemExit(0)  # this rank was asked to leave, and has left
        plan = sync_plan.negotiate(self._held)
        resets, self._resets = self._resets, True
        if self._first:
            self._begin_anew(plan)
        if resets:
            self._state.on_reset()
        else:
            self._state._cut()
        if plan.participants.receivers:
            if runtime.epoch_info().epoch != plan.epoch:
                raise PeerLost("a rank was lost just before the state was sent")
            with transfer.between(plan.participants):
                self._state.sync()
        self._held = HeldState.CURRENT
        self._first = False

    def _begin_anew(self, plan: sync_plan.SyncPlan) -> None:
        """The newest checkpoint at the start of the job, or if it lost its state."""
        found = False
        if self._load is not None and (plan.lost or not self._joins):
            if plan.share[0] != plan.participants.source:
                return  # gets it from there, or learns there that it is gone
            found = self._load()
        if plan.lost and not found:
            # Not a failure that another attempt could mend, so no RingjaxError.
            raise RuntimeError(
                "ringjax.elastic: all ranks that had the training state were lost "
                "before a rank that has joined could get it, and there is no "
                "checkpoint; start the job again (elastic.run(checkpointer=...) keeps "
                "the state for such a case)"
            )

    def finish(self) -> None:
        # All come to the end, or all start again: who goes before the others have done
        # their last step could not do it again with them.
        self._state._wait()
        runtime.check_updates()

    def failed(self, failure: RingjaxError) -> None:
        self._count(failure)
        runtime.restart(str(failure))
        part = values.jax_part()
        if part is not None and failures.stale_programs(failure):
            part.forget_programs()
        self._change = 0
        if self._held is not HeldState.NOTHING:
            self._held = HeldState.COMMITTED
        self._state.restore()

    def _count(self, failure: RingjaxError) -> None:
        if self._commits != self._state._commits or isinstance(failure, PeerLost):
            self._vain = 0
        self._commits = self._state._commits
        self._vain += 1
        if self._vain > _ATTEMPTS:
            raise failure

    def updated(self, interrupt: HostsUpdatedInterrupt) -> None:
        self._change = self._state._change


def _train(
    func: Callable[..., _R], state: State, job: _JobLoop, args: Any, kwargs: Any
) -> _R:
    while True:
        try:
            job.begin()
            result = func(state, *args, **kwargs)
            job.finish()
            return result
        except HostsUpdatedInterrupt as interrupt:
            again: Callable[[], None] = functools.partial(job.updated, interrupt)
        except Exception as error:
            failure = errors.translate(error)
            if failure is None or failures.final(failure):
                raise
            again = functools.partial(job.failed, failure)
        # Outside of the handlers, so that the arrays in their tracebacks are let go.
        again()


def _decorated(
    func: Callable[Concatenate[_S, _P], _R],
    reset: Callable[[], None],
    warm_up: Callable[[Any], Any] | None = None,
    checkpointer: Checkpointer | None = None,
) -> Callable[Concatenate[_S, _P], _R]:
    @functools.wraps(func)
    def wrapper(state: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        notification_manager.init()
        notification_manager.register_listener(state)
        load = None if checkpointer is None else checkpointer.attach(state)
        save = None if checkpointer is None else checkpointer.save_last
        try:
            if not runtime.elastic():
                return _train(
                    *(func, state, _StaticJobLoop(state, reset, load), args, kwargs)
                )
            with _leaving_on_sigterm():
                return _train(
                    *(
                        func,
                        state,
                        _ElasticJobLoop(state, warm_up, load, save),
                        args,
                        kwargs,
                    )
                )
        finally:
            notification_manager.remove_listener(state)
            sync_plan.clear_plan()
            if checkpointer is not None:
                checkpointer.detach()

    return wrapper


def run_fn(
    func: Callable[Concatenate[_S, _P], _R], reset: Callable[[], None]
) -> Callable[Concatenate[_S, _P], _R]:
    """Wraps a training function so that it goes on after a loss.

    Args:
        func: takes a `State` first. It continues where the state is.
        reset: brings the job together again. Not called in an elastic job of ringrun,
            which the runtime brings together.

    Returns:
        A function of the same arguments. It synchronises the state, then calls `func`,
        until that returns. After a `RingjaxError` the state goes back to the last
        commit and everything starts again; after a `HostsUpdatedInterrupt` it starts
        again with what is there. Errors in how ringjax is called are not caught.
    """
    return _decorated(func, reset)


@overload
def run(
    func: Callable[Concatenate[_S, _P], _R], /
) -> Callable[Concatenate[_S, _P], _R]: ...


@overload
def run(
    *,
    warm_up: Callable[[Any], Any] | None = None,
    checkpointer: Checkpointer | None = None,
) -> Callable[
    [Callable[Concatenate[_S, _P], _R]], Callable[Concatenate[_S, _P], _R]
]: ...


def run(
    func: Callable[..., Any] | None = None,
    *,
    warm_up: Callable[[Any], Any] | None = None,
    checkpointer: Checkpointer | None = None,
) -> Any:
    """Decorates a training function so that it lives through the loss of ranks.

    The function takes a `State` first, trains from where the state is, and commits it
    at the end of its steps. Collectives belong inside. What a rank that joins calls
    before runs on it alone; if it calls something, its first operation together with
    the others are the state's reset callbacks, as in a program for Horovod.

    In an elastic job (``ringrun --min-np``) a lost rank costs nothing but its part of
    the step: the others finish it without that rank. At the next commit the function
    starts again with the smaller job, or with ranks that have joined. SIGTERM makes
    this rank leave at its next commit, without an error anywhere; another one, a second
    or more later, ends it. After an exception
    of ringjax all ranks go back to the last commit; after three of them without a
    commit between it is raised.

    In other jobs there is nobody to replace a rank: an exception of ringjax leads back
    to the last commit after a shutdown and an init with whoever then takes part.

    Args:
        func: the function, where `run` is used without parentheses.
        warm_up: called with the state in a rank that joins, before it joins: calls the
            step once, so that it is compiled while the others train. Collectives run
            alone in it, and what it does to the state is undone.
        checkpointer: writes the state to disk at commits and when rank 0 leaves, and
            brings back the newest one when the job starts.

    Returns:
        The function that trains, or, if `func` is not given, the decorator.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> @ringjax.elastic.run
        ... def train(state, steps):
        ...     while state.step < steps:
        ...         state.step += 1
        ...         state.commit()
        ...     return state.step
        >>> train(ringjax.elastic.State(step=0), 3)
        3
    """
    if func is not None:
        return _decorated(func, reset, warm_up, checkpointer)

    def decorate(inner: Callable[..., Any]) -> Callable[..., Any]:
        return _decorated(inner, reset, warm_up, checkpointer)

    return decorate


def reset() -> None:
    """Leaves the job and joins it again, with whoever is there then."""
    runtime.shutdown()
    runtime.init()


@contextlib.contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """Within it the first SIGTERM is a wish to leave; one that comes later means it.

    Only the main thread may say what a signal does; elsewhere nothing changes.
    """
    before = signal.getsignal(signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    if not main or before is None:  # the latter: set by other code than Python's
        yield
        return

    asked = float("inf")

    def leave(signum: int, frame: object) -> None:
        nonlocal asked
        asked = time.monotonic()
        signal.signal(signal.SIGTERM, again)
        # Not here: the interrupted code may hold the locks that this needs.
        threading.Thread(target=runtime.leave_at_next_pause, daemon=True).start()

    def again(signum: int, frame: object) -> None:
        if time.monotonic() - asked < _ONE_WISH:
            return
        signal.signal(signal.SIGTERM, before)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
