"""Device compatibility: checks that NCCL can connect the CUDA devices of all ranks.

The checks run before the first call of NCCL. NCCL would report ranks that do not fit
together in its own log only, or wait forever. `devices.py` exchanges the reports of all
ranks, so all ranks check equal data and raise equal errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from ringjax.control.member import ranks_text
from ringjax.errors import StartupError

# Settings that decide which NCCL calls a rank makes.
COMMON_SETTINGS = ("fusion", "fusion_small")


class DeviceReport(TypedDict):
    """The CUDA devices and the NCCL of one rank."""

    device: str | list[int]  # the devices that the rank computes on, or why it has none
    wanted: int  # RINGJAX_DEVICES_PER_RANK; 0 means all
    nccl: int  # the version, 22809 for 2.28.9; 0 if NCCL was not loaded
    path: str  # the file of NCCL
    settings: dict[str, object]  # the values of COMMON_SETTINGS
    packs: bool  # whether this build of ringjax contains device code
    tls: str  # RINGJAX_TLS
    gpu: list[str]  # the UUID of each device; "" if the driver does not report it
    shares: bool  # whether NCCL may run several ranks on one GPU
    what: str  # the operation for which the report was made


def version_text(version: int) -> str:
    """Formats NCCL's version code, such as 22809, as a text: "2.28.9"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def check_compatible(reports: Sequence[DeviceReport], hosts: Sequence[int]) -> None:
    """Raises StartupError if the devices of some ranks are not compatible.

    The error's `rank` is the first rank that differs from rank 0. In an elastic job
    that rank is a newcomer, and the other ranks continue without it. `hosts` has the
    index of each rank's host.
    """
    _check_versions(reports)
    _check_settings(reports)
    _check_code(reports)
    _check_counts(reports)
    _check_gpus(reports, hosts)


def _refusal(rank: int, text: str) -> StartupError:
    error = StartupError(text)
    error.rank = rank
    return error


def _check_versions(reports: Sequence[DeviceReport]) -> None:
    ranks_by_version: dict[int, list[int]] = {}
    for rank, report in enumerate(reports):
        ranks_by_version.setdefault(int(report["nccl"]), []).append(rank)
    if len(ranks_by_version) > 1:
        found = "; ".join(
            f"{ranks_text(ranks)}: {version_text(version)} "
            f"({reports[ranks[0]]['path']})"
            for version, ranks in ranks_by_version.items()
        )
        raise _refusal(
            list(ranks_by_version.values())[1][0],
            f"all ranks must load the same NCCL, but they have {found}; install one "
            "version everywhere, or name it by RINGJAX_NCCL",
        )


def _check_settings(reports: Sequence[DeviceReport]) -> None:
    first = reports[0]["settings"]
    for rank, report in enumerate(reports):
        for name in COMMON_SETTINGS:
            if report["settings"].get(name) != first.get(name):
                raise _refusal(
                    rank,
                    f"RINGJAX_{name.upper()} must be alike on all ranks: it is "
                    f"{first.get(name)!r} on rank 0 and "
                    f"{report['settings'].get(name)!r} on rank {rank}",
                )


def _check_code(reports: Sequence[DeviceReport]) -> None:
    # Only ranks with device code pack tensors into one buffer, so ranks with and
    # without device code would make different NCCL calls.
    without = [rank for rank, report in enumerate(reports) if not report["packs"]]
    if 0 < len(without) < len(reports):
        odd = next(r for r in range(len(reports)) if (r in without) != (0 in without))
        raise _refusal(
            odd,
            f"all ranks must have the same build of ringjax, but {ranks_text(without)} "
            "has none of the device code that the others have",
        )


def _check_counts(reports: Sequence[DeviceReport]) -> None:
    # The i-th devices of all ranks form one NCCL communicator.
    first = reports[0]["device"]
    for rank, report in enumerate(reports):
        if report["wanted"] not in (0, len(report["device"])):
            raise _refusal(
                rank,
                f"RINGJAX_DEVICES_PER_RANK is {report['wanted']} on rank {rank}, which "
                f"computes on {len(report['device'])} ({_numbers(report)}): it "
                "must see as many, by CUDA_VISIBLE_DEVICES, and call ringjax.init() "
                "before it uses JAX",
            )
        if len(report["device"]) != len(first):
            raise _refusal(
                rank,
                "all ranks must compute on equally many CUDA devices, but rank 0 has "
                f"{len(first)} ({_numbers(reports[0])}) and rank {rank} has "
                f"{len(report['device'])} ({_numbers(report)}); see "
                "RINGJAX_DEVICES_PER_RANK and CUDA_VISIBLE_DEVICES",
            )


def _numbers(report: DeviceReport) -> str:
    return ", ".join(map(str, report["device"]))


def _check_gpus(reports: Sequence[DeviceReport], hosts: Sequence[int]) -> None:
    seen: dict[tuple[str, int], int] = {}
    for rank, report in enumerate(reports):
        for gpu in [] if report["shares"] else report["gpu"]:
            first = seen.setdefault((gpu, hosts[rank]), rank)
            if gpu and first != rank:
                count = len(report["device"])
                several = f", {count} each (RINGJAX_DEVICES_PER_RANK)"
                raise _refusal(
                    rank,
                    f"rank {first} and rank {rank} compute on the same GPU, {gpu}; "
                    "NCCL wants others for each rank: start no more ranks on a host "
                    f"than it has GPUs for{several if count > 1 else ''}, or give each "
                    "its own by CUDA_VISIBLE_DEVICES",
                )
