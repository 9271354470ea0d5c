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
from ringjax.control.session import ranks_text
from ringjax.errors import Mismatch, RingjaxError, StartupError, from_status
from ringjax.world.coordinates import Standing

CONTROL = 1 << 30  # added to the number of a process set: that of its control mesh
# What ranks must agree about, or they would call NCCL differently.
_AGREED = ("fusion", "fusion_small")
_ORDERS_LAUNCHES = 12030  # the driver from which on kernels in order may overlap
_NO_CODE = "none"  # what the core says of its device code if it was built without


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


def _gpu(device: int) -> str:
    """What tells this rank's GPU from all others; nothing if it is not known."""
    found = information()["devices"]
    return str(found[device].get("uuid", "")) if 0 <= device < len(found) else ""


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


def version_text(version: int) -> str:
    """2.28.9 for 22809."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


# -- which device ----------------------------------------------------------------------


def share(local_rank: int, local_size: int, devices: int) -> int | None:
    """The device of this rank if ranks of a host must share out several, else None.

    Example:
        >>> share(local_rank=5, local_size=8, devices=4)
        1
    """
    return local_rank % devices if devices > 1 and local_size > 1 else None


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

    def gone(self) -> dict[int, str]:
        """The ranks that are known to have gone, and why."""

    def log(self, level: str, text: str) -> None:
        """Prints a line, if the level is wanted."""


class Devices:
    """The device communicators of one world: for all of its process sets, or for none.

    Attributes:
        counts: how many devices the driver of each rank has.
        communicators: by number of the process set.
        device: the number of this rank's device, -1 if it has none.
    """

    def __init__(self, home: Home, counts: Sequence[int]) -> None:
        self.counts = list(counts)
        self.communicators: dict[int, _native.CudaCommunicator] = {}
        self.device = -1
        self._home, self._opened, self._reason = home, False, ""

    @property
    def possible(self) -> bool:
        """Whether some rank has a device, so that all ranks must talk about it."""
        return any(self.counts)

    def open(
        self, device: int, why_not: str, sets: Mapping[int, Sequence[int]]
    ) -> None:
        """Builds the communicators of all `sets`; every rank calls it, only once acts.

        Args:
            device: the number of this rank's device; -1: it has none because of
                `why_not`, and then no rank gets communicators.
            sets: the ranks of each process set, alike on all ranks.

        Raises:
            StartupError: the ranks do not fit together, or NCCL failed.
        """
        if self._opened:
            return
        self._opened = True
        try:
            self._reason = self._assemble(device, why_not)
            if not self._reason:
                self.device = device
                for number in sorted(sets):
                    self.add(number, sets[number])
        except BaseException as error:
            self._reason = str(error)
            self.close()
            raise
        if self._reason:
            self._home.log("info", f"no CUDA collectives in jit: {self._reason}")

    def _assemble(self, device: int, why_not: str) -> str:
        """Why there will be no device communicators, or nothing; alike on all ranks."""
        config, version, path = self._home.config, 0, ""
        if device >= 0:
            try:
                version, path = open_library(config.nccl)
            except RingjaxError as error:
                why_not = str(error)
        if os.sep in config.nccl and path and not _same_file(config.nccl, path):
            self._home.log(
                "warning", f"RINGJAX_NCCL is not used: {path} is loaded already"
            )
        mine = {
            "device": why_not or device,
            "nccl": version,
            "path": path,
            "settings": {name: getattr(config, name) for name in _AGREED},
            "packs": information()["device_code"] != _NO_CODE,
            "tls": config.tls,
            "gpu": _gpu(device),
            "shares": shares_gpu(),
        }
        said = self._exchange(mine, "ringjax.init: the devices of all ranks")
        for rank, other in enumerate(said):
            if isinstance(other["device"], str):
                return f"rank {rank} has no CUDA device: {other['device']}"
        _check_versions(said)
        _check_settings(said)
        _check_code(said)
        _check_gpus(said, self._home.standing.hosts)
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
            "debug", f"device {device}, NCCL {version_text(version)} at {path}"
        )
        return ""

    def add(self, number: int, ranks: Sequence[int]) -> None:
        """Builds the communicator of a process set; every rank of the world calls it.

        Raises:
            StartupError: NCCL or a rank failed.
        """
        if self.device < 0:
            return
        what = "the world" if number == 0 else f"process set {number}"
        value: dict[str, str] = {}
        if self._home.rank == ranks[0]:
            try:
                value["id"] = _native.nccl_unique_id().hex()
            except _native.StatusError as error:
                value["error"] = str(error)
        said = self._exchange(value, f"ringjax: the NCCL id of {what}")[ranks[0]]
        if "error" in said:
            raise StartupError(
                f"{what} has no device communicator: rank {ranks[0]}: {said['error']}"
            )
        if self._home.rank in ranks:
            self._build(number, ranks, bytes.fromhex(said["id"]), what)

    def _build(
        self, number: int, ranks: Sequence[int], unique_id: bytes, what: str
    ) -> None:
        control = self._home.connect_control(
            number | CONTROL, ranks, f"{'world' if number == 0 else what} (device)"
        )
        try:
            self.communicators[number] = _native.CudaCommunicator(
                id=number,
                control=control,
                device=self.device,
                unique_id=unique_id,
                options=_options(self._home.config),
            )
        except _native.StatusError as error:
            gone = {r: why for r, why in self._home.gone().items() if r in ranks}
            who = "".join(f"; rank {r} {why}" for r, why in gone.items())
            self._home.disconnect(number | CONTROL)
            raise StartupError(
                f"{what} has no device communicator: rank {self._home.rank}, device "
                f"{self.device}: {error}{who}"
            ) from error

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
        if not self.possible:
            return f"no rank has a CUDA device: {absence(self._home.config)}"
        return self._reason or "it was not built"

    def remove(self, number: int) -> None:
        """Ends the communicator of a process set, if there is one."""
        communicator = self.communicators.pop(number, None)
        if communicator is not None:
            communicator.close()
            self._home.disconnect(number | CONTROL)

    def stop(self, text: str, rank: int) -> None:
        """Fails what is pending. Any thread may do so."""
        for communicator in list(self.communicators.values()):
            communicator.abort(text, rank)

    def close(self) -> None:
        """Ends all communicators, the latest first; the world ends their control."""
        for number in sorted(self.communicators, reverse=True):
            try:
                self.communicators[number].close()
            except _native.StatusError as error:  # what remains must end as well
                self._home.log("warning", f"the end of a device communicator: {error}")
        self.communicators.clear()
        self.device = -1


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


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _check_versions(said: Sequence[dict[str, Any]]) -> None:
    """NCCL itself would refuse, with less to go by."""
    groups: dict[int, list[int]] = {}
    for rank, other in enumerate(said):
        groups.setdefault(int(other["nccl"]), []).append(rank)
    if len(groups) > 1:
        seen = "; ".join(
            f"{ranks_text(ranks)}: {version_text(version)} ({said[ranks[0]]['path']})"
            for version, ranks in groups.items()
        )
        raise StartupError(
            f"all ranks must load the same NCCL, but they have {seen}; install one "
            "version everywhere, or name it by RINGJAX_NCCL"
        )


def _check_settings(said: Sequence[dict[str, Any]]) -> None:
    first = said[0]["settings"]
    for rank, other in enumerate(said):
        for name in _AGREED:
            if other["settings"].get(name) != first.get(name):
                raise StartupError(
                    f"RINGJAX_{name.upper()} must be alike on all ranks: it is "
                    f"{first.get(name)!r} on rank 0 and "
                    f"{other['settings'].get(name)!r} on rank {rank}"
                )


def _check_code(said: Sequence[dict[str, Any]]) -> None:
    """Ranks that pack and ranks that do not would call NCCL differently."""
    without = [rank for rank, other in enumerate(said) if not other["packs"]]
    if 0 < len(without) < len(said):
        raise StartupError(
            f"all ranks must have the same build of ringjax, but {ranks_text(without)} "
            "has none of the device code that the others have"
        )


def _check_gpus(said: Sequence[dict[str, Any]], hosts: Sequence[int]) -> None:
    """NCCL itself would say "Duplicate GPU detected", in its own log only."""
    seen: dict[tuple[str, int], int] = {}
    for rank, other in enumerate(said):
        if not other["gpu"] or other["shares"]:
            continue
        first = seen.setdefault((other["gpu"], hosts[rank]), rank)
        if first != rank:
            raise StartupError(
                f"rank {first} and rank {rank} compute on the same GPU, "
                f"{other['gpu']}; NCCL wants one for each rank: start no more ranks on "
                "a host than it has GPUs, or give each its own by CUDA_VISIBLE_DEVICES"
            )
