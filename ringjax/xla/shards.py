"""Describes which device holds which shard of a call's tensors.

On CPUs, the calls of all devices of a process become one call, in a device rendezvous
(`engine/communicator/device_rendezvous.h`). Each CUDA device makes its own call with
the devices at the same position on the other ranks, which must hold the same shards.
`multi_device.py` lowers both kinds of calls.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from ringjax.xla import shares
from ringjax.xla.program import Program


class Shards(NamedTuple):
    """Which local device holds which shard of each tensor of a call.

    Attributes:
        devices: the ids of the local devices: on CPUs XLA's ids, on CUDA the positions
            among the devices that have a communicator.
        names: a text about the devices, to compare between ranks.
        of: for each tensor and each device, the index in `parts` of the device's shard.
        parts: for each tensor, the position of each shard, such as "[0:4,2:8]".
    """

    devices: tuple[int, ...]
    names: str
    of: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[str, ...], ...]

    def select(self, kept: Sequence[int]) -> Shards:
        return self._replace(
            of=tuple(self.of[i] for i in kept), parts=tuple(self.parts[i] for i in kept)
        )

    def merged_attributes(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the attributes of calls that become one call of all devices.

        `whole` has the attributes of a call without shards. In the result, attributes
        with one entry for each tensor have one entry for each shard.
        """
        count = [len(parts) for parts in self.parts]
        names = whole["names"].split("\n") if whole["names"] else [""] * len(count)
        rows = np.array(whole.get("counts", ()), np.int64)
        if count:
            rows = rows.reshape(len(count), -1)
        cut = "\n".join(" ".join(parts) for parts in self.parts)
        digest = hashlib.sha256(cut.encode()).hexdigest()
        # Add "counts" only if `whole` has it: handlers refuse unknown attributes.
        rest = {"counts": np.repeat(rows, count, axis=0)} if "counts" in whole else {}
        return {
            **whole,
            **{k: tuple(int(n) for n in v.flat) for k, v in rest.items()},
            "names": "\n".join(
                name + part
                for name, parts in zip(names, self.parts, strict=True)
                for part in parts
            ),
            "devices": self.devices,
            "shards": tuple(itertools.chain(*self.of)),
            "partition": f"{self.names}\n{digest}",
        }

    def attributes_per_device(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the attributes of calls that each device makes on its own.

        The attribute `partition` causes a mismatch error if the devices of other ranks
        hold different shards.
        """
        lines = [
            f"{device}: "
            + " ".join(p[of[i]] for p, of in zip(self.parts, self.of, strict=True))
            for i, device in enumerate(self.devices)
        ]
        digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
        return {**whole, "partition": f"{self.names}\n{digest}"}


def _numbers(program: Program) -> tuple[tuple[int, ...], str]:
    """Returns the attributes `devices` and `names` of `Shards`."""
    local = [device.local_hardware_id for device in program.local_devices]
    ids = tuple(int(device.id) for device in program.local_devices)
    if program.platform == "cuda":
        # In tests (`lowering.without_device`), the devices have no communicator.
        if set(local) <= set(program.joined):
            ids = tuple(map(program.joined.index, local))
        local = list(ids)
    text = ", ".join(map(str, sorted(local)))
    return ids, f"{len(local)} devices ({text})"


def of_shardings(
    program: Program,
    shapes: Sequence[Sequence[int]],
    shardings: Sequence[Sharding],
    cut: Sequence[shares.Replicas | None] | None = None,
) -> Shards:
    """Returns the shards of tensors with these shapes and shardings.

    For a tensor that is cut into shares (`shares.py`), `cut` has its replicas, else
    None.
    """
    of, parts, here = [], [], program.local_devices
    position = {device: i for i, device in enumerate(program.devices)}
    for number, (shape, sharding) in enumerate(zip(shapes, shardings, strict=True)):
        slices = sharding.devices_indices_map(tuple(shape))
        same = cut[number] if cut else None
        which = same.numbers if same else [0] * len(position)
        bounds = [
            (
                tuple(s.indices(n)[:2] for s, n in zip(slices[d], shape, strict=True)),
                which[position[d]],
            )
            for d in here
        ]
        distinct = sorted(set(bounds))
        of.append(tuple(distinct.index(place) for place in bounds))
        parts.append(
            tuple(
                "["
                + ",".join(f"{a}:{b}" for a, b in place)
                + (f"/{share}]" if same else "]")
                for place, share in distinct
            )
            if len(distinct) > 1
            else ("",)
        )
    return Shards(*_numbers(program), tuple(of), tuple(parts))


def of_mesh(program: Program, varying: Sequence[frozenset[str] | None]) -> Shards:
    """Returns the shards of values inside a shard_map, named by positions in the mesh.

    `varying` has for each value the mesh axes over which the value differs, or None if
    the value may differ over all axes.
    """
    mesh = program.mesh
    assert mesh is not None
    here = [
        (place, device)
        for place, device in np.ndenumerate(mesh.devices)
        if device.process_index == jax.process_index()
    ]
    of, parts = [], []
    for axes in varying:
        differs = [axes is None or name in axes for name in mesh.axis_names]
        keys = [
            tuple(p for p, d in zip(place, differs, strict=True) if d)
            for place, _ in here
        ]
        distinct = sorted(set(keys))
        of.append(tuple(distinct.index(key) for key in keys))
        named = [n for n, d in zip(mesh.axis_names, differs, strict=True) if d]
        parts.append(
            tuple(
                "@" + ",".join(f"{n}={i}" for n, i in zip(named, key, strict=True))
                for key in distinct
            )
            if len(distinct) > 1
            else ("",)
        )
    return Shards(*_numbers(program), tuple(of), tuple(parts))
