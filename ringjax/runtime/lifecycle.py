"""init, shutdown, who am I, process sets: the one process-wide state of ringjax.

Everything here is about this process's membership; the live state is `world.World`.
Knows no framework: higher levels register what they want done at init and shutdown.
Exceptions that nobody catches are announced to the other ranks; so is a normal exit.
The other modules of ringjax take all of it from __init__.py.
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

from ringjax import failpoints
from ringjax.config import Config
from ringjax.errors import NotInitialized, RingjaxError, StartupError
from ringjax.settings import init_hooks
from ringjax.world.groups import REPLICAS
from ringjax.world.process_set import ProcessSet, global_process_set, this_process
from ringjax.world.registry import Registry
from ringjax.world.world import World

if TYPE_CHECKING:
    from ringjax._native import Communicator, EagerLane

__all__ = [
    "ProcessSet",
    "add_process_set",
    "begin_anew",
    "communicator",
    "config",
    "cross_rank",
    "cross_size",
    "current",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "lane",
    "local_rank",
    "local_size",
    "on_fresh_start",
    "on_init",
    "on_shutdown",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
]

_lock = threading.RLock()
_world: World | None = None
replicas = ProcessSet(())
_registry = Registry(global_process_set, replicas)
_on_init: list[Callable[[], None]] = []
_on_shutdown: list[Callable[[], None]] = []
_on_fresh_start: list[Callable[[], None]] = []
_hooked = False
_forked = False


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Joins the job and connects with all other ranks. Needed before everything else.

    Rank and size come from ringrun, or from the engine that started this process; a
    process started by itself is a job of one. A second call does nothing.

    Args:
        comm: None, or all ranks of the job; for a part of them use `process_sets`.
        process_sets: sets to register at once, the same on all ranks. "dynamic" is
            accepted for Horovod's sake: sets may be added later in any case.

    Raises:
        ValueError: an argument or an environment variable is wrong, or ringjax is
            initialised already with other settings.
        StartupError: the job could not be brought together.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> ringjax.rank() < ringjax.size()
        True
    """
    with _lock:
        _init(comm, _wanted(process_sets))


def _init(comm: Sequence[int] | None, wanted: list[ProcessSet]) -> None:
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
        _register(wanted)
        return
    _install_hooks()
    own = settings.rank if settings.worker is None else settings.worker
    failpoints.arm(settings.failpoints, own)
    world = World(settings, _registry)
    try:
        # Then all ranks must say which ones they use, and groups are a matter of JAX.
        if world.devices.possible or settings.group_size > 1:
            _load_jax(needed=settings.group_size > 1)
    except BaseException:
        world.close()
        raise
    _world = world
    try:
        _check_comm(comm, world)
        _register(wanted)
        for callback in list(_on_init):
            callback()
        if world.devices.possible:  # no effect where a callback has said something else
            world.open_devices((), "JAX had not been imported before ringjax.init()")
    except BaseException:
        shutdown()
        raise


def _load_jax(*, needed: bool) -> None:
    """Where CUDA devices are, JAX must be asked for its own before it is used.

    Not where the program uses PyTorch and, so far, no JAX: the question alone makes JAX
    take most of the device's memory.
    """
    if "torch" in sys.modules and "jax" not in sys.modules and not needed:
        return
    if importlib.util.find_spec("jax") is not None:
        for load in init_hooks.load_jax_support:
            load()
    elif needed:
        raise StartupError("RINGJAX_GROUP_SIZE is set, but groups need JAX: install it")


def _wanted(process_sets: Sequence[ProcessSet] | str | None) -> list[ProcessSet]:
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
    everybody = list(range(world.standing.size))
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
    """Leaves the job; afterwards `init` may be called again. Bounded in time.

    Not in an elastic job: there it says that this worker has finished, for good.

    The other ranks are not waited for. A collective that they still run and that needs
    this rank fails on them with an error that names it.
    """
    global _world
    with _lock:
        world = _world
        if world is None or _forked:
            return
        if world.failed:
            world.stop()  # nobody answers any more
        for callback in reversed(_on_shutdown):
            # What is pending may fail here because a peer is gone; leaving goes on.
            with contextlib.suppress(Exception):
                callback()
        _world = None
        world.close()


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` not since."""
    return _world is not None


def current(what: str) -> World:
    """The live state, for the other modules of ringjax; `what` names the caller.

    Raises:
        NotInitialized: there is none.
    """
    _check_fork(what)
    return begun(what)


def begun(what: str) -> World:
    """As `current`, but also in a forked child, for what is known without the others.

    A process that loads data for this one may ask for its rank.
    """
    if _world is None:
        raise NotInitialized(f"ringjax.{what}: call ringjax.init() first")
    return _world


this_process.rank = lambda what: begun(what).standing.rank


def config() -> Config:
    """The settings in force: those of `init`, before it those of the environment."""
    return _world.config if _world is not None else Config.from_env()


def rank() -> int:
    """This process's number in the job, from 0 to size() - 1."""
    return begun("rank").standing.rank


def size() -> int:
    """How many processes the job has."""
    return begun("size").standing.size


def local_rank() -> int:
    """This process's number among those of its host."""
    return begun("local_rank").standing.local_rank


def local_size() -> int:
    """How many processes of the job run on this host."""
    return begun("local_size").standing.local_size


def cross_rank() -> int:
    """This host's number among the hosts that have a process with my local rank."""
    return begun("cross_rank").standing.cross_rank


def cross_size() -> int:
    """How many hosts have a process with my local rank."""
    return begun("cross_size").standing.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes."""
    return begun("is_homogeneous").standing.homogeneous


def add_process_set(
    process_set: ProcessSet | Sequence[int], timeout: float | None = None
) -> ProcessSet:
    """Registers a set of ranks; every rank of the job calls it, in the same order.

    A set with the ranks of a registered one shares its number, at no cost.

    Args:
        process_set: the set, or its ranks.
        timeout: as in `ProcessSet`; None leaves the one of a set that is given.

    Returns:
        The set, ready for `process_set=`.

    Raises:
        ValueError: it is empty, names ranks that the job does not have, or `timeout` is
            negative or not a number.
        Mismatch: the ranks of the job disagree about it.

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
        ranks, all_ranks = process_set.ranks, world.standing.size
        if not ranks:
            raise ValueError("ringjax.add_process_set: the set has no ranks")
        if ranks[-1] >= all_ranks:
            raise ValueError(
                f"ringjax.add_process_set: rank {ranks[-1]} is not in the job, which "
                f"has {all_ranks} ranks"
            )
        return _registry.add(process_set, world)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a set and all equal ones; every rank of the job calls it, in the same order.

    Returns:
        False for the global set and for one that is not registered.

    Raises:
        Mismatch: the ranks of the job disagree about it.
    """
    with _lock:
        world = current("remove_process_set")
        return _registry.remove(process_set, world)


def communicator(
    process_set: ProcessSet = global_process_set, op: str = "allreduce"
) -> Communicator:
    """The native body of a process set, for the modules that run collectives.

    Raises:
        NotInitialized: before `init`.
        ValueError: the set is not registered, or this rank is not in it.
    """
    world, number = _home(process_set, op)
    return world.communicators[number]


def lane(
    process_set: ProcessSet = global_process_set, op: str = "allreduce"
) -> EagerLane:
    """Where named operations of a process set are submitted. Raises as communicator."""
    world, number = _home(process_set, op)
    if number == REPLICAS:
        raise ValueError(f"ringjax.{op}: named operations cannot be of replica_set()")
    return world.lanes.lanes[number]


def _home(process_set: ProcessSet, op: str) -> tuple[World, int]:
    world = current(op)
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"ringjax.{op}: process_set must be a ProcessSet, not {process_set!r}"
        )
    world.prepare(op)
    number = process_set.process_set_id
    if number is None or number not in _registry:
        raise ValueError(
            f"ringjax.{op}: process_set {process_set} is not registered; call "
            f"ringjax.add_process_set first"
        )
    if number not in world.communicators:
        raise ValueError(
            f"ringjax.{op}: process_set {process_set} does not include this rank, "
            f"{world.standing.rank}"
        )
    return world, number


def on_init(callback: Callable[[], None]) -> None:
    """Calls it at the end of every `init`, and now if that has happened already."""
    with _lock:
        _on_init.append(callback)
        if _world is not None and not _forked:
            callback()


def on_shutdown(callback: Callable[[], None]) -> None:
    """Calls it at the beginning of every `shutdown`, the latest registered first."""
    with _lock:
        _on_shutdown.append(callback)


def on_fresh_start(callback: Callable[[], None]) -> None:
    """Calls it whenever all ranks of an elastic job begin anew together.

    That is after a restart and after a pause, not when calls go on with fewer ranks.
    """
    with _lock:
        _on_fresh_start.append(callback)


def begin_anew() -> None:
    """All ranks do so now: calls what was registered by `on_fresh_start`."""
    for callback in list(_on_fresh_start):
        callback()


def _check_fork(what: str) -> None:
    if _forked:
        raise RingjaxError(
            f"ringjax.{what}: this process was forked from one that had called "
            f"ringjax.init(); start such processes with the spawn method"
        )


def _install_hooks() -> None:
    global _hooked
    if _hooked:
        return
    _hooked = True
    atexit.register(shutdown)
    os.register_at_fork(after_in_child=_after_fork)
    previous = sys.excepthook

    def announce(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # At a prompt an exception ends a line, not the process.
        if _world is not None and not _forked and not hasattr(sys, "ps1"):
            _world.fail(first_line(kind, error))
        previous(kind, error, trace)

    sys.excepthook = announce


def first_line(kind: type[BaseException], error: BaseException) -> str:
    """What the others are told of an exception."""
    try:
        text = str(error)
    except Exception:  # a broken __str__ must not hide the failure
        text = ""
    lines = text.splitlines()
    return f"{kind.__name__}: {lines[0][:900]}" if lines else kind.__name__


def _after_fork() -> None:
    global _forked, _lock
    _lock = threading.RLock()  # whoever held it does not exist here
    if _world is not None:
        _forked = True
        _world.abandon()
