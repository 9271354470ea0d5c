"""Divides tensors that several devices of one process replicate into shares.

Each CUDA device has its own communicator with the other ranks. If each device sent its
replica of a tensor, the ranks would send as many copies as there are devices, and the
results might differ in their last bits, because NCCL may add in a different order on
each device. So each device sends only a share of the tensor, and XLA gathers the shares
in the process afterwards, as in a hierarchical allreduce.

A large tensor gets a finer sharding, so that XLA can fuse the sum over the devices with
the division into shares. A small tensor, or a tensor that cannot be divided evenly, is
flattened and sliced by this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from ringjax.xla import jax_private
from ringjax.xla.jax_types import Aval, Context, IrValue, Traced
from ringjax.xla.program import Program

# Shards with fewer bytes are sliced by this module and not by XLA.
MIN_SHARDED_BYTES = 1 << 16


def splits_replicas(platform: str) -> bool:
    """Returns True if each device sends only a share of a replicated tensor."""
    return platform == "cuda"


class Replicas(NamedTuple):
    """Which devices hold a replica of each shard of a tensor.

    Attributes:
        groups: for each shard, the positions in the program of the devices that hold
            the shard. All groups have the same length.
        tiles: for each shard, the position of the shard in the grid of shards.
        grid: the number of shards along each dimension of the tensor.
    """

    groups: tuple[tuple[int, ...], ...]
    tiles: tuple[tuple[int, ...], ...]
    grid: tuple[int, ...]

    @property
    def copies(self) -> int:
        """The number of devices that hold each shard."""
        return len(self.groups[0])

    @property
    def numbers(self) -> tuple[int, ...]:
        """The index of the share that each device of the program sends."""
        out = [0] * sum(map(len, self.groups))
        for group in self.groups:
            for number, place in enumerate(group):
                out[place] = number
        return tuple(out)


def replicas_of(
    devices: Sequence[jax.Device], shape: Sequence[int], sharding: Sharding
) -> Replicas:
    """Finds the replicas of each shard of a tensor. All shards have equal shapes."""
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
    devices: Sequence[jax.Device], shape: Sequence[int], width: int, same: Replicas
) -> Sharding | None:
    """Returns a sharding that divides each shard among the devices that replicate it.

    Returns None if the shard is small, or if no dimension can be divided evenly.
    `width` is the size of an element in bytes.
    """
    part = [n // m for n, m in zip(shape, same.grid, strict=True)]
    if math.prod(part) * width < MIN_SHARDED_BYTES:
        return None
    axis = next((d for d, n in enumerate(part) if n % same.copies == 0), None)
    if axis is None:
        return None
    grid = list(same.grid)
    grid[axis] *= same.copies
    assignment = np.zeros(grid, np.int64)
    for tile, group in zip(same.tiles, same.groups, strict=True):
        for number, place in enumerate(group):
            at = list(tile)
            at[axis] = at[axis] * same.copies + number
            assignment[tuple(at)] = place
    return jax_private.tiled_sharding(devices, assignment)


def assign_shares(
    devices: Sequence[jax.Device], avals: Sequence[Aval], shardings: Sequence[Sharding]
) -> tuple[list[Sharding], list[Replicas | None]]:
    """Assigns a share of each replicated tensor to each device of a program.

    Returns for each tensor the sharding to use, which is finer than before if possible,
    and the replicas if `slice_all` must slice the tensor, else None.
    """
    chosen: list[Sharding] = []
    cut: list[Replicas | None] = []
    for aval, sharding in zip(avals, shardings, strict=True):
        same, finer_one = replicas_of(devices, aval.shape, sharding), None
        if same.copies > 1 and aval.size > 0:
            finer_one = finer_sharding(devices, aval.shape, aval.dtype.itemsize, same)
        whole = same.copies == 1 or aval.size == 0 or finer_one is not None
        chosen.append(sharding if finer_one is None else finer_one)
        cut.append(None if whole else same)
    return chosen, cut


def slice_all(
    values: Sequence[Traced], cut: Sequence[Replicas | None], position: Traced
) -> list[Traced]:
    """Replaces each value that has an entry in `cut` by the share of one device.

    `position` is the position of the device in the program.
    """
    out = list(values)
    for i, same in enumerate(cut):
        if same:
            number = jnp.asarray(same.numbers, jnp.int32)[position]
            out[i] = slice_share(values[i], number, same.copies)
    return out


def gather_all(
    shares: Sequence[Traced],
    values: Sequence[Traced],
    cut: Sequence[Replicas | None],
    axis: str,
) -> list[Traced]:
    """Gathers the shares of all devices along the mesh axis `axis`, after `slice_all`.

    `values` are the values before `slice_all`; only their shapes are used.
    """
    out = list(shares)
    for i, same in enumerate(cut):
        if same:
            out[i] = gather_share(shares[i], values[i].shape, axis, same.groups)
    return out


def share_aval(aval: Aval, count: int) -> Aval:
    return jax.core.ShapedArray((-(-aval.size // count),), aval.dtype)


def slice_share(x: Traced, number: Traced, count: int) -> Traced:
    """Returns share `number` of `count` equal shares of all elements.

    The last share is padded with zeros.
    """
    each = -(-x.size // count)
    flat = jnp.pad(x.reshape(-1), (0, each * count - x.size))
    return jax.lax.dynamic_slice(flat, (number * each,), (each,))


def gather_share(
    share: Traced,
    shape: Sequence[int],
    axis: str | Sequence[str],
    groups: Sequence[Sequence[int]] | None,
) -> Traced:
    """Gathers the shares of all devices along mesh axes, after `slice_share`.

    Each of `groups` has the positions, along the axes, of the devices that hold the
    shares of one tensor. With None, all devices hold shares of one tensor.
    """
    flat: Traced = jax.lax.all_gather(share, axis, axis_index_groups=groups, tiled=True)
    return flat[: math.prod(shape)].reshape(shape)


# -- inside of shard_map ---------------------------------------------------------------


def varying_axes(avals: Sequence[Aval]) -> list[frozenset[str] | None]:
    """Returns the mesh axes over which each value differs, or None if unknown."""
    known = jax_private.checks_varying()
    return [jax_private.varying_axes(aval) if known else None for aval in avals]


class ManualShares:
    """Shares of values inside a shard_map, whose mesh axes are manual.

    A value that does not differ over some mesh axes is replicated along these axes, so
    each device sends a share of the value. Other values are sent whole.

    Attributes:
        avals: the avals of the shares and whole values that are sent.
        varying: for each of them, the axes over which the sent value differs; None if
            it may differ over all axes.
    """

    def __init__(self, ctx: Context, program: Program, avals: Sequence[Aval]) -> None:
        assert program.mesh is not None
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

    def slice_values(self, values: Sequence[IrValue]) -> list[IrValue]:

        def cut(*xs: Traced) -> list[Traced]:
            return [
                slice_share(x, jax.lax.axis_index(axes), self._device_count(axes))
                if axes
                else x
                for x, axes in zip(xs, self._replicated, strict=True)
            ]

        return self._lower(cut, values, self._whole, self.avals)

    def gather_values(self, results: Sequence[IrValue]) -> list[IrValue]:

        def gather(*xs: Traced) -> list[Traced]:
            return [
                gather_share(x, aval.shape, axes, None) if axes else x
                for x, aval, axes in zip(xs, self._whole, self._replicated, strict=True)
            ]

        return self._lower(gather, results, self.avals, self._whole)

    def _lower(
        self,
        function: Callable[..., list[Traced]],
        values: Sequence[IrValue],
        before: Sequence[Aval],
        after: Sequence[Aval],
    ) -> list[IrValue]:
        if not any(self._replicated):
            return list(values)
        with jax_private.named_axes(self._mesh):
            return jax_private.lower_function(
                self._ctx, function, values, before, after
            )
