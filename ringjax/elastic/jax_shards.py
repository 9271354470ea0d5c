"""Arrays of JAX that several processes hold together, in a job of groups, as memory.

A process sends the shards that lie on its devices, each once, to the one at its place
in another group, where they lie alike. For `jax_leaves.py`, which knows the others.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Array = np.ndarray[Any, Any]


def describe(value: Any) -> str:
    """What `array_of` must know besides the data."""
    about: dict[str, Any] = {"key": None, "spec": None}
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        about["key"] = str(jax.random.key_impl(value))
        value = jax.random.key_data(value)
    about["shape"] = list(value.shape)
    about["places"] = sorted(set(_places(value.sharding, value.shape).values()))
    if isinstance(value.sharding, NamedSharding):
        about["spec"] = [
            list(axes) if isinstance(axes, tuple) else axes
            for axes in value.sharding.spec
        ]
        about["mesh"] = _mesh_as_data(value.sharding.mesh)
    return json.dumps(about)


def _mesh_as_data(mesh: Any) -> dict[str, Any]:
    numbers = {device: place for place, device in _numbered().items()}
    return {
        "names": list(mesh.axis_names),
        "types": [kind.name for kind in mesh.axis_types],
        "shape": list(mesh.devices.shape),
        "devices": [numbers[device] for device in mesh.devices.flat],
    }


def _numbered() -> dict[tuple[int, int], Any]:
    """The devices of this group by process and number there, alike in all groups."""
    found: dict[tuple[int, int], Any] = {}
    for device in sorted(jax.devices(), key=lambda d: d.id):
        process = device.process_index
        count = sum(place[0] == process for place in found)
        found[process, count] = device
    return found


def data_of(value: Any) -> Array:
    """The different shards that this process has, in the order of their places."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if value.is_fully_replicated:  # JAX 0.10 cannot always take such a one apart
        return np.asarray(value)[None]
    places = _places(value.sharding, value.shape)
    found = {places[shard.device]: shard.data for shard in value.addressable_shards}
    return np.stack([np.asarray(found[place]) for place in sorted(found)])


def array_of(data: Array, detail: str, like: Any) -> Any:
    """This process's part of an array; the others of its group make theirs.

    Args:
        data: of `data_of`, as `detail` is of `describe`.
        like: what this process has in its place; asked where that is not known.

    Raises:
        ValueError: the shards would be elsewhere here.
    """
    about = json.loads(detail)
    shape, places = tuple(about["shape"]), about["places"]
    if about["spec"] is not None:
        sharding: Any = _sharding(about["mesh"], about["spec"])
    else:
        if isinstance(like, jax.Array) and about["key"] is not None:
            like = jax.random.key_data(like)
        sharding = getattr(like, "sharding", None)
    where = {} if sharding is None else _places(sharding, shape)
    if not where or sorted(set(where.values())) != places:
        raise ValueError(
            f"ringjax.elastic: an array of shape {list(shape)} comes in shards at "
            f"{' '.join(places)}, and here it lies as {sharding}; place the state over "
            "the devices of the group before the training function, in all groups alike"
        )
    parts = [jax.device_put(data[places.index(p)], d) for d, p in where.items()]
    made = jax.make_array_from_single_device_arrays(shape, sharding, parts)
    key = about["key"]
    return made if key is None else jax.random.wrap_key_data(made, impl=key)


def _sharding(mesh: dict[str, Any], spec: list[Any]) -> NamedSharding:
    """As the source has it, on the devices of this group."""
    known = _numbered()
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


def _places(sharding: Any, shape: tuple[int, ...]) -> dict[Any, str]:
    """Which part of an array of this shape each local device has: "0:2,0:8"."""
    found = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = (s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        found[device] = ",".join(f"{a}:{b}" for a, b in bounds)
    return found
