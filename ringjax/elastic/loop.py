"""`run` calls a training function again after ranks are lost, join or leave.

In an elastic job of ringrun, the runtime repairs the job after a loss, and ranks join
and leave at commits. In any other job, all ranks shut down and call `init` again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from ringjax import errors, runtime
from ringjax.elastic import sync_plan, transfer, values
from ringjax.elastic.checkpointer import Checkpointer
from ringjax.elastic.notifications import notification_manager
from ringjax.elastic.state import State
from ringjax.elastic.sync_plan import HeldState
from ringjax.errors import HostsUpdatedInterrupt, PeerLost, RingjaxError
from ringjax.world.time_spent import spent

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound=State)

# A scheduler may send SIGTERM both to ringrun and to its ranks, and ringrun forwards
# the signal. So several SIGTERMs within this number of seconds count as one request.
_SIGTERM_GRACE = 1.0
_MAX_ATTEMPTS = 3  # most consecutive restarts without a commit or a loss


class _StaticJobLoop:
    """Adapts to changes by `shutdown` and `init` on all ranks, in jobs without repair.

    `_repeat` calls `begin` before the training function, `finish` after the training
    function has returned, `failed` after an error, and `updated` if ranks change.
    """

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
        self._restart(sync=True)

    def updated(self, interrupt: HostsUpdatedInterrupt) -> None:
        self._restart(sync=not interrupt.skip_sync)

    def _restart(self, *, sync: bool) -> None:
        self._reset()
        self._state.on_reset()
        self._sync = sync


class _ElasticJobLoop:
    """Adapts to changes in a job that the runtime repairs, and that ranks can join.

    `_StaticJobLoop` describes when each method is called.
    """

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
        # Reset callbacks may run collectives, which all ranks must call together. When
        # a rank joins, the other ranks run their callbacks. The joining rank runs its
        # callbacks, too, if it called collectives before `run`, which ran on this rank
        # alone (solo mode).
        self._resets = runtime.has_run_solo()
        self._change = 0
        self._attempts = 0
        self._commits = -1
        self._joins = runtime.is_newcomer()
        if self._joins:
            self._held = HeldState.NOTHING
            self._prepare_to_join(warm_up)

    def _prepare_to_join(self, warm_up: Callable[[Any], Any] | None) -> None:
        """Runs `warm_up` and allocates memory, and then requests to become a member."""
        if warm_up is not None:
            with runtime.solo_mode():
                warm_up(self._state)
            # Undo warm_up, which may have trained and donated arrays.
            self._state.restore()
        self._state.make_room()
        # The hint of ringrun about spares is for programs that have a step to compile.
        cold = warm_up is None and values.jax_part() is not None
        runtime.request_admission(cold=cold)

    def begin(self) -> None:
        change, self._change = self._change, 0
        if change:
            writes = self._save is not None and runtime.rank() == 0
            # False means that this rank has left the job, as requested.
            if not runtime.pause(change):
                if self._save is not None and writes:
                    self._save()  # save, because all other ranks may have left, too
                raise SystemExit(0)
        plan = sync_plan.negotiate(self._held)
        resets, self._resets = self._resets, True
        if self._first:
            self._load_checkpoint(plan)
        if resets:
            self._state.on_reset()
        else:
            self._state._reset_samplers()
        if plan.participants.receivers:
            if runtime.epoch_info().epoch != plan.epoch:
                raise PeerLost("a rank was lost just before the state was sent")
            with transfer.between(plan.participants):
                self._state.sync()
        self._held = HeldState.CURRENT
        self._first = False

    def _load_checkpoint(self, plan: sync_plan.SyncPlan) -> None:
        """Loads the newest checkpoint when the job starts, or no rank has the state."""
        found = False
        if self._load is not None and (plan.lost or not self._joins):
            if plan.position[0] != plan.participants.source:
                return  # the source sends the checkpoint, or an error
            found = self._load()
        if plan.lost and not found:
            # Another attempt could not help, so the error is no RingjaxError.
            raise RuntimeError(
                "ringjax.elastic: all ranks that had the training state were lost "
                "before a rank that has joined could get it, and there is no "
                "checkpoint; start the job again (elastic.run(checkpointer=...) keeps "
                "the state for such a case)"
            )

    def finish(self) -> None:
        # If this rank ended before other ranks have finished their last step, it could
        # not repeat that step with them. So all ranks end together, or start again.
        self._state._wait()
        runtime.check_updates()

    def failed(self, failure: RingjaxError) -> None:
        self._count_attempt(failure)  # raises the error after too many attempts
        runtime.restart(str(failure))
        part = values.jax_part()
        # The shape of an allgather's result depends on the number of ranks, so programs
        # with an allgather cannot run in a smaller or larger job.
        if part is not None and "trace it again" in str(failure):
            part.forget_programs()
        self._change = 0
        if self._held is not HeldState.NOTHING:
            self._held = HeldState.COMMITTED
        self._state.restore()

    def _count_attempt(self, failure: RingjaxError) -> None:
        if self._commits != self._state._commits or isinstance(failure, PeerLost):
            self._attempts = 0
        self._commits = self._state._commits
        self._attempts += 1
        if self._attempts > _MAX_ATTEMPTS:
            raise failure

    def updated(self, interrupt: HostsUpdatedInterrupt) -> None:
        self._change = self._state._change


def _repeat(train: Callable[[], _R], job: _StaticJobLoop | _ElasticJobLoop) -> _R:
    part = ""  # TimeSpent counts the time until the next step here, except at first
    while True:
        try:
            with spent.on(part) if part else contextlib.nullcontext():
                job.begin()
            spent.commit()
            result = train()
            job.finish()
            return result
        except HostsUpdatedInterrupt as interrupt:
            recover: Callable[[], None] = functools.partial(job.updated, interrupt)
            # Without a change of members that the coordinator announced, a rank was
            # lost, and the others continued.
            part = "losses" if interrupt.skip_sync else "joins"
        except Exception as error:
            failure = errors.translate(error)
            if failure is None or _is_final(failure):
                raise
            recover = functools.partial(job.failed, failure)
            spent.repeat()
            part = "losses"
        # Recover outside of the except clauses, because the traceback keeps arrays of
        # the step alive.
        with spent.on(part):
            recover()


def _is_final(failure: RingjaxError) -> bool:
    """Returns whether another attempt would fail in the same way."""
    final = errors.InvalidArgument | errors.NotInitialized | errors.Fenced
    return isinstance(failure, final)


def _decorate(
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
        train = functools.partial(func, state, *args, **kwargs)
        try:
            if not runtime.elastic():
                return _repeat(train, _StaticJobLoop(state, reset, load))
            with _leaving_on_sigterm():
                return _repeat(train, _ElasticJobLoop(state, warm_up, load, save))
        finally:
            notification_manager.remove_listener(state)
            sync_plan.clear_plan()
            if checkpointer is not None:
                checkpointer.detach()

    return wrapper


def run_fn(
    func: Callable[Concatenate[_S, _P], _R], reset: Callable[[], None]
) -> Callable[Concatenate[_S, _P], _R]:
    """Wraps a training function so that training continues after the loss of a rank.

    Args:
        func: a function that takes a `State` as its first argument, and continues from
            that state.
        reset: connects the ranks again. `reset` is not called in an elastic job of
            ringrun, where the runtime connects the ranks.

    Returns:
        A function of the same arguments, which synchronises the state and calls `func`
        until `func` returns. After a `RingjaxError`, the state returns to the last
        commit before the next call. After a `HostsUpdatedInterrupt`, the state stays
        unchanged. Errors in the arguments of ringjax's functions are raised.
    """
    return _decorate(func, reset)


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
    """Decorates a training function so that it survives the loss of ranks.

    The function takes a `State` as its first argument, continues from that state, and
    commits the state at the end of each step. The function is called again after each
    change of the ranks, so its loops must continue from the state. Call collectives
    inside of the function: collectives before the function run, on a joining rank, on
    that rank alone. After such collectives, the reset callbacks of the state also run
    on the joining rank, together with the other ranks, as in Horovod.

    In an elastic job (``ringrun --min-np``), a lost rank costs only its part of the
    step: the other ranks finish the step without the lost rank. At the next commit, the
    function starts again with the remaining ranks and with ranks that have joined.
    SIGTERM makes this rank leave at its next commit, without an error on any rank; a
    further SIGTERM, a second or more later, ends the process. After an exception of
    ringjax, all ranks return to the last commit. The fourth exception without a commit
    in between is raised.

    In any other job, no rank can be replaced. After an exception of ringjax, all ranks
    shut down, call `init` again, and return to the last commit.

    Args:
        func: the function, if `run` is used without parentheses.
        warm_up: called with the state in a joining rank, before the rank joins.
            `warm_up` should call the step once, so that the step is compiled while the
            other ranks train. Collectives in `warm_up` run on this rank alone, and
            changes of the state are undone.
        checkpointer: writes the state to disk at commits and when rank 0 leaves, and
            loads the newest checkpoint when the job starts.

    Returns:
        The function that trains, or the decorator if `func` is not given.

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

    def decorate(inner: Callable[..., Any]) -> Callable[..., Any]:
        return _decorate(inner, reset, warm_up, checkpointer)

    return decorate if func is None else decorate(func)


def reset() -> None:
    """Calls `shutdown` and `init`. The new job has all ranks that call `init`."""
    runtime.shutdown()
    runtime.init()


@contextlib.contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """Makes the first SIGTERM a request to leave. A later SIGTERM ends the process.

    Only the main thread may set handlers. In other threads, the context has no effect.
    """
    before = signal.getsignal(signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    if not main or before is None:  # None means that C code has set the handler
        yield
        return

    requested = float("inf")

    def leave(signum: int, frame: object) -> None:
        nonlocal requested
        requested = time.monotonic()
        signal.signal(signal.SIGTERM, end)
        # Send the request in a thread, because the interrupted code may hold its locks.
        threading.Thread(target=runtime.leave_at_next_pause, daemon=True).start()

    def end(signum: int, frame: object) -> None:
        if time.monotonic() - requested < _SIGTERM_GRACE:
            return
        signal.signal(signal.SIGTERM, before)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
