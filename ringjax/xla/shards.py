"""Which device has which shard of the tensors of a call, in a program over several.

On CPUs the calls of all devices become one (`engine/communicator/device_rendezvous.h`).
Each CUDA device makes its own call, with the devices at its place on the other ranks,
which must have the same shards. How such calls are lowered is in `several.py`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ringjax.xla import shares
from ringjax.xla.program import Program


class Shards(NamedTuple):
    """Where the shards of a call's tensors lie.

    Attributes:
      devices: the local ones, in an order that they share: on CPUs as XLA numbers them,
        on CUDA by their places among those that this rank has joined with others.
      names: the same devices in words, alike on ranks with the same ones.
      of: for each tensor, for each device, the number of the shard that it has.
      parts: for each tensor, the place of each shard in it, such as "[0:4,2:8]".
    """

    devices: tuple[int, ...]
    names: str
    of: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[str, ...], ...]

    def select(self, kept: Sequence[int]) -> Shards:
        """Those of the tensors `kept`."""
        return self._replace(
            of=tuple(self.of[i] for i in kept), parts=tuple(self.parts[i] for i in kept)
        )

    def merged_attributes(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes of the devices' calls; `whole` are those of undivided tensors.

        What there is for each tensor becomes one for each shard.
        """
        count = [len(parts) for parts in self.parts]
        names = whole["names"].split("\n") if whole["names"] else [""] * len(count)
        rows = np.array(whole.get("counts", ()), np.int64)
        if count:
            rows = rows.reshape(len(count), -1)
        cut = "\n".join(" ".join(parts) for parts in self.parts)
        digest = hashlib.sha256(cut.encode()).hexdigest()
        # Only what the handler reads may be there.
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
        """The attributes where each device's call is one by itself.

        With that of its place on the other ranks, which must have the same shards.
        """
        lines = [
            f"{device}: "
            + " ".join(p[of[i]] for p, of in zip(self.parts, self.of, strict=True))
            for i, device in enumerate(self.devices)
        ]
        digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
        return {**whole, "partition": f"{self.names}\n{digest}"}


def _numbers(program: Program) -> tuple[tuple[int, ...], str]:
    """The local devices of a program as `Shards` has them, and their name."""
    local = [device.local_hardware_id for device in program.here]
    ids = tuple(int(device.id) for device in program.here)
    if program.platform == "cuda":
        if set(local) <= set(program.joined):  # not where it is only looked at
            ids = tuple(map(program.joined.index, local))
        local = list(ids)
    text = ", ".join(map(str, sorted(local)))
    return ids, f"{len(local)} devices ({text})"


def of_shardings(
    program: Program,
    shapes: Sequence[Any],
    shardings: Sequence[Any],
    cut: Sequence[shares.Replicas | None] | None = None,
) -> Shards:
    """The shards of tensors of these shapes, numbered by their places in the tensor.

    Args:
      program: its local devices take part.
      shapes: of the tensors.
      shardings: theirs.
      cut: for each tensor: of whom each has a share of what they have alike.
    """
    of, parts, here = [], [], program.here
    place = {device: i for i, device in enumerate(program.devices)}
    for number, (shape, sharding) in enumerate(zip(shapes, shardings, strict=True)):
        places = sharding.devices_indices_map(tuple(shape))
        same = cut[number] if cut else None
        which = same.numbers if same else [0] * len(place)
        bounds = [
            (
                tuple(s.indices(n)[:2] for s, n in zip(places[d], shape, strict=True)),
                which[place[d]],
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
    """The shards of values inside of a shard_map over all of a mesh.

    Args:
      program: the mesh's local devices take part; a value's shard is named by its place
        in the mesh.
      varying: for each value the axes over which it differs; None: perhaps over all.
    """
    mesh = program.mesh
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
