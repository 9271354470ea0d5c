"""Parameters that are sharded over several devices of a process.

A piece is computed by all devices of a process. Its gradients are added, and exchanged,
in full on each of these devices, because the layout of the sums must not depend on the
shardings. Only the parameters and the optimizer's state stay sharded.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ringjax.pieces.training import NAME, described, paths


def on_several(leaf: Any) -> bool:
    """Returns whether a leaf is an array on several devices."""
    return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1


def mesh_of(params: Any) -> Mesh | None:
    """Returns the mesh of the parameters; None if all are on one device.

    Raises:
        ValueError: a parameter is on several devices without a mesh, or on another mesh
            than the parameters before it.
    """
    found: Mesh | None = None
    for name, leaf in paths(params):
        if not on_several(leaf):
            continue
        mesh = getattr(leaf.sharding, "mesh", None)
        if mesh is None or found not in (None, mesh):
            raise ValueError(
                f"{NAME}: parameter {name!r}, {described(leaf)}, has the sharding "
                f"{leaf.sharding}, expected a NamedSharding over one mesh for all "
                "parameters; put it there by jax.device_put"
            )
        found = mesh
    return found


def check_on_one(data: Any) -> None:
    """Raises a ValueError if data are on several devices, but no parameter is."""
    for name, leaf in paths(data):
        if on_several(leaf):
            raise ValueError(
                f"{NAME}: load(0, 0) returned {name!r}, {described(leaf)}, on "
                f"{len(leaf.sharding.device_set)} devices, but the parameters are on "
                "one; put them on the same mesh by jax.device_put"
            )


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that each device holds in full."""
    return NamedSharding(mesh, PartitionSpec())


def placed(tree: Any, mesh: Mesh) -> Any:
    """Returns a tree of arrays whose leaves are all on the devices of `mesh`."""
    return jax.tree.map(
        lambda x: x if on_several(x) else jax.device_put(x, replicated(mesh)), tree
    )


def constrained(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns an array of a compiled program with another sharding."""
    if AxisType.Explicit in sharding.mesh.axis_types:
        moved: jax.Array = jax.sharding.reshard(x, sharding)
        return moved
    kept: jax.Array = jax.lax.with_sharding_constraint(x, sharding)
    return kept
