"""Programs of jax.distributed that know nothing of ringjax, as many users write them.

    ringrun -np 3 --jax-collectives python jax_programs.py FOLDER
    XLA_FLAGS=--xla_force_host_platform_device_count=3 python jax_programs.py FOLDER

The second command runs them in one process, with the same results. Each process
writes the results of all programs to a file in FOLDER.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from support.jax_calls import count_calls

DEPTH, WIDTH, BATCH = 12, 24, 24  # multiples of all numbers of processes


def numbers(*shape: int) -> np.ndarray[Any, Any]:
    """Returns numbers between -1 and 1 that depend on the shape only."""
    return np.random.default_rng(shape).uniform(-1, 1, shape).astype(np.float32)


def shard(mesh: Mesh, tree: Any, specs: Any) -> Any:
    return jax.device_put(
        tree, jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    )


def on_every_device(mesh: Mesh, tree: Any) -> Any:
    return jax.jit(lambda t: t, out_shardings=NamedSharding(mesh, P()))(tree)


PARAMETERS = {"first": numbers(DEPTH, WIDTH), "second": numbers(WIDTH, 4)}


def loss_of(parameters: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ parameters["first"])
    return jnp.mean((hidden @ parameters["second"] - batch["y"]) ** 2)


def batches(mesh: Mesh, axis: str) -> list[Any]:
    data = {"x": numbers(5, BATCH, DEPTH), "y": numbers(5, BATCH, 4)}
    steps = [{name: values[i] for name, values in data.items()} for i in range(5)]
    return [shard(mesh, step, dict.fromkeys(data, P(axis))) for step in steps]


# -- the programs --------------------------------------------------------------------


def data_parallel(mesh: Mesh) -> Any:
    """shard_map, and gradients of a mean over all devices."""
    tx = optax.adam(0.1)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("p")), out_specs=P()
    )
    def step(parameters: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(
            lambda p: lax.pmean(loss_of(p, batch), "p")
        )(parameters)
        updates, state = tx.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, loss

    parameters, state, losses = PARAMETERS, tx.init(PARAMETERS), []
    for batch in batches(mesh, "p"):
        parameters, state, loss = step(parameters, state, batch)
        losses.append(loss)
    return parameters, losses


def train(mesh: Mesh, axis: str, specs: Any) -> Any:
    """Trains with parameters, and a state of the optimiser, of these shardings."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))

    @jax.jit
    def step(parameters: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
        updates, state = tx.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    parameters, losses = shard(mesh, PARAMETERS, specs), []
    state = jax.jit(tx.init)(parameters)
    for batch in batches(mesh, axis):
        parameters, state, loss = step(parameters, state, batch)
        losses.append(loss)
    return parameters, state, losses


def fully_sharded(mesh: Mesh) -> Any:
    """FSDP: everything is sharded, and the partitioner inserts all collectives."""
    return train(mesh, "p", {"first": P(None, "p"), "second": P("p")})


def two_axes(mesh: Mesh) -> Any:
    """Data over one axis of the mesh, the model over the other."""
    columns = 2 if mesh.size % 2 == 0 else 1
    grid = Mesh(mesh.devices.reshape(-1, columns), ("data", "model"))
    return train(grid, "data", {"first": P(None, "model"), "second": P("model")})


def pipeline(mesh: Mesh) -> Any:
    """A stage on each device; activations and gradients move by ppermute."""
    stages, pieces = mesh.size, 6

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("p"), P()), out_specs=P())
    def forward(weights: Any, x: Any) -> Any:
        place = lax.axis_index("p")
        onward = [(i, i + 1) for i in range(stages - 1)]

        def tick(received: Any, time: Any) -> Any:
            taken = jnp.where(place == 0, x[jnp.minimum(time, pieces - 1)], received)
            result = jnp.tanh(taken @ weights[0])
            return lax.ppermute(result, "p", onward), result

        begin = lax.pcast(jnp.zeros_like(x[0]), "p", to="varying")
        _, results = lax.scan(tick, begin, jnp.arange(pieces + stages - 1))
        return lax.psum(jnp.where(place == stages - 1, results[stages - 1 :], 0), "p")

    weights = shard(mesh, numbers(stages, 8, 8), P("p"))
    x = numbers(pieces, 3, 8)
    loss = lambda w: jnp.sum(forward(w, x) ** 2)  # noqa: E731
    return jax.jit(forward)(weights, x), jax.jit(jax.value_and_grad(loss))(weights)


def experts(mesh: Mesh) -> Any:
    """Rows go to the experts and back by all_to_all, and sums by psum_scatter."""

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("p"), P("p")), out_specs=P("p")
    )
    def forward(weights: Any, x: Any) -> Any:
        sent = lax.all_to_all(x, "p", 0, 0, tiled=True)
        back = lax.all_to_all(jnp.tanh(sent @ weights[0]), "p", 0, 0, tiled=True)
        total = lax.psum_scatter(back, "p", scatter_dimension=1, tiled=True)
        return back + jnp.mean(lax.all_gather(total, "p"))

    weights = shard(mesh, numbers(mesh.size, WIDTH, WIDTH), P("p"))
    x = shard(mesh, numbers(BATCH * mesh.size, WIDTH), P("p"))
    loss = lambda w, x: jnp.mean(forward(w, x) ** 2)  # noqa: E731
    return jax.jit(forward)(weights, x), jax.jit(jax.grad(loss, (0, 1)))(weights, x)


def helpers(mesh: Mesh) -> Any:
    """jax.experimental.multihost_utils."""
    multihost_utils.sync_global_devices("helpers")
    value = numbers(BATCH, 3)
    multihost_utils.assert_equal(value, "the processes have different numbers")
    own = value.reshape(jax.process_count(), -1, 3)[jax.process_index()]
    whole = multihost_utils.host_local_array_to_global_array(own, mesh, P("p"))
    part = multihost_utils.global_array_to_host_local_array(whole, mesh, P("p"))
    first = multihost_utils.broadcast_one_to_all(value + jax.process_index())
    gathered = multihost_utils.process_allgather(part, tiled=True)
    return (
        whole * 2,
        gathered,
        first,
        multihost_utils.process_allgather(whole, tiled=True),
    )


def checkpoint(mesh: Mesh, folder: Path) -> Any:
    """Saves sharded arrays by Orbax, and restores them with other shardings.

    If the folder has checkpoints, which other processes wrote, it restores these.
    """
    specs = {"first": P(None, "p"), "second": P("p")}
    state, double = shard(mesh, PARAMETERS, specs), jax.jit(lambda t: 2 * t)
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        if manager.latest_step() is None:
            for step in range(3):
                manager.save(step, args=ocp.args.StandardSave(state))
                state = jax.tree.map(double, state)
            manager.wait_until_finished()
        other = {"first": P("p"), "second": P()}
        wanted = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
            ),
            state,
            other,
        )
        latest = manager.latest_step()
        restored = manager.restore(latest, args=ocp.args.StandardRestore(wanted))
    expected = jax.tree.map(lambda x: 4 * x, PARAMETERS)
    same = jax.tree.map(lambda x, y: jnp.array_equal(x, y), restored, expected)
    return latest, restored, same


PROGRAMS: list[Callable[[Mesh], Any]] = [
    *(data_parallel, fully_sharded, two_axes, pipeline, experts, helpers)
]


def run(folder: Path) -> None:
    """Runs all programs, and writes their results."""
    mesh = Mesh(np.array(jax.devices()), ("p",))
    found = {program.__name__: program(mesh) for program in PROGRAMS}
    found["checkpoint"] = checkpoint(mesh, folder)
    leaves = jax.tree.leaves_with_path(on_every_device(mesh, found))
    results = {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}
    calls = {f"calls {op}": np.array(n) for op, n in count_calls().items()}
    file = folder / f"{jax.process_index()}-of-{jax.process_count()}.npz"
    np.savez(file, **results, **calls)


if __name__ == "__main__":
    if os.environ.get("RINGJAX_SIZE", "1") != "1":
        jax.distributed.initialize()
    run(Path(sys.argv[1]))
