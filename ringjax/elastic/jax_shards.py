"""Reads and makes JAX arrays that are sharded over the processes of a group.

In a job of groups, a process sends each shard on its devices once, to the process at
the same place in another group, where the array has the same sharding. `jax_leaves.py`
handles all other arrays.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
)

from ringjax.control.objects import Array


def describe(value: jax.Array) -> str:
    """Returns the argument `detail` for `array_of`: shape and sharding as JSON."""
    about: dict[str, Any] = {"key": None, "spec": None}
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        about["key"] = str(jax.random.key_impl(value))
        value = jax.random.key_data(value)
    about["shape"] = list(value.shape)
    about["places"] = sorted(set(_shard_bounds(value.sharding, value.shape).values()))
    if isinstance(value.sharding, NamedSharding):
        about["spec"] = [
            list(axes) if isinstance(axes, tuple) else axes
            for axes in value.sharding.spec
        ]
        about["mesh"] = _mesh_as_data(value.sharding.mesh)
    return json.dumps(about)


def _mesh_as_data(mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    numbers = {device: number for number, device in _devices_by_number().items()}
    return {
        "names": list(mesh.axis_names),
        "types": [kind.name for kind in mesh.axis_types],
        "shape": list(mesh.devices.shape),
        "devices": [numbers[device] for device in mesh.devices.flat],
    }


def _devices_by_number() -> dict[tuple[int, int], jax.Device]:
    """Returns the devices of this group by (process, index within the process).

    Corresponding devices of all groups have equal keys.
    """
    found: dict[tuple[int, int], jax.Device] = {}
    for device in sorted(jax.devices(), key=lambda d: d.id):
        process = device.process_index
        count = sum(number[0] == process for number in found)
        found[process, count] = device
    return found


def data_of(value: jax.Array) -> Array:
    """Returns the distinct shards of this process, ordered by their bounds."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    # JAX 0.10 may fail to split a fully replicated array into shards.
    if value.is_fully_replicated:
        return np.asarray(value)[None]
    bounds = _shard_bounds(value.sharding, value.shape)
    found = {bounds[shard.device]: shard.data for shard in value.addressable_shards}
    return np.stack([np.asarray(found[key]) for key in sorted(found)])


def array_of(data: Array, detail: str, like: object) -> jax.Array:
    """Returns a JAX array that is sharded over the processes of this group.

    All processes of the group call this function, each with its own shards. `data` is
    the result of `data_of`, and `detail` the result of `describe`. If `detail` contains
    no sharding, the array gets the sharding of `like`, this rank's current value.

    Raises:
        ValueError: the sharding of this process has other bounds.
    """
    about = json.loads(detail)
    shape, bounds = tuple(about["shape"]), about["places"]
    if about["spec"] is not None:
        sharding: Sharding | None = _sharding(about["mesh"], about["spec"])
    else:
        if isinstance(like, jax.Array) and about["key"] is not None:
            like = jax.random.key_data(like)
        sharding = getattr(like, "sharding", None)
    where = {} if sharding is None else _shard_bounds(sharding, shape)
    if sharding is None or not where or sorted(set(where.values())) != bounds:
        raise ValueError(
            f"ringjax.elastic: an array of shape {list(shape)} comes in shards at "
            f"{' '.join(bounds)}, and here it lies as {sharding}; place the state over "
            "the devices of the group before the training function, in all groups alike"
        )
    parts = [jax.device_put(data[bounds.index(p)], d) for d, p in where.items()]
    made = jax.make_array_from_single_device_arrays(shape, sharding, parts)
    key = about["key"]
    return made if key is None else jax.random.wrap_key_data(made, impl=key)


def _sharding(mesh: dict[str, Any], spec: list[Any]) -> NamedSharding:
    """Makes the sharding that `describe` has described, on this group's devices."""
    known = _devices_by_number()
    try:
        devices = [known[tuple(place)] for place in mesh["devices"]]
    except KeyError as error:
        raise ValueError(
            f"ringjax.elastic: the state lies on device {error.args[0][1]} of process "
            f"{error.args[0][0]} of its group, which this group has not; give all "
            "processes the same number of devices"
        ) from None
    kinds = tuple(AxisType[name] for name in mesh["types"])
    grid = np.array(devices).reshape(mesh["shape"])
    axes = (tuple(a) if isinstance(a, list) else a for a in spec)
    return NamedSharding(
        Mesh(grid, tuple(mesh["names"]), axis_types=kinds), PartitionSpec(*axes)
    )


def _shard_bounds(sharding: Sharding, shape: tuple[int, ...]) -> dict[jax.Device, str]:
    """Returns the bounds of the shard on each local device, such as "0:2,0:8"."""
    found = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = (s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        found[device] = ",".join(f"{a}:{b}" for a, b in bounds)
    return found
