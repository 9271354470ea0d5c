"""Describes the program for which a primitive is lowered: platform, devices, mesh."""

from __future__ import annotations

from typing import NamedTuple

import jax

from ringjax.world.communicator_ids import REPLICA_SET
from ringjax.xla.jax_types import Context, Params


class Program(NamedTuple):
    """Properties of a program that decide how its calls are lowered.

    Attributes:
        platform: "cpu" or "cuda".
        devices: the devices of the program, in its order, including devices of other
            processes; empty if the program runs on one device.
        mesh: the mesh of the shard_map that contains the primitive. None if XLA will
            partition the program, or if the program runs on one device.
        elastic: True if ranks may be lost. Then a call that a loss interrupts is
            repeated, so its operands must stay unchanged.
        joined: the driver's indices of the CUDA devices that have a communicator with
            the other ranks.
    """

    platform: str
    devices: tuple[jax.Device, ...] = ()
    mesh: jax.sharding.Mesh | None = None
    elastic: bool = False
    joined: tuple[int, ...] = ()

    @property
    def local_devices(self) -> list[jax.Device]:
        """The devices of this process, in the order of the program."""
        this_process = jax.process_index()
        return [d for d in self.devices if d.process_index == this_process]


def program_of(ctx: Context, name: str, platform: str) -> Program:
    """Returns the program for which the collective `name` is lowered.

    Raises ValueError inside a shard_map that leaves some axes of its mesh to JAX, or
    whose mesh has no devices yet.
    """
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        if (getattr(axes, "num_devices", 1) or 1) == 1:
            return Program(platform)
        return Program(platform, tuple(getattr(axes, "device_assignment", ())))
    if mesh.size == 1:
        return Program(platform)
    missing = set(mesh.axis_names) - set(getattr(axes, "manual_axes", ()))
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


def check_processes(program: Program, name: str, params: Params) -> None:
    """Raises ValueError if a program over several processes uses a wrong process set.

    The processes of a group hold different shards of a tensor. Only collectives of
    `ringjax.replica_set()` combine shards of equal positions.
    """
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
    """Raises ValueError unless all CUDA devices of the program have a communicator.

    `problem` is the reason why this rank has no device communicator, or "".
    """
    wanted = [device.local_hardware_id for device in program.local_devices]
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
