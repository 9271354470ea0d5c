"""The program that a primitive is lowered for: its platform, its devices, its mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from ringjax.world.communicator_ids import REPLICA_SET


class Program(NamedTuple):
    """What the rules of a lowering know of the program.

    Attributes:
      platform: "cpu" or "cuda".
      devices: in the order of the program; of other processes, too. Empty if it is
        over one device only.
      mesh: None if the program is still to be cut into what each device does; else what
        is lowered is one device's part already, and the mesh is of all of them.
      elastic: ranks may be lost, and a call that this breaks off is repeated.
      joined: the numbers of the CUDA devices that this rank has joined with others.
    """

    platform: str
    devices: tuple[Any, ...] = ()
    mesh: Any = None
    elastic: bool = False
    joined: tuple[int, ...] = ()

    @property
    def here(self) -> list[Any]:
        """The devices of this process."""
        mine = jax.process_index()
        return [device for device in self.devices if device.process_index == mine]


def program_of(ctx: Any, name: str, platform: str) -> Program:
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        if (getattr(axes, "num_devices", 1) or 1) == 1:
            return Program(platform)
        return Program(platform, tuple(axes.device_assignment))
    if mesh.size == 1:
        return Program(platform)
    missing = set(mesh.axis_names) - set(axes.manual_axes)
    if missing:
        raise ValueError(
            f"ringjax.{name}: this shard_map leaves the mesh axes {sorted(missing)} to "
            "JAX: name all axes in `axis_names`, or call it outside of the shard_map"
        )
    if not isinstance(mesh, jax.sharding.Mesh):
        raise ValueError(
            f"ringjax.{name}: this shard_map does not say which devices it is for: "
            "give it a mesh of devices, or call jax.set_mesh before"
        )
    return Program(platform, tuple(mesh.devices.flat), mesh)


def check_processes(program: Program, name: str, params: Mapping[str, Any]) -> None:
    """Of a program over several processes, each one averages its own shards."""
    if params.get("comm", REPLICA_SET) == REPLICA_SET:
        return
    count = len({device.process_index for device in program.devices})
    if count > 1:
        raise ValueError(
            f"ringjax.{name}: this program runs on the devices of {count} processes, "
            "which hold different shards: exchange them with the same place of the "
            "other groups, by process_set=ringjax.replica_set()"
        )


def check_joined_devices(name: str, problem: str, program: Program) -> None:
    wanted = [device.local_hardware_id for device in program.here]
    if not problem and not set(wanted) <= set(program.joined):
        raise ValueError(
            f"ringjax.{name}: this program runs on the CUDA devices "
            f"{', '.join(map(str, wanted))} of this process, which has joined only "
            f"{', '.join(map(str, program.joined))} with the other ranks: start it by "
            "ringrun --devices-per-rank all (RINGJAX_DEVICES_PER_RANK=all), or keep "
            "`tensor` on one device"
        )
    if problem:
        raise ValueError(
            f"ringjax.{name}: `tensor` is on a CUDA device, but there is no device "
            f"communicator: {problem}; for collectives on the CPU set "
            "JAX_PLATFORMS=cpu or move the tensors to a CPU device"
        )
