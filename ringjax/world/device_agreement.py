"""What ranks with CUDA devices must have in common, looked at before NCCL is asked.

NCCL would refuse less clearly, in its own log, or wait for ever. Each rank has told
what it has (`devices.py`), and all look at the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringjax.control.member import ranks_text
from ringjax.errors import StartupError

# What ranks must agree about, or they would call NCCL differently.
SETTINGS = ("fusion", "fusion_small")


def version_text(version: int) -> str:
    """2.28.9 for 22809."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def check(said: Sequence[dict[str, Any]], hosts: Sequence[int]) -> None:
    """Looks at what all ranks have said, which all have devices.

    Raises:
        StartupError: they do not fit together. To blame is the first one that does not
            fit rank 0: in an elastic job a newcomer, without which the others go on.
    """
    _check_versions(said)
    _check_settings(said)
    _check_code(said)
    _check_counts(said)
    _check_gpus(said, hosts)


def _refusal(rank: int, text: str) -> StartupError:
    error = StartupError(text)
    error.rank = rank
    return error


def _check_versions(said: Sequence[dict[str, Any]]) -> None:
    groups: dict[int, list[int]] = {}
    for rank, other in enumerate(said):
        groups.setdefault(int(other["nccl"]), []).append(rank)
    if len(groups) > 1:
        seen = "; ".join(
            f"{ranks_text(ranks)}: {version_text(version)} ({said[ranks[0]]['path']})"
            for version, ranks in groups.items()
        )
        raise _refusal(
            list(groups.values())[1][0],
            f"all ranks must load the same NCCL, but they have {seen}; install one "
            "version everywhere, or name it by RINGJAX_NCCL",
        )


def _check_settings(said: Sequence[dict[str, Any]]) -> None:
    first = said[0]["settings"]
    for rank, other in enumerate(said):
        for name in SETTINGS:
            if other["settings"].get(name) != first.get(name):
                raise _refusal(
                    rank,
                    f"RINGJAX_{name.upper()} must be alike on all ranks: it is "
                    f"{first.get(name)!r} on rank 0 and "
                    f"{other['settings'].get(name)!r} on rank {rank}",
                )


def _check_code(said: Sequence[dict[str, Any]]) -> None:
    """Ranks that pack and ranks that do not would call NCCL differently."""
    without = [rank for rank, other in enumerate(said) if not other["packs"]]
    if 0 < len(without) < len(said):
        odd = next(r for r in range(len(said)) if (r in without) != (0 in without))
        raise _refusal(
            odd,
            f"all ranks must have the same build of ringjax, but {ranks_text(without)} "
            "has none of the device code that the others have",
        )


def _check_counts(said: Sequence[dict[str, Any]]) -> None:
    """Each device is joined with those of its place on the other ranks."""
    first = said[0]["device"]
    for rank, other in enumerate(said):
        if other["wanted"] not in (0, len(other["device"])):
            raise _refusal(
                rank,
                f"RINGJAX_DEVICES_PER_RANK is {other['wanted']} on rank {rank}, which "
                f"computes on {len(other['device'])} ({_numbers(other['device'])}): it "
                "must see as many, by CUDA_VISIBLE_DEVICES, and call ringjax.init() "
                "before it uses JAX",
            )
        if len(other["device"]) != len(first):
            raise _refusal(
                rank,
                "all ranks must compute on equally many CUDA devices, but rank 0 has "
                f"{len(first)} ({_numbers(first)}) and rank {rank} has "
                f"{len(other['device'])} ({_numbers(other['device'])}); see "
                "RINGJAX_DEVICES_PER_RANK and CUDA_VISIBLE_DEVICES",
            )


def _numbers(devices: Sequence[int]) -> str:
    return ", ".join(map(str, devices))


def _check_gpus(said: Sequence[dict[str, Any]], hosts: Sequence[int]) -> None:
    """NCCL itself would say "Duplicate GPU detected", in its own log only."""
    seen: dict[tuple[str, int], int] = {}
    for rank, other in enumerate(said):
        for gpu in [] if other["shares"] else other["gpu"]:
            first = seen.setdefault((gpu, hosts[rank]), rank)
            if gpu and first != rank:
                each = len(other["device"])
                several = f", {each} each (RINGJAX_DEVICES_PER_RANK)"
                raise _refusal(
                    rank,
                    f"rank {first} and rank {rank} compute on the same GPU, {gpu}; "
                    "NCCL wants others for each rank: start no more ranks on a host "
                    f"than it has GPUs for{several if each > 1 else ''}, or give each "
                    "its own by CUDA_VISIBLE_DEVICES",
                )
