"""The device side of a world: which NCCL, which device, and its communicators.

NCCL is opened at run time, jax's copy if there is one, so that both order their kernels
alike. Each process set gets a device communicator beside the one over sockets, which it
uses as its control plane: a small mesh of its own. Knows no framework:
`xla/jax_private.py` says which device this rank computes on. What is sent is decided in
the native core.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ringjax import _native
from ringjax.config import Config
from ringjax.errors import Mismatch, RingjaxError, StartupError, from_status
from ringjax.world import controls, device_agreement
from ringjax.world.coordinates import Standing
from ringjax.world.device_agreement import version_text
from ringjax.world.groups import REPLICAS

_ORDERS_LAUNCHES = 12030  # the driver from which on kernels in order may overlap
_NO_CODE = "none"  # the core says so of its device code if it was built without


# -- what is here ----------------------------------------------------------------------


def information() -> dict[str, Any]:
    """The driver, its devices, the device code, the NCCL that is open. Never raises."""
    return _native.cuda_info()


def wheel_library() -> str | None:
    """The libnccl.so.2 of NVIDIA's wheels, which are a namespace without a module."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except (ImportError, ValueError):
        return None
    for folder in (spec and spec.submodule_search_locations) or ():
        path = os.path.join(folder, "lib", "libnccl.so.2")
        if os.path.isfile(path):
            return path
    return None


def open_library(setting: str) -> tuple[int, str]:
    """Opens NCCL: the copy mapped already, `setting`, the wheel's, the system's.

    Returns:
        Its version, 22809 for 2.28.9, and the path of the file.

    Raises:
        RingjaxError: there is none, or it is too old.
    """
    why: list[RingjaxError] = []
    for path in _candidates(setting):
        try:
            version, mapped = _native.open_nccl(path)
            return int(version), str(mapped)
        except _native.StatusError as error:
            why.append(from_status(error))
    # The system's absence says less than what is wrong with a file that was found.
    raise why[0]


def _candidates(setting: str) -> list[str]:
    """The paths to try, in order; the copy that is mapped comes before all of them."""
    # Or kernels of two communicators on one device may wait for each other. Not before
    # 12.3: there they run one after the other in the order of the host's calls, which
    # between compiled programs and the eager lane differs from rank to rank.
    before = 0 < information().get("driver", 0) < _ORDERS_LAUNCHES
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "0" if before else "1")
    # Or the first operation of each communicator allocates and waits for its peers,
    # in an order that may differ from rank to rank as well.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    return [setting] if setting else [*filter(None, [wheel_library()]), ""]


def shares_gpu() -> bool:
    """Whether somebody has told NCCL that ranks may share a GPU, as tests do."""
    told = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "") not in ("", "0")
    return told or bool(os.environ.get("NCCL_HOSTID"))


def memory_fraction() -> str:
    """The part of the memory that JAX takes at once, where that is 0.9 or more."""
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"):
        return ""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        value = os.environ.get(name, "")
        with contextlib.suppress(ValueError):  # JAX says what is wrong with it
            if value and float(value) >= 0.9:
                return value
    return ""


def _gpus(devices: Sequence[int]) -> list[str]:
    """What tells this rank's GPUs from all others; nothing if it is not known."""
    found = information()["devices"]
    return [
        str(found[device].get("uuid", "")) if device < len(found) else ""
        for device in devices
    ]


def lane_options(config: Config, device: int) -> dict[str, Any]:
    """What an eager lane needs to take CUDA tensors; it opens NCCL when they come.

    Args:
        config: the settings of this rank.
        device: the one for a rank that joins before it has any tensor; -1: none.
    """
    return {
        **_options(config),
        "device": device,
        "nccl": _candidates(config.nccl),
        "shares": int(shares_gpu()),
    }


def _options(config: Config) -> dict[str, Any]:
    """Those of every device communicator."""
    return {
        "start_timeout": config.start_timeout,
        "fusion": config.fusion,
        "fusion_small": config.fusion_small,
        "comm_stream": int(config.comm_stream),
    }


# -- which device ----------------------------------------------------------------------


ALL = 0  # devices per rank: every one that it sees


def share(
    local_rank: int, local_size: int, devices: int, each: int = 1
) -> tuple[int, ...] | None:
    """The devices of this rank if ranks of a host must share them out, else None.

    Args:
        local_rank: number of this rank on its host.
        local_size: ranks there.
        devices: that it sees.
        each: how many a rank is to have; `ALL`.

    Example:
        >>> share(local_rank=5, local_size=8, devices=4), share(1, 2, 8, each=4)
        ((1,), (4, 5, 6, 7))
    """
    if each == ALL or devices <= each or (each == 1 and local_size == 1):
        return None
    places = max(1, devices // each)
    first = local_rank % places * each
    return tuple(range(first, first + each))


# -- communicators ---------------------------------------------------------------------


class Home(Protocol):
    """What `Devices` needs of its world."""

    config: Config
    standing: Standing

    @property
    def rank(self) -> int:
        """This rank."""

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Gives every rank the values of all ranks."""

    def connect_control(
        self, number: int, ranks: Sequence[int], name: str
    ) -> _native.Communicator:
        """Builds a watched communicator of small links between `ranks`."""

    def disconnect(self, number: int) -> None:
        """Ends it."""

    def departed_ranks(self) -> dict[int, str]:
        """The ranks that are known to have gone, and why."""

    def log(self, level: str, text: str) -> None:
        """Prints a line, if the level is wanted."""


class Devices:
    """The device communicators of one world: for all of its process sets, or for none.

    Attributes:
        counts: how many devices the driver of each rank has.
        communicators: by number of the process set, one for each of `numbers`.
        numbers: of this rank's devices, in an order that ranks share: the first of all
            are joined, the second, and so on.
    """

    def __init__(self, home: Home, counts: Sequence[int]) -> None:
        self.counts = list(counts)
        self.communicators: dict[int, list[_native.CudaCommunicator]] = {}
        self.numbers: tuple[int, ...] = ()
        self._home, self._opened, self._reason = home, False, ""

    @property
    def possible(self) -> bool:
        """Whether some rank has a device, so that all ranks must talk about it."""
        return any(self.counts)

    def open(
        self, numbers: Sequence[int], why_not: str, sets: Mapping[int, Sequence[int]]
    ) -> None:
        """Builds the communicators of all `sets`; every rank calls it, only once acts.

        Args:
            numbers: of this rank's devices; if it has none, because of `why_not`, no
                rank gets communicators.
            sets: the ranks of each process set, alike on all ranks.

        Raises:
            StartupError: the ranks do not fit together, or NCCL failed.
        """
        if self._opened:
            return
        self._opened = True
        try:
            self._reason = self._assemble(tuple(numbers), why_not)
            if not self._reason:
                self.numbers = tuple(numbers)
                for number in sorted(sets):
                    self.add(number, sets[number])
        except BaseException as error:
            self._reason = str(error)
            self.close()
            raise
        if self._reason:
            asked = self._home.config.devices_per_rank != 1  # somebody expects them
            text = f"no CUDA collectives in jit: {self._reason}"
            self._home.log("warning" if asked else "info", text)

    def _assemble(self, numbers: tuple[int, ...], why_not: str) -> str:
        """Why there will be no device communicators, or nothing; alike on all ranks."""
        config, version, path = self._home.config, 0, ""
        if numbers:
            try:
                version, path = open_library(config.nccl)
            except RingjaxError as error:
                why_not = str(error)
        if os.sep in config.nccl and path and not _same_file(config.nccl, path):
            self._home.log(
                "warning", f"RINGJAX_NCCL is not used: {path} is loaded already"
            )
        mine = {
            "device": why_not or list(numbers),
            "wanted": config.devices_per_rank,
            "nccl": version,
            "path": path,
            "settings": {s: getattr(config, s) for s in device_agreement.SETTINGS},
            "packs": information()["device_code"] != _NO_CODE,
            "tls": config.tls,
            "gpu": _gpus(numbers),
            "shares": shares_gpu(),
        }
        said = self._exchange(mine, "ringjax.init: the devices of all ranks")
        for rank, other in enumerate(said):
            if isinstance(other["device"], str):
                return f"rank {rank} has no CUDA device: {other['device']}"
        device_agreement.check(said, self._home.standing.hosts)
        required = any(other["tls"] == "required" for other in said)
        if required and len(set(self._home.standing.hosts)) > 1:
            return (
                "RINGJAX_TLS is 'required', and NCCL does not encrypt what goes from "
                "host to host; set RINGJAX_TLS=auto if nobody can listen there"
            )
        if not mine["packs"]:
            self._home.log(
                "warning",
                "this ringjax was built without device code: no tensors are packed, "
                "compression and scaling do not work on CUDA devices, and results of a "
                "step that a lost rank has spoilt are not marked as NaN",
            )
        if greed := memory_fraction():
            self._home.log(
                "warning",
                f"JAX takes {greed} of the GPU's memory, and NCCL needs some hundred "
                "MB of the rest for each process set: set "
                "XLA_PYTHON_CLIENT_MEM_FRACTION to 0.85 or less if it finds none",
            )
        self._home.log(
            "debug", f"{_name(numbers)}, NCCL {version_text(version)} at {path}"
        )
        return ""

    def add(self, number: int, ranks: Sequence[int]) -> None:
        """Builds the communicator of a process set; every rank of the world calls it.

        Raises:
            StartupError: NCCL or a rank failed.
        """
        if not self.numbers:
            return
        what = "the world" if number == 0 else f"process set {number}"
        value: dict[str, Any] = {}
        if self._home.rank == ranks[0]:
            try:
                value["ids"] = [_native.nccl_unique_id().hex() for _ in self.numbers]
            except _native.StatusError as error:
                value["error"] = str(error)
        said = self._exchange(value, f"ringjax: the NCCL id of {what}")[ranks[0]]
        if "error" in said:
            raise StartupError(
                f"{what} has no device communicator: rank {ranks[0]}: {said['error']}"
            )
        if self._home.rank in ranks:
            self._build(number, ranks, [bytes.fromhex(i) for i in said["ids"]], what)

    def _controls(self, number: int) -> list[int]:
        return [controls.number_of(number, i) for i in range(len(self.numbers))]

    def _build(
        self, number: int, ranks: Sequence[int], unique_ids: list[bytes], what: str
    ) -> None:
        name = "world" if number == 0 else what
        try:
            small = [
                self._home.connect_control(
                    each,
                    ranks,
                    f"{name} (device{f' {i}' if len(self.numbers) > 1 else ''})",
                )
                for i, each in enumerate(self._controls(number))
            ]
            self.communicators[number] = _native.connect_devices(
                id=number,
                controls=small,
                devices=self.numbers,
                unique_ids=unique_ids,
                options=_options(self._home.config),
            )
        except BaseException as error:  # of some of the devices there are controls
            gone = {
                r: why for r, why in self._home.departed_ranks().items() if r in ranks
            }
            who = "".join(f"; rank {r} {why}" for r, why in gone.items())
            self._disconnect(number)
            if not isinstance(error, _native.StatusError):
                raise
            raise StartupError(
                f"{what} has no device communicator: rank {self._home.rank}, "
                f"{_name(self.numbers)}: {error}{who}"
            ) from error

    def _disconnect(self, number: int) -> None:
        for each in self._controls(number):
            self._home.disconnect(each)

    def _exchange(self, value: dict[str, Any], what: str) -> list[Any]:
        try:
            said = self._home.exchange(value | {"what": what}, what)
        except RingjaxError as error:
            raise StartupError(str(error)) from error
        for rank, other in enumerate(said):
            if not isinstance(other, dict) or other.get("what") != what:
                raise Mismatch(f"{what}: rank {rank} calls {other}")
        return said

    def problem(self, number: int) -> str:
        """Why a process set has no device communicator; nothing if it has one."""
        if number in self.communicators:
            return ""
        if number == REPLICAS:
            return "groups of processes (--group-size) are for CPU devices"
        if not self.possible:
            return f"no rank has a CUDA device: {absence(self._home.config)}"
        return self._reason or "it was not built"

    def remove(self, number: int) -> None:
        """Ends the communicator of a process set, if there is one."""
        communicators = self.communicators.pop(number, [])
        for communicator in communicators:
            communicator.close()
        if communicators:
            self._disconnect(number)

    def stop(self, text: str, rank: int) -> None:
        """Fails what is pending. Any thread may do so."""
        for communicator in self.everyone():
            communicator.abort(text, rank)

    def everyone(self) -> list[_native.CudaCommunicator]:
        """The communicators of all process sets."""
        return [one for each in list(self.communicators.values()) for one in each]

    def close(self) -> None:
        """Ends all communicators, the latest first; the world ends their control."""
        for number in sorted(self.communicators, reverse=True):
            for communicator in self.communicators[number]:
                try:
                    communicator.close()
                except _native.StatusError as error:  # what remains must end as well
                    text = f"the end of a device communicator: {error}"
                    self._home.log("warning", text)
        self.communicators.clear()
        self.numbers = ()


def absence(config: Config) -> str:
    """Why this rank's driver has no device; nothing if it has some."""
    if not config.gpu:
        return "RINGJAX_GPU is 0"
    found = information()
    if found["devices"]:
        return ""
    return str(found["driver_error"] or "the driver shows no device")


def count(config: Config) -> int:
    """How many devices this rank's driver shows; 0 if none is wanted."""
    return len(information()["devices"]) if config.gpu else 0


def _name(numbers: Sequence[int]) -> str:
    several = "s" if len(numbers) > 1 else ""
    return f"device{several} {', '.join(map(str, numbers))}"


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
