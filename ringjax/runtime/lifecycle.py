"""init, shutdown, rank and size, process sets: the process-wide state of ringjax.

The live state of a job is a `world.World`, of which this module holds one instance. The
module imports no framework: modules of higher layers register callbacks for `init` and
`shutdown`. Uncaught exceptions and normal exits are reported to the other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from ringjax import _native, failpoints
from ringjax.config import Config
from ringjax.errors import NotInitialized, RingjaxError, StartupError
from ringjax.settings import init_hooks, same_bits
from ringjax.world import call_records
from ringjax.world import process_set as process_set_module
from ringjax.world.call_records import RecordedWorld
from ringjax.world.communicator_ids import REPLICA_SET
from ringjax.world.process_set import ProcessSet as ProcessSet
from ringjax.world.process_set import global_process_set as global_process_set
from ringjax.world.registry import Registry
from ringjax.world.world import World

if TYPE_CHECKING:
    from ringjax._native import Communicator, EagerLane

_lock = threading.RLock()
_world: World | None = None
replicas = ProcessSet(())
_registry = Registry(global_process_set, replicas)
_on_init: list[Callable[[], None]] = []
_on_shutdown: list[Callable[[], None]] = []
_on_fresh_start: list[Callable[[], None]] = []
_hooks_installed = False
_forked = False


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Joins the job and connects this rank with all other ranks.

    Call it before any other function of ringjax. Rank and size come from ringrun, or
    from the engine that started this process; a process that was started by itself is
    a job of one process. A second call does nothing.

    Args:
        comm: None, or all ranks of the job. For some of the ranks use `process_sets`.
        process_sets: sets to register, equal on all ranks. "dynamic" is accepted as in
            Horovod, but not needed: sets may always be added later.

    Raises:
        ValueError: an argument or an environment variable is wrong, or ringjax is
            initialised already with other settings.
        StartupError: this rank could not join the job.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> ringjax.rank() < ringjax.size()
        True
    """
    with _lock:
        _init(comm, _checked_sets(process_sets))


def _init(comm: Sequence[int] | None, process_sets: list[ProcessSet]) -> None:
    global _world
    _check_fork("init")
    settings = Config.from_env()
    if _world is not None:
        if settings != _world.config:
            raise ValueError(
                "ringjax.init: already initialised with other settings; call "
                "ringjax.shutdown() first"
            )
        _check_comm(comm, _world)
        _register(process_sets)
        return
    if settings.same_bits:
        same_bits.apply()
    _install_hooks()
    target = settings.rank if settings.worker is None else settings.worker
    failpoints.arm(settings.failpoints, target)
    world = World(settings, _registry)
    try:
        # JAX chooses the devices of this rank, and joins the processes of a group.
        if world.devices.possible or settings.group_size > 1:
            _load_jax(needed=settings.group_size > 1)
    except BaseException:
        world.close()
        raise
    if "jax" in sys.modules:
        for watch in init_hooks.watch_jax:
            watch()
    _world = world
    _native.set_world(world)
    try:
        _check_comm(comm, world)
        _register(process_sets)
        for callback in list(_on_init):
            callback()
        if world.devices.possible:  # no effect if a callback has opened devices
            world.open_devices((), "JAX had not been imported before ringjax.init()")
    except BaseException:
        shutdown()
        raise


def _load_jax(*, needed: bool) -> None:
    # JAX must choose its devices before the program uses JAX. But do not load JAX if
    # the program uses PyTorch and has not imported JAX: JAX allocates most of the
    # memory of a device as soon as a program requests its devices.
    if "torch" in sys.modules and "jax" not in sys.modules and not needed:
        return
    if importlib.util.find_spec("jax") is not None:
        for load in init_hooks.load_jax_support:
            load()
    elif needed:
        raise StartupError("RINGJAX_GROUP_SIZE is set, but groups need JAX: install it")


def _checked_sets(process_sets: Sequence[ProcessSet] | str | None) -> list[ProcessSet]:
    if process_sets is None or process_sets == "dynamic":
        return []
    if isinstance(process_sets, str) or not all(
        isinstance(item, ProcessSet) for item in process_sets
    ):
        raise TypeError(
            f"ringjax.init: process_sets must be a list of ProcessSet, "
            f"not {process_sets!r}"
        )
    return list(process_sets)


def _check_comm(comm: Sequence[int] | None, world: World) -> None:
    if comm is None:
        return
    everybody = list(range(world.rank_info.size))
    if not isinstance(comm, Sequence) or sorted(comm) != everybody:
        raise ValueError(
            f"ringjax.init: comm must be None or the list of all {len(everybody)} "
            f"ranks, not {comm!r}; for some of the ranks use process_sets"
        )


def _register(process_sets: Sequence[ProcessSet]) -> None:
    for process_set in process_sets:
        if process_set.process_set_id is None:
            add_process_set(process_set)


def shutdown() -> None:
    """Leaves the job, within a bounded time. Afterwards `init` may be called again.

    After leaving an elastic job, this process cannot join again: `init` fails.

    Does not wait for the other ranks. If they are in a collective that needs this rank,
    the collective fails with an error that names this rank.
    """
    global _world
    with _lock:
        world = _world
        if world is None or _forked:
            return
        if world.failed:
            world.stop()  # pending calls would wait for peers that have dropped us
        for callback in reversed(_on_shutdown):
            # Callbacks may fail because a peer is gone. Leave the job nevertheless.
            with contextlib.suppress(Exception):
                callback()
        _world = None
        _native.set_world(None)
        world.close()


def is_initialized() -> bool:
    """Returns whether `init` has been called, and no `shutdown` has followed."""
    return _world is not None


def current(what: str) -> World:
    """Returns the world of this process. `what` names the calling function in errors.

    Raises NotInitialized before `init`, and RingjaxError in a forked child.
    """
    _check_fork(what)
    return current_or_forked(what)


def observed(what: str) -> RecordedWorld:
    """Returns the world that shows this process's calls.

    That is the world of the job, or before `init` the world apart in which ringjax runs
    JAX's own collectives. Raises as `current` does if there is neither.
    """
    apart = call_records.world_apart()
    return current(what) if _world is not None or apart is None else apart


def current_or_forked(what: str) -> World:
    """Returns the world, even in a forked child, for functions without communication.

    For example, a child that loads data may read the rank of its parent.
    """
    if _world is None:
        raise NotInitialized(f"ringjax.{what}: call ringjax.init() first")
    return _world


process_set_module.rank_of_process = lambda what: current_or_forked(what).rank


def config() -> Config:
    """Returns the settings that `init` has read, or the environment's before `init`."""
    return _world.config if _world is not None else Config.from_env()


def rank() -> int:
    """Returns the rank of this process in the job, from 0 to size() - 1."""
    return current_or_forked("rank").rank_info.rank


def size() -> int:
    """Returns the number of processes in the job."""
    return current_or_forked("size").rank_info.size


def local_rank() -> int:
    """Returns the rank of this process among the processes of its host."""
    return current_or_forked("local_rank").rank_info.local_rank


def local_size() -> int:
    """Returns how many processes of the job run on this host."""
    return current_or_forked("local_size").rank_info.local_size


def cross_rank() -> int:
    """Returns the index of this host among the hosts that have this local rank."""
    return current_or_forked("cross_rank").rank_info.cross_rank


def cross_size() -> int:
    """Returns how many hosts have a process with this process's local rank."""
    return current_or_forked("cross_size").rank_info.cross_size


def is_homogeneous() -> bool:
    """Returns whether every host has the same number of processes."""
    return current_or_forked("is_homogeneous").rank_info.homogeneous


def add_process_set(
    process_set: ProcessSet | Sequence[int], timeout: float | None = None
) -> ProcessSet:
    """Registers a set of ranks. All ranks call this function, in the same order.

    If a set with the same ranks is registered already, the new set gets the id of that
    set.

    Args:
        process_set: the set, or its ranks.
        timeout: see `ProcessSet`; None keeps the limit of `process_set`.

    Returns:
        The set, for the argument `process_set` of collectives.

    Raises:
        ValueError: the set is empty or has ranks that the job does not have, or
            `timeout` is negative or not a number.
        Mismatch: the ranks of the job disagree about the set.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> first = ringjax.add_process_set([0], timeout=10)
        >>> first.timeout
        10.0
    """
    with _lock:
        world = current("add_process_set")
        if not isinstance(process_set, ProcessSet):
            process_set = ProcessSet(process_set, timeout)
        elif timeout is not None:
            process_set.timeout = timeout
        ranks, all_ranks = process_set.ranks, world.rank_info.size
        if not ranks:
            raise ValueError("ringjax.add_process_set: the set has no ranks")
        if ranks[-1] >= all_ranks:
            raise ValueError(
                f"ringjax.add_process_set: rank {ranks[-1]} is not in the job, which "
                f"has {all_ranks} ranks"
            )
        return _registry.add(process_set, world)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set and all sets with its ranks. All ranks call it, in the same order.

    Returns:
        False for the global set and for a set that is not registered.

    Raises:
        Mismatch: the ranks of the job disagree about the set.
    """
    with _lock:
        world = current("remove_process_set")
        return _registry.remove(process_set, world)


def communicator(
    process_set: ProcessSet = global_process_set, op: str = "allreduce"
) -> Communicator:
    """Returns the native communicator of a process set.

    `op` names the calling operation in errors. Raises ValueError if the set is not
    registered, or does not include this rank.
    """
    world, number = _world_and_id(process_set, op)
    return world.communicators[number]


def lane(
    process_set: ProcessSet = global_process_set, op: str = "allreduce"
) -> EagerLane:
    """Returns the eager lane of a process set, on which named operations run.

    Raises as `communicator` does, and ValueError for the replica set.
    """
    # Short operations would take a tenth longer if each called `_world_and_id`. A rank
    # that is a member of its job has a lane exactly for each registered set with it.
    world = _world
    if (
        world is not None
        and not _forked
        and type(process_set) is ProcessSet
        and world.epoch_info is not None
        and (number := process_set.process_set_id) is not None
        and (known := world.lanes.lanes.get(number)) is not None
    ):
        return known
    world, number = _world_and_id(process_set, op)
    if number == REPLICA_SET:
        raise ValueError(f"ringjax.{op}: named operations cannot be of replica_set()")
    return world.lanes.lanes[number]


def _world_and_id(process_set: ProcessSet, op: str) -> tuple[World, int]:
    world = current(op)
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"ringjax.{op}: process_set must be a ProcessSet, not {process_set!r}"
        )
    world.prepare_call(op)
    number = process_set.process_set_id
    if number is None or number not in _registry:
        raise ValueError(
            f"ringjax.{op}: process_set {process_set} is not registered; call "
            f"ringjax.add_process_set first"
        )
    if number not in world.communicators:
        raise ValueError(
            f"ringjax.{op}: process_set {process_set} does not include this rank, "
            f"{world.rank_info.rank}"
        )
    return world, number


def on_init(callback: Callable[[], None]) -> None:
    """Calls `callback` at the end of each `init`, or now if `init` has been called."""
    with _lock:
        _on_init.append(callback)
        if _world is not None and not _forked:
            callback()


def on_shutdown(callback: Callable[[], None]) -> None:
    """Calls `callback` at the start of each `shutdown`, the newest callback first."""
    with _lock:
        _on_shutdown.append(callback)


def on_fresh_start(callback: Callable[[], None]) -> None:
    """Calls `callback` whenever all ranks of an elastic job start again together.

    All ranks start again after a restart and after a pause, but not if their
    collectives continue on fewer ranks after a loss.
    """
    with _lock:
        _on_fresh_start.append(callback)


def run_fresh_start_callbacks() -> None:
    """Calls the functions that `on_fresh_start` has registered. All ranks call this."""
    for callback in list(_on_fresh_start):
        callback()


def _check_fork(what: str) -> None:
    if _forked:
        raise RingjaxError(
            f"ringjax.{what}: this process was forked from one that had called "
            f"ringjax.init(); start such processes with the spawn method"
        )


def _install_hooks() -> None:
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    atexit.register(shutdown)
    os.register_at_fork(after_in_child=_after_fork)
    previous = sys.excepthook

    def report_exception(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # An exception at an interactive prompt does not end the process.
        if _world is not None and not _forked and not hasattr(sys, "ps1"):
            _world.fail(first_line(kind, error))
        previous(kind, error, trace)

    sys.excepthook = report_exception


def first_line(kind: type[BaseException], error: BaseException) -> str:
    """Formats an exception as one line, to send it to the other ranks."""
    try:
        text = str(error)
    except Exception:  # a broken __str__ must not hide the failure
        text = ""
    lines = text.splitlines()
    return f"{kind.__name__}: {lines[0][:900]}" if lines else kind.__name__


def _after_fork() -> None:
    global _forked, _lock
    _lock = threading.RLock()  # no thread of this child can release the old lock
    if _world is not None:
        _forked = True
        _native.set_world(None)
        _world.close_in_child()
