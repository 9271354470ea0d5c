"""CUDA devices of a world: the NCCL library, this rank's devices, their communicators.

NCCL is loaded at run time. If JAX has loaded a copy, ringjax uses that copy, so that
JAX and ringjax launch their kernels in one order. Besides its host communicator, each
process set has a device communicator for each device of a rank, and for each of these a
small control communicator, over which the native core compares calls. This module
imports no framework: `xla/jax_private.py` finds the devices that this rank uses.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ringjax import _native
from ringjax.config import Config
from ringjax.errors import Mismatch, RingjaxError, StartupError, from_status
from ringjax.world import communicator_ids, device_compatibility
from ringjax.world.device_compatibility import DeviceReport, version_text
from ringjax.world.rank_info import RankInfo

_Value = TypeVar("_Value")
_Report = TypeVar("_Report", bound=Mapping[str, object])
_LAUNCH_ORDER_DRIVER = 12030  # CUDA 12.3, the first whose ordered kernels may overlap
_NO_DEVICE_CODE = "none"  # `device_code` of a core that was built without device code


# -- what this machine has -------------------------------------------------------------


def information() -> dict[str, Any]:
    """Describes driver, devices and device code; see `build_info`. Never raises."""
    return _native.cuda_info()


def wheel_library() -> str | None:
    """Returns the path of libnccl.so.2 in NVIDIA's wheel, or None if it is missing."""
    try:
        # nvidia.nccl is a namespace package, which has folders but no module to import.
        spec = importlib.util.find_spec("nvidia.nccl")
    except (ImportError, ValueError):
        return None
    for folder in (spec and spec.submodule_search_locations) or ():
        path = os.path.join(folder, "lib", "libnccl.so.2")
        if os.path.isfile(path):
            return path
    return None


def open_library(setting: str) -> tuple[int, str]:
    """Opens NCCL: the copy that this process has loaded, else a copy that it loads.

    It loads the copy at `setting` or, if that is empty, in the wheel or of the system.
    Returns the version, 22809 for 2.28.9, and the path of the file. Raises RingjaxError
    if no library was found, or if its version is too old.
    """
    errors: list[RingjaxError] = []
    for path in _candidates(setting):
        try:
            version, loaded_path = _native.open_nccl(path)
            return int(version), str(loaded_path)
        except _native.StatusError as error:
            errors.append(from_status(error))
    # If a library exists, the first error is about it: only the last candidate, the
    # system's library, may be missing.
    raise errors[0]


def _candidates(setting: str) -> list[str]:
    """Returns paths of NCCL to try if this process has not loaded a copy."""
    # Without a common order, kernels of two communicators on one device may wait for
    # each other. Before CUDA 12.3, ordered kernels run one after the other, in the
    # order of the host's calls. The host calls of compiled programs and of the eager
    # lane interleave differently on each rank, so request no order from old drivers.
    has_old_driver = 0 < information().get("driver", 0) < _LAUNCH_ORDER_DRIVER
    implicit = "0" if has_old_driver else "1"
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", implicit)
    # By default, NCCL makes the first operation of each communicator allocate memory
    # and wait for peers, in an order that may differ between ranks.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    return [setting] if setting else [*filter(None, [wheel_library()]), ""]


def shares_gpu() -> bool:
    """Returns whether NCCL may run several ranks on one GPU, as in tests."""
    allowed = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "") not in ("", "0")
    return allowed or bool(os.environ.get("NCCL_HOSTID"))


def large_memory_fraction() -> str:
    """Returns JAX's preallocated fraction of GPU memory, or "" if it is below 0.9."""
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"):
        return ""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        value = os.environ.get(name, "")
        with contextlib.suppress(ValueError):  # JAX reports a malformed number itself
            if value and float(value) >= 0.9:
                return value
    return ""


def _gpu_uuids(devices: Sequence[int]) -> list[str]:
    known = information()["devices"]
    return [
        str(known[device].get("uuid", "")) if device < len(known) else ""
        for device in devices
    ]


def lane_options(config: Config, device: int) -> dict[str, Any]:
    """Returns the options of an eager lane, which loads NCCL at the first CUDA tensor.

    `device` is for a rank that calls `ringjax.eager.join` before it has submitted a
    tensor; -1 means no device.
    """
    return {
        **_communicator_options(config),
        "device": device,
        "nccl": _candidates(config.nccl),
        "shares": int(shares_gpu()),
    }


def _communicator_options(config: Config) -> dict[str, Any]:
    return {
        "start_timeout": config.start_timeout,
        "fusion": config.fusion,
        "fusion_small": config.fusion_small,
        "comm_stream": int(config.comm_stream),
    }


# -- which devices this rank has -------------------------------------------------------


ALL = 0  # devices per rank: all devices that the rank sees


def share(
    local_rank: int, local_size: int, devices: int, per_rank: int = 1
) -> tuple[int, ...] | None:
    """Returns this rank's devices if the ranks of a host divide the host's devices.

    `devices` is how many devices the rank sees, and `per_rank` how many of them a rank
    computes on. Returns None if there is nothing to divide.

    Example:
        >>> share(local_rank=5, local_size=8, devices=4), share(1, 2, 8, per_rank=4)
        ((1,), (4, 5, 6, 7))
    """
    alone = per_rank == 1 and local_size == 1
    if per_rank == ALL or devices <= per_rank or alone:
        return None
    slots = max(1, devices // per_rank)
    first = local_rank % slots * per_rank
    return tuple(range(first, first + per_rank))


# -- communicators ---------------------------------------------------------------------


class ControlPlane(Protocol):
    """The host communication that is needed to connect device communicators."""

    rank_info: RankInfo

    def exchange(self, value: _Value, what: str) -> list[_Value]:
        """Returns the values of all ranks; `what` names the exchange in errors."""

    def connect_control(
        self, number: int, ranks: Sequence[int], name: str
    ) -> _native.Communicator:
        """Connects a control communicator of `ranks`, which the heartbeat watches."""

    def disconnect(self, number: int) -> None:
        """Closes a control communicator, if it exists."""

    def departed_ranks(self) -> dict[int, str]:
        """Returns the ranks that are known to be gone, each with the cause."""

    def log(self, level: str, text: str) -> None:
        """Prints `text` if RINGJAX_LOG_LEVEL enables `level`."""


class Devices:
    """The device communicators of one world: of all its process sets, or of none.

    Attributes:
        counts: for each rank, the number of devices that its driver shows.
        communicators: for each process set, one communicator for each of `numbers`.
        numbers: the indices of this rank's devices. The i-th devices of all ranks are
            in one communicator.
    """

    def __init__(
        self,
        config: Config,
        counts: Sequence[int],
        control_plane: ControlPlane | None = None,  # None before the first epoch
    ) -> None:
        self.counts = list(counts)
        self.communicators: dict[int, list[_native.CudaCommunicator]] = {}
        self.numbers: tuple[int, ...] = ()
        self._config, self._plane = config, control_plane
        self._opened, self._reason = False, ""  # why there are no communicators

    @property
    def _control_plane(self) -> ControlPlane:
        assert self._plane is not None
        return self._plane

    @property
    def possible(self) -> bool:
        """Whether any rank has a device. Then all ranks must exchange reports."""
        return any(self.counts)

    def open(
        self, numbers: Sequence[int], why_not: str, sets: Mapping[int, Sequence[int]]
    ) -> None:
        """Connects the communicators of all process sets, once. All ranks must call it.

        If `numbers` is empty on any rank, no rank gets device communicators. `why_not`
        is the reason on this rank. `sets` has the ranks of each process set. Raises
        StartupError if the devices of the ranks are not compatible, or if NCCL failed.
        """
        if self._opened:
            return
        self._opened = True
        try:
            self._reason = self._check_ranks(tuple(numbers), why_not)
            if not self._reason:
                self.numbers = tuple(numbers)
                for number in sorted(sets):
                    self.add(number, sets[number])
        except BaseException as error:
            self._reason = str(error)
            self.close()
            raise
        if self._reason:
            expected = self._config.devices_per_rank != 1
            text = f"no CUDA collectives in jit: {self._reason}"
            self._control_plane.log("warning" if expected else "info", text)

    def _check_ranks(self, numbers: tuple[int, ...], why_not: str) -> str:
        """Loads NCCL and compares the device reports of all ranks.

        Returns the reason, equal on all ranks, if device communicators are impossible,
        and otherwise "".
        """
        config, plane, version, path = self._config, self._control_plane, 0, ""
        if numbers:
            try:
                version, path = open_library(config.nccl)
            except RingjaxError as error:
                why_not = str(error)
        if os.sep in config.nccl and path and not _is_same_file(config.nccl, path):
            plane.log("warning", f"RINGJAX_NCCL is not used: {path} is loaded already")
        what = "ringjax.init: the devices of all ranks"
        own: DeviceReport = {
            "device": why_not or list(numbers),
            "wanted": config.devices_per_rank,
            "nccl": version,
            "path": path,
            "settings": {
                name: getattr(config, name)
                for name in device_compatibility.COMMON_SETTINGS
            },
            "packs": information()["device_code"] != _NO_DEVICE_CODE,
            "tls": config.tls,
            "gpu": _gpu_uuids(numbers),
            "shares": shares_gpu(),
            "what": what,
        }
        reports = self._exchange(own, what)
        for rank, report in enumerate(reports):
            if isinstance(report["device"], str):
                return f"rank {rank} has no CUDA device: {report['device']}"
        device_compatibility.check_compatible(reports, plane.rank_info.hosts)
        required = any(report["tls"] == "required" for report in reports)
        if required and len(set(plane.rank_info.hosts)) > 1:
            return (
                "RINGJAX_TLS is 'required', and NCCL does not encrypt what goes from "
                "host to host; set RINGJAX_TLS=auto if nobody can listen there"
            )
        if not own["packs"]:
            plane.log(
                "warning",
                "this ringjax was built without device code: no tensors are packed, "
                "compression and scaling do not work on CUDA devices, and results of a "
                "step that a lost rank has spoilt are not marked as NaN",
            )
        if fraction := large_memory_fraction():
            plane.log(
                "warning",
                f"JAX takes {fraction} of the GPU's memory, and NCCL needs some "
                "hundred MB of the rest for each process set: set "
                "XLA_PYTHON_CLIENT_MEM_FRACTION to 0.85 or less if it finds none",
            )
        plane.log("debug", f"{_name(numbers)}, NCCL {version_text(version)} at {path}")
        return ""

    def add(self, number: int, ranks: Sequence[int]) -> None:
        """Connects the device communicators of a process set. All ranks must call it.

        Raises StartupError if NCCL fails or if another rank fails.
        """
        if not self.numbers:
            return
        set_name = "the world" if number == 0 else f"process set {number}"
        rank = self._control_plane.rank_info.rank
        what = f"ringjax: the NCCL id of {set_name}"
        own: dict[str, Any] = {"what": what}
        if rank == ranks[0]:
            try:
                own["ids"] = [_native.nccl_unique_id().hex() for _ in self.numbers]
            except _native.StatusError as error:
                own["error"] = str(error)
        received = self._exchange(own, what)[ranks[0]]
        if "error" in received:
            raise StartupError(
                f"{set_name} has no device communicator: rank {ranks[0]}: "
                f"{received['error']}"
            )
        if rank in ranks:
            unique_ids = [bytes.fromhex(text) for text in received["ids"]]
            self._connect(number, ranks, unique_ids, set_name)

    def _control_ids(self, number: int) -> list[int]:
        indices = range(len(self.numbers))
        return [communicator_ids.control_id(number, index) for index in indices]

    def _connect(
        self, number: int, ranks: Sequence[int], unique_ids: list[bytes], set_name: str
    ) -> None:
        name, plane = "world" if number == 0 else set_name, self._control_plane
        several = len(self.numbers) > 1
        try:
            controls = [
                plane.connect_control(
                    control, ranks, f"{name} (device{f' {i}' if several else ''})"
                )
                for i, control in enumerate(self._control_ids(number))
            ]
            self.communicators[number] = _native.connect_devices(
                id=number,
                controls=controls,
                devices=self.numbers,
                unique_ids=unique_ids,
                options=_communicator_options(self._config),
            )
        except BaseException as error:
            gone = {r: why for r, why in plane.departed_ranks().items() if r in ranks}
            lost = "".join(f"; rank {r} {why}" for r, why in gone.items())
            self._disconnect_controls(number)  # some of them may be connected
            if not isinstance(error, _native.StatusError):
                raise
            raise StartupError(
                f"{set_name} has no device communicator: rank {plane.rank_info.rank}, "
                f"{_name(self.numbers)}: {error}{lost}"
            ) from error

    def _disconnect_controls(self, number: int) -> None:
        for control in self._control_ids(number):
            self._control_plane.disconnect(control)

    def _exchange(self, value: _Report, what: str) -> list[_Report]:
        try:
            received = self._control_plane.exchange(value, what)
        except RingjaxError as error:
            raise StartupError(str(error)) from error
        for rank, other in enumerate(received):
            if not isinstance(other, dict) or other.get("what") != what:
                raise Mismatch(f"{what}: rank {rank} calls {other}")
        return received

    def problem(self, number: int) -> str:
        """Returns why a process set has no device communicator, or "" if it has one."""
        if number in self.communicators:
            return ""
        if number == communicator_ids.REPLICA_SET:
            return "groups of processes (--group-size) are for CPU devices"
        if not self.possible:
            return f"no rank has a CUDA device: {absence(self._config)}"
        return self._reason or "it was not built"

    def remove(self, number: int) -> None:
        """Closes the device communicators of a process set, if it has any."""
        communicators = self.communicators.pop(number, [])
        for communicator in communicators:
            communicator.close()
        if communicators:
            self._disconnect_controls(number)

    def stop(self, text: str, rank: int) -> None:
        """Fails all pending calls on devices. Any thread may call this method."""
        for communicator in self.all_communicators():
            communicator.abort(text, rank)

    def all_communicators(self) -> list[_native.CudaCommunicator]:
        """Returns the communicators of all process sets and devices."""
        # Iterate over a copy: the recovery thread calls this method while the program
        # adds process sets.
        return [one for each in list(self.communicators.values()) for one in each]

    def close(self) -> None:
        """Closes all device communicators, newest first, but not the control ones."""
        for number in sorted(self.communicators, reverse=True):
            for communicator in self.communicators[number]:
                try:
                    communicator.close()
                except _native.StatusError as error:  # close the remaining ones, too
                    text = f"the end of a device communicator: {error}"
                    self._control_plane.log("warning", text)
        self.communicators.clear()
        self.numbers = ()


def absence(config: Config) -> str:
    """Returns why this rank's driver shows no device, or "" if it shows devices."""
    if not config.gpu:
        return "RINGJAX_GPU is 0"
    found = information()
    if found["devices"]:
        return ""
    return str(found["driver_error"] or "the driver shows no device")


def count(config: Config) -> int:
    """Returns how many devices this rank's driver shows, or 0 if RINGJAX_GPU is 0."""
    return len(information()["devices"]) if config.gpu else 0


def _name(numbers: Sequence[int]) -> str:
    several = "s" if len(numbers) > 1 else ""
    return f"device{several} {', '.join(map(str, numbers))}"


def _is_same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
