"""Runs JAX's own collectives on ringjax: psum and others, between processes on CPUs.

XLA calls them through an MPI, and jaxlib loads the library of that MPI when it is
imported, from the path in MPITRAMPOLINE_LIB. ringjax has such a library. This module
decides whether JAX's client uses it, or Gloo, which is JAX's default. All processes of
`jax.distributed` decide alike.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import backend

from ringjax import _native, stderr
from ringjax.config import Config
from ringjax.errors import RingjaxError
from ringjax.settings import mpi_library
from ringjax.world import devices as cuda_devices
from ringjax.world.device_ranks import DeviceRanks, Pair
from ringjax.world.key_value_store import KeyValueStore
from ringjax.xla import compile_time, jax_client
from ringjax.xla.narrow_types import carrier
from ringjax.xla.priming import Priming

_DEVICE_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_CLOSED = "JAX's collectives have ended on this process"

# The interface of the native core to the MPI library.
_mpi: Any = _native


@dataclass(frozen=True)
class JaxCollectives:
    """The parts behind the collectives of one client of JAX."""

    ranks: DeviceRanks
    mpi: Any  # XLA's object
    undo: Sequence[Callable[[], None]]  # each restores a part of JAX

    def close(self) -> None:
        for function in self.undo:
            function()
        _mpi.mpi_close(_CLOSED)
        self.ranks.close()
        self.mpi.Finalize()


_current: JaxCollectives | None = None
# The key-value store of the newest client, and how many clients have used it.
_last_store: tuple[Any, int] = None, 0


def enable() -> None:
    """Makes JAX's client for CPUs use ringjax if it can, else Gloo.

    Raises:
        RuntimeError: JAX has made its client already.
    """
    backend.register_backend_factory(
        "cpu", _make_client, priority=0, fail_quietly=False
    )
    compile_time.watch()
    atexit.register(_close_at_exit)
    os.register_at_fork(after_in_child=_close_in_child)


def refusal() -> str:
    """Returns why ringjax cannot run JAX's collectives in this process, or ""."""
    if why := mpi_library.problem():
        return why
    try:
        _mpi.mpi_install(str(mpi_library.path()))
    except RuntimeError as error:
        return str(error)
    return ""


def device_count(setting: int, flags: str) -> int:
    """Returns the number of CPU devices that XLA will make for this process.

    Args:
        setting: JAX's setting jax_num_cpu_devices, -1 if it is not set.
        flags: XLA_FLAGS, of which the last flag counts.
    """
    counts = _DEVICE_FLAG.findall(flags)
    return setting if setting >= 0 else int(counts[-1]) if counts else 1


def _make_client() -> Any:
    """Makes JAX's client for CPUs. JAX calls it while it holds a lock."""
    _close()  # a client that jax.extend.backend has cleared may have left it open
    job = jax_client.current_job()
    if job is None or job.processes == 1:
        return jax_client.make_client()
    config, settings = Config.from_env(), jax.config
    prefix = _prefix(job)
    store = KeyValueStore(
        job.store, job.process, job.processes, prefix, config.start_timeout
    )
    devices = device_count(
        settings.values.get("jax_num_cpu_devices", -1), os.environ.get("XLA_FLAGS", "")
    )
    why = _unasked(config, devices) or refusal()
    found = store.exchange("process", {"devices": devices, "refusal": why})
    refused = [
        f"process {i}: {x['refusal']}" for i, x in enumerate(found) if x["refusal"]
    ]
    if not refused:
        counts = [x["devices"] for x in found]
        ranks = DeviceRanks(job.store, prefix, job.process, counts, config)
        return jax_client.make_client(_open(job, ranks))
    # Groups use Gloo without a line if the user has not asked for ringjax.
    if job.process == 0 and config.jax_collectives:
        more = f" (and {len(refused) - 1} more)" if refused[1:] else ""
        stderr.line(
            f"[ringjax] JAX's collectives use Gloo, not ringjax: {refused[0]}{more}"
        )
    return jax_client.make_client(jax_client.make_gloo(job.store))


def _unasked(config: Config, devices: int) -> str:
    """Returns why a group does not use ringjax unless the user asks for it, or ""."""
    if config.jax_collectives:
        return ""
    if cuda_devices.count(config):
        return "its programs may run on CUDA devices"
    return "" if devices == 1 else f"it has {devices} devices"


def _prefix(job: jax_client.JaxJob) -> str:
    """Returns a prefix for keys that no earlier client has used in this store."""
    global _last_store
    store, count = _last_store
    _last_store = job.store, count + 1 if store is job.store else 0
    return f"ringjax/{_last_store[1]}"


def _open(job: jax_client.JaxJob, ranks: DeviceRanks) -> Any:
    """Returns XLA's collectives on the ranks of this process's devices."""
    global _current
    try:
        _mpi.mpi_set_world(job.process, job.processes)
        mpi = jax_client.make_mpi()
        mpi.Init()
    except BaseException:
        ranks.close()
        raise

    def connect(group: Sequence[jax.Device]) -> dict[int, Pair]:
        every = sorted(group[0].client.devices(), key=_owner_and_id)
        if len(every) != ranks.size:
            raise RingjaxError(
                f"XLA has made {len(every)} devices instead of {ranks.size}: set their "
                "number by jax_num_cpu_devices"
            )
        return ranks.connect([every.index(device) for device in group])

    def expect(color: int, key: int, both: Pair) -> None:
        _mpi.mpi_expect(color, key, *both)

    decided = "JAX_THREAD_GUARD" in os.environ
    guard = None if decided else jax_client.guard_thread
    priming = Priming(job.process, connect, expect, guard)
    undo = [jax_client.on_load(priming), jax_client.carry_types(carrier)]
    if guard:
        undo.append(jax_client.unguard_threads)
    _current = JaxCollectives(ranks, mpi, undo)
    return mpi


def _owner_and_id(device: jax.Device) -> tuple[int, int]:
    return device.process_index, device.id


def _close_at_exit() -> None:
    """Leaves the world, after the programs that other processes still need."""
    if _current is None:
        return
    for array in jax.live_arrays():
        # The error of a failed program is raised to those who use its results.
        with contextlib.suppress(Exception):
            array.block_until_ready()
    _close()


def _close() -> None:
    global _current
    if _current is not None:
        _current.close()
        _current = None


def _close_in_child() -> None:
    # Keep the object: its destructors would end what belongs to the parent.
    if _current is not None:
        _current.ranks.close_in_child()
        atexit.unregister(_close_at_exit)
