"""What devices of one process have alike, of which each moves a share.

On CUDA every device is joined with others by itself. Were a copy sent by each of them,
as much would travel as there are devices, and the results might differ in their last
bits, because NCCL may add in another order for each. So each sends a share of its own,
and XLA gathers them in the process afterwards: a hierarchical allreduce.

A large tensor is cut more finely by its sharding, which lets XLA make one of the sum
over the devices and of the cut; what cannot be cut evenly, and what is small, is cut
here, whatever its shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.xla import jax_private
from ringjax.xla.program import Program

MIN_SHARDED_BYTES = 1 << 16  # bytes of a shard from which XLA is asked to cut it


def splits_replicas(platform: str) -> bool:
    """Whether devices that have the same each move a share of it."""
    return platform == "cuda"


class Replicas(NamedTuple):
    """The devices that have the same shard of a tensor, for each of its shards.

    Attributes:
      groups: their places in the program, equally many in each.
      tiles: the place of each of these shards in the tensor, and their number there.
    """

    groups: tuple[tuple[int, ...], ...]
    tiles: tuple[tuple[int, ...], ...]
    grid: tuple[int, ...]

    @property
    def times(self) -> int:
        """How many devices have the same."""
        return len(self.groups[0])

    @property
    def numbers(self) -> tuple[int, ...]:
        """Which share of its shard the device at each place of the program has."""
        out = [0] * sum(map(len, self.groups))
        for group in self.groups:
            for number, place in enumerate(group):
                out[place] = number
        return tuple(out)


def replicas_of(
    devices: Sequence[Any], shape: Sequence[int], sharding: Any
) -> Replicas:
    """Of a tensor that is cut evenly.

    Args:
      devices: of the program, in its order.
    """
    part = sharding.shard_shape(tuple(shape))
    grid = tuple(n // max(1, m) for n, m in zip(shape, part, strict=True))
    where = sharding.devices_indices_map(tuple(shape))
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, device in enumerate(devices):
        starts = (s.indices(n)[0] for s, n in zip(where[device], shape, strict=True))
        tile = tuple(start // max(1, m) for start, m in zip(starts, part, strict=True))
        groups.setdefault(tile, []).append(place)
    order = sorted(groups)
    return Replicas(tuple(tuple(groups[t]) for t in order), tuple(order), grid)


def finer_sharding(
    devices: Sequence[Any], shape: Sequence[int], width: int, same: Replicas
) -> Any | None:
    """A sharding that gives each device another share of what it has alike.

    Args:
      width: bytes of an element.

    Returns:
      None for small tensors, and where no dimension can be divided.
    """
    part = [n // m for n, m in zip(shape, same.grid, strict=True)]
    if math.prod(part) * width < MIN_SHARDED_BYTES:
        return None
    axis = next((d for d, n in enumerate(part) if n % same.times == 0), None)
    if axis is None:
        return None
    grid = list(same.grid)
    grid[axis] *= same.times
    assignment = np.zeros(grid, np.int64)
    for tile, group in zip(same.tiles, same.groups, strict=True):
        for number, place in enumerate(group):
            at = list(tile)
            at[axis] = at[axis] * same.times + number
            assignment[tuple(at)] = place
    return jax_private.tiled_sharding(devices, assignment)


def assign_shares(
    devices: Sequence[Any], avals: Sequence[Any], shardings: Sequence[Any]
) -> tuple[list[Any], list[Replicas | None]]:
    """Has each device of a program take a share of what it has alike with others.

    Returns:
      For each tensor a sharding, finer where that will do, and else what is to be cut.
    """
    chosen: list[Any] = []
    cut: list[Replicas | None] = []
    for aval, sharding in zip(avals, shardings, strict=True):
        same, finer_one = replicas_of(devices, aval.shape, sharding), None
        if same.times > 1 and aval.size > 0:
            finer_one = finer_sharding(devices, aval.shape, aval.dtype.itemsize, same)
        whole = same.times == 1 or aval.size == 0 or finer_one is not None
        chosen.append(sharding if finer_one is None else finer_one)
        cut.append(None if whole else same)
    return chosen, cut


def slice_all(
    values: Sequence[Any], cut: Sequence[Replicas | None], place: Any
) -> list[Any]:
    """The values, and the shares of those that are `cut`, of the device at a place."""
    out = list(values)
    for i, same in enumerate(cut):
        if same:
            number = jnp.asarray(same.numbers, jnp.int32)[place]
            out[i] = slice_share(values[i], number, same.times)
    return out


def gather_all(
    shares: Sequence[Any],
    values: Sequence[Any],
    cut: Sequence[Replicas | None],
    axis: str,
) -> list[Any]:
    """What `slice_all` was given, with the shares of all devices along a named axis."""
    out = list(shares)
    for i, same in enumerate(cut):
        if same:
            out[i] = gather_share(shares[i], values[i].shape, axis, same.groups)
    return out


def share_aval(aval: Any, count: int) -> Any:
    """What `slice_share` makes of a value."""
    return jax.core.ShapedArray((-(-aval.size // count),), aval.dtype)


def slice_share(x: Any, number: Any, count: int) -> Any:
    """The share `number` of `count` of all elements, filled up to equal ones."""
    each = -(-x.size // count)
    flat = jnp.pad(x.reshape(-1), (0, each * count - x.size))
    return jax.lax.dynamic_slice(flat, (number * each,), (each,))


def gather_share(share: Any, shape: Sequence[int], axis: Any, groups: Any) -> Any:
    """What `slice_share` has cut, from the shares of all devices along a named axis.

    Args:
      groups: the places on it of those who have shares of one tensor; None: all.
    """
    flat = jax.lax.all_gather(share, axis, axis_index_groups=groups, tiled=True)
    return flat[: math.prod(shape)].reshape(shape)


# -- inside of shard_map ---------------------------------------------------------------


def varying_axes(avals: Sequence[Any]) -> list[frozenset[str] | None]:
    """Over which axes values differ, where JAX knows it; else it may be all of them."""
    known = jax_private.checks_varying()
    return [jax_private.varying_axes(aval) if known else None for aval in avals]


class ManualShares:
    """What is sent of values inside of a shard_map: shares, where devices have alike.

    Attributes:
      avals: of what is sent.
      varying: for each the axes over which it differs; None: perhaps over all.
    """

    def __init__(self, ctx: Any, program: Program, avals: Sequence[Any]) -> None:
        self._ctx, self._mesh = ctx, program.mesh
        self._whole = [jax_private.without_mesh(aval) for aval in avals]
        self.varying = varying_axes(avals)
        self._replicated: list[tuple[str, ...]] = [()] * len(avals)
        if splits_replicas(program.platform):
            self._replicated = [
                tuple(a for a in self._mesh.axis_names if v is not None and a not in v)
                for v in self.varying
            ]
        self.avals = [
            share_aval(aval, self._device_count(axes)) if axes else aval
            for aval, axes in zip(self._whole, self._replicated, strict=True)
        ]
        known = zip(self.varying, self._replicated, strict=True)
        self.varying = [None if axes else v for v, axes in known]

    def _device_count(self, axes: Sequence[str]) -> int:
        return math.prod(self._mesh.shape[axis] for axis in axes)

    def slice_values(self, values: Sequence[Any]) -> list[Any]:
        """What is sent."""

        def cut(*xs: Any) -> list[Any]:
            return [
                slice_share(x, jax.lax.axis_index(axes), self._device_count(axes))
                if axes
                else x
                for x, axes in zip(xs, self._replicated, strict=True)
            ]

        return self._lower(cut, values, self._whole, self.avals)

    def gather_values(self, sent: Sequence[Any]) -> list[Any]:
        """The values, from what `slice_share` gave or what has become of it."""

        def put(*xs: Any) -> list[Any]:
            return [
                gather_share(x, aval.shape, axes, None) if axes else x
                for x, aval, axes in zip(xs, self._whole, self._replicated, strict=True)
            ]

        return self._lower(put, sent, self.avals, self._whole)

    def _lower(
        self, function: Any, values: Sequence[Any], before: Any, after: Any
    ) -> list[Any]:
        if not any(self._replicated):
            return list(values)
        with jax_private.named_axes(self._mesh):
            return jax_private.lower_function(
                self._ctx, function, values, before, after
            )
