"""Assigns the CUDA devices of a host to its ranks, during `ringjax.init`.

Unless the user has chosen devices, each rank receives one device, or
RINGJAX_DEVICES_PER_RANK devices. `world/devices.py`, which imports no framework, builds
the device communicators. CPU devices need no device communicator. This module uses only
public names of JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ringjax.world.world import World

_VISIBLE = "jax_cuda_visible_devices"


def open_devices(world: World, started: bool) -> None:
    """Builds the device communicators if any rank can have one; runs at each init.

    Querying JAX's devices starts JAX's backends, so this function does not query if no
    rank has a CUDA driver. NCCL is opened after the query, when JAX has loaded its own
    copy of NCCL, which ringjax uses, too. `started` says whether the backends have been
    started already.
    """
    if not world.devices.possible:
        if world.config.devices_per_rank != 1 and world.rank == 0:
            text = f"RINGJAX_DEVICES_PER_RANK: {world.devices.problem(0)}"
            world.log("warning", text)
        return
    why_not = world.cuda_absence
    numbers: Sequence[int] = ()
    if not why_not:
        if world.device_share is not None:
            restrict_visible_devices(world.device_share, started, world.log)
        numbers, why_not = cuda_devices(world.config.devices_per_rank)
    world.open_devices(numbers, why_not)


def restrict_visible_devices(
    numbers: Sequence[int], started: bool, log: Callable[[str, str], None]
) -> None:
    """Hides other ranks' devices from JAX, unless the user has chosen devices."""
    settings: Any = jax.config
    if settings.values.get(_VISIBLE, "all") not in ("", "all"):
        return
    visible = ",".join(map(str, numbers))
    if not started:
        jax.config.update(_VISIBLE, visible)
    elif jax.default_backend() == "gpu" and jax.local_device_count() > len(numbers):
        log(
            "warning",
            f"JAX was used before ringjax.init() and holds all "
            f"{jax.local_device_count()} devices of this host; call ringjax.init() "
            f"first, or set CUDA_VISIBLE_DEVICES={visible} for this rank",
        )


def cuda_devices(each: int = 1) -> tuple[Sequence[int], str]:
    """Returns the CUDA driver's indices of the devices that JAX computes on.

    If `each` is 1, returns only the index of JAX's default device. The second result is
    the reason why there is no device, or "".
    """
    settings: Any = jax.config
    platforms = settings.jax_platforms
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return (), f"JAX_PLATFORMS is {platforms}"
    chosen: Any = settings.jax_default_device
    if chosen is None:
        chosen = jax.default_backend()
    if isinstance(chosen, str):
        chosen = jax.local_devices(backend=chosen)[0]
    version = str(getattr(chosen.client, "platform_version", ""))
    if chosen.platform not in ("gpu", "cuda") or "rocm" in version.lower():
        return (), f"JAX computes on {chosen.platform}"
    if each == 1:
        return (int(chosen.local_hardware_id),), ""
    seen = jax.local_devices(backend=chosen.platform)
    numbers = sorted(int(device.local_hardware_id) for device in seen)
    return numbers, ""
