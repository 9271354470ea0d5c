"""Which CUDA devices JAX computes on, asked once ringjax knows its ranks.

Ranks of a host share out its devices, unless somebody has chosen already: one each, or
as many as RINGJAX_DEVICES_PER_RANK says. The device communicators are built in
`world/devices.py`, which knows no framework. Not for CPU devices: there is nothing to
build for them. Uses what is public of JAX only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ringjax.world.world import World

_VISIBLE = "jax_cuda_visible_devices"


def open_devices(world: World, started: bool) -> None:
    """Builds the device communicators if any rank can have one; at every init.

    Asking JAX for its device starts its backends, so where no rank has a CUDA driver it
    is not asked. NCCL is opened afterwards: then JAX has mapped its copy.

    Args:
        world: knows which ranks have devices.
        started: whether JAX's backends have been started already.
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
    """Lets JAX see this rank's devices only, unless somebody has chosen already."""
    settings: Any = jax.config
    if settings.values.get(_VISIBLE, "all") not in ("", "all"):
        return
    mine = ",".join(map(str, numbers))
    if not started:
        jax.config.update(_VISIBLE, mine)
    elif jax.default_backend() == "gpu" and jax.local_device_count() > len(numbers):
        log(
            "warning",
            f"JAX was used before ringjax.init() and holds all "
            f"{jax.local_device_count()} devices of this host; call ringjax.init() "
            f"first, or set CUDA_VISIBLE_DEVICES={mine} for this rank",
        )


def cuda_devices(each: int = 1) -> tuple[Sequence[int], str]:
    """The numbers of the CUDA devices that JAX computes on; or none, and why.

    Numbers are the driver's, whatever JAX was told to see.

    Args:
        each: how many are wanted: 1 is JAX's default device, else all that it sees.
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
