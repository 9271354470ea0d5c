"""Makes XLA's communicators in advance, each with members that are known.

XLA makes the communicator of a group of devices in the first collective of the group.
It then tells MPI neither the members nor their number: in MPI_Comm_split all processes
take part, but XLA calls it on some only. Two processes that run a program of their own
would meet a third one that runs another program, and sum tensors that do not belong
together. So a group is *primed*: when a program is loaded, the members of each new
group connect, and run a small program of theirs whose split is announced. XLA keeps the
communicator, and later programs find it.

Loading is therefore collective: all processes of a group must load its first program,
in the same order as their other programs.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ringjax.errors import PeerLost, RingjaxError, Stalled, Unreachable
from ringjax.xla.hlo_groups import groups_of

_AXIS = "ringjax"
_MODULE = re.compile(r"HloModule ([^\s,]+)")
# The name of the members (WorldApart), with which errors of connecting them begin.
_MEMBERS = re.compile(r"JAX's (processes|devices) [^:]*: ")


class Priming:
    """Primes the groups of the programs that this process loads; see `on_load`.

    Two threads may load programs at the same time. Groups of different programs connect
    independently of each other, each thread in the order of the devices' ids, so that
    no cycle of waiting processes can form as long as all processes load the programs,
    in whichever order. But a thread that loads two programs one after the other must do
    so in the same order on all processes.

    Args:
        process: the index of this process.
        connect: connects the devices of a group, and returns the communicator of each
            device of this process, by its place in the group. All processes of the
            group call it at the same time.
        expect: called as ``expect(color, key, communicator)`` before XLA splits the
            world by this color and key; see `_native.mpi_expect`.
        guard: makes JAX refuse such programs in all threads but the one that calls it.
            None: the user has decided which threads may run them.
    """

    def __init__(
        self,
        process: int,
        connect: Callable[[Sequence[jax.Device]], Mapping[int, Any]],
        expect: Callable[[int, int, Any], None],
        guard: Callable[[], None] | None = None,
    ) -> None:
        self._process, self._connect, self._expect = process, connect, expect
        self._lock = threading.Lock()
        # The groups that are primed, or that a thread is priming, by the devices' ids.
        self._groups: dict[tuple[int, ...], Future[None]] = {}
        # Held from `expect` until XLA has split: groups may have equal colors and keys.
        self._splitting = threading.Lock()
        self._thread = threading.local()
        self._guard = guard
        self._dispatching: threading.Thread | None = None

    def __call__(
        self, devices: Sequence[jax.Device], texts: Callable[[], Sequence[str]]
    ) -> None:
        """Primes the new groups of a program that have a device of this process.

        Args:
            devices: the devices of the program, in the order of its assignment.
            texts: returns the texts of its optimised HLO modules.

        Raises:
            InvalidArgument: a collective of the program is not understood.
            Stalled: processes of a group did not load the program in time.
            PeerLost: a process of a group is gone.
            RingjaxError: another thread runs programs of several processes.
        """
        if getattr(self._thread, "is_priming", False):
            return
        for text in texts():
            groups = [[devices[i] for i in group] for group in groups_of(text)]
            groups.sort(key=_ids)
            for group in groups:
                if any(device.process_index == self._process for device in group):
                    self._check_thread(group, text)
                    self._prime_once(group, text)
                    if self._guard is not None:
                        self._guard()

    def _check_thread(self, group: Sequence[jax.Device], text: str) -> None:
        """Refuses all threads but the first, until that one has ended.

        Two threads may run their programs in different orders on two processes. Nothing
        in a program tells which run it is, so sums of equal shapes would mix.
        """
        this = threading.current_thread()
        with self._lock:
            first = self._dispatching or this
            if self._guard is None or first is this or not first.is_alive():
                self._dispatching = this
                return
        why = (
            f"a thread guard was set in thread {first.name}, which runs such programs. "
            f"Thread {this.name} may run them in another order than on other "
            "processes: run all of them in one thread, or set JAX_THREAD_GUARD=0 if "
            "all processes keep one order"
        )
        raise RingjaxError(_explain(_processes(group), text, why))

    def _prime_once(self, group: Sequence[jax.Device], text: str) -> None:
        """Primes a group, or waits until another thread has primed it."""
        with self._lock:
            found = self._groups.get(_ids(group))
            primed = self._groups.setdefault(_ids(group), Future())
        if found is not None:
            found.result()
            return
        try:
            self._prime(group, text)
        except BaseException as error:
            with self._lock:
                del self._groups[_ids(group)]
            primed.set_exception(error)
            raise
        primed.set_result(None)

    def _prime(self, group: Sequence[jax.Device], text: str) -> None:
        processes = _processes(group)
        try:
            communicators = self._connect(group)
        except Unreachable as error:
            advice = (
                "compiling it is collective: each of them must compile it, and its "
                f"other programs in the same order; {_without_members(error)}"
            )
            raise Stalled(_explain(processes, text, advice), error.ranks) from error
        except PeerLost as error:
            why = _without_members(error)
            raise PeerLost(_explain(processes, text, why), error.rank) from error
        with self._splitting:
            for place, communicator in communicators.items():
                self._expect(group[0].id, place, communicator)
            self._run(group)

    def _run(self, group: Sequence[jax.Device]) -> None:
        """Runs `_check_sum` in a new thread, where no setting of the program applies.

        Such settings are a mesh, a trace or a default device.
        """
        done: Future[None] = Future()

        def run() -> None:
            self._thread.is_priming = True
            try:
                # The program may forbid transfers in all threads.
                with jax.transfer_guard("allow"):
                    _check_sum(group, self._process)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        # A guard that this thread has set would refuse the other thread.
        with jax.thread_guard(False):
            threading.Thread(target=run, name="ringjax-priming", daemon=True).start()
            done.result()


def _processes(group: Sequence[jax.Device]) -> list[int]:
    return list(dict.fromkeys(device.process_index for device in group))


def _ids(group: Sequence[jax.Device]) -> tuple[int, ...]:
    return tuple(device.id for device in group)


def _without_members(error: PeerLost | Unreachable) -> str:
    """Returns the text of an error without its members, which `_explain` names."""
    return _MEMBERS.sub("", str(error), count=1)


def _explain(processes: Sequence[int], text: str, why: str) -> str:
    """Returns the text of an error for processes that did not connect."""
    module = _MODULE.match(text)
    return (
        f"the program {module[1] if module else 'without a name'} communicates between "
        f"processes {', '.join(map(str, processes))}: {why}"
    )


def _check_sum(group: Sequence[jax.Device], process: int) -> None:
    """Runs a program of these devices that sums their places, and checks the sum."""
    mesh = Mesh(np.array(group), (_AXIS,))
    places = PartitionSpec(_AXIS)
    operand = jax.make_array_from_single_device_arrays(
        (len(group),),
        NamedSharding(mesh, places),
        [
            jax.device_put(np.full(1, place, np.int32), device)
            for place, device in enumerate(group)
            if device.process_index == process
        ],
    )
    function = jax.shard_map(
        lambda x: jax.lax.psum(x, _AXIS),
        mesh=mesh,
        in_specs=places,
        out_specs=places,
        check_vma=False,
    )
    result = jax.jit(function)(operand)
    found = {int(np.asarray(shard.data)[0]) for shard in result.addressable_shards}
    expected = sum(range(len(group)))
    if found != {expected}:
        raise RingjaxError(
            f"the devices {list(_ids(group))} sum their places to "
            f"{found} instead of {expected}: their communicator has other members"
        )
