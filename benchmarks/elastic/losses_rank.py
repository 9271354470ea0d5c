"""A process of losses.py: trains together with others until it is killed.

The command is `python losses_rank.py PEER`, with more options in the environment. All
peers train the same model: four dense layers, 256 wide (1 MiB of gradients), by Adam,
on 32 samples for each replica. The process writes a line for each step that has
succeeded or failed, with the time of the clock that all processes of a machine share.
The file imports nothing of the benchmark, because the Python of a peer has its own
packages.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAYERS, WIDTH, SAMPLES = 4, 256, 32


class Log:
    """The lines of this process, in a file with its name."""

    def __init__(self, name: str) -> None:
        path = Path(os.environ["LOSSES_FOLDER"], f"{name}.log")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self.write("pid", os.getpid())

    def write(self, *words: object) -> None:
        """Writes a line immediately, because a killed process cannot close the file."""
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())

    def step(self, number: int, replicas: int) -> None:
        """Records that step `number`, which `replicas` replicas made, ends now."""
        self.write("step", number, time.monotonic(), replicas)


def ringjax_main() -> None:
    """Trains with ringjax. A replica is a process, or a group of processes."""
    import jax
    import optax

    import ringjax

    prepare_jax(jax)
    ringjax.init()
    log = Log(os.environ["RINGJAX_WORKER"])
    mesh = jax.make_mesh((jax.device_count(),), ("shard",), (_auto(jax),))
    tx = optax.chain(ringjax.allreduce_grads(), optax.adam(1e-3))
    params, opt_state, step_of = jax_step(jax, tx, mesh)
    batch = jax_batch(jax, mesh, ringjax.replica_set().rank(), 1, "shard")

    def warm_up(state: Any) -> None:
        jax.block_until_ready(step_of(state.params, state.opt_state, batch))

    @ringjax.elastic.run(warm_up=warm_up)
    def train(state: Any) -> None:
        while True:
            new = step_of(state.params, state.opt_state, batch)
            state.params, state.opt_state = jax.block_until_ready(new)
            state.step += 1
            log.step(state.step, ringjax.replica_set().size())
            state.commit()

    train(ringjax.elastic.State(params=params, opt_state=opt_state, step=0))


def jax_main() -> None:
    """Trains with one program over the devices of all processes, the replicas."""
    import jax
    import optax

    prepare_jax(jax)
    size, rank = int(os.environ["LOSSES_SIZE"]), int(os.environ["LOSSES_RANK"])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{os.environ['LOSSES_PORT']}",
        size,
        rank,
        heartbeat_timeout_seconds=int(os.environ["LOSSES_HEARTBEAT"]),
        cluster_detection_method="deactivate",
    )
    log = Log(os.environ["LOSSES_NAME"])
    shape = (size, jax.local_device_count())
    mesh = jax.make_mesh(shape, ("replica", "shard"), (_auto(jax),) * 2)
    params, opt_state, step_of = jax_step(jax, optax.adam(1e-3), mesh)
    batch = jax_batch(jax, mesh, rank, size, ("replica", "shard"))
    number = 0
    while True:
        new = step_of(params, opt_state, batch)
        params, opt_state = jax.block_until_ready(new)
        number += 1
        log.step(number, size)


def _auto(jax: Any) -> Any:
    return jax.sharding.AxisType.Auto


def prepare_jax(jax: Any) -> None:
    """Configures JAX: number of devices, and no asynchronous dispatch."""
    jax.config.update("jax_num_cpu_devices", int(os.environ["LOSSES_DEVICES"]))
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def jax_step(jax: Any, tx: Any, mesh: Any) -> tuple[Any, Any, Any]:
    """Returns parameters and optimizer state in shards, and the compiled step."""
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    def begin() -> Any:
        keys = jax.random.split(jax.random.key(0), LAYERS)
        scale = WIDTH**-0.5
        params = [scale * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]
        return params, tx.init(params)

    def loss_of(params: Any, x: Any) -> Any:
        out = x
        for weights in params:
            out = jnp.tanh(out @ weights)
        return jnp.mean((out - x) ** 2)

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        updates, opt_state = tx.update(jax.grad(loss_of)(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def cut(leaf: Any) -> Any:
        return NamedSharding(mesh, P("shard") if leaf.ndim == 2 else P())

    where = jax.tree.map(cut, jax.eval_shape(begin))
    params, opt_state = jax.jit(begin, out_shardings=where)()
    return params, opt_state, jax.jit(step, out_shardings=where)


def jax_batch(jax: Any, mesh: Any, replica: int, replicas: int, axes: Any) -> Any:
    """Returns a global batch with the samples of this replica."""
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    def rows(index: Any) -> Any:
        rng = np.random.default_rng(replica)
        own = rng.normal(size=(SAMPLES, WIDTH)).astype("f4")
        # JAX never requests the rows of other replicas.
        return np.tile(own, (replicas, 1))[index]

    where = NamedSharding(mesh, P(axes))
    return jax.make_array_from_callback((SAMPLES * replicas, WIDTH), where, rows)


def torchft_main() -> None:
    """Trains with torchft. A replica is a process with one device.

    The code follows torchft's train_ddp.py, but without DistributedDataParallel: the
    hook of 0.2.0 ends the survivors by an assertion if a loss is detected while the
    hook waits.
    """
    import torch
    import torchft

    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed: Any = torch.distributed
    store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*(m for x in layers for m in (x, torch.nn.Tanh())))
    adam = torch.optim.Adam(model.parameters(), 1e-3)

    def load(state: Mapping[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=datetime.timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "adam": adam.state_dict()},
        min_replica_size=1,
        timeout=datetime.timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica_{os.environ['LOSSES_RANK']}",
        hostname="127.0.0.1",
    )
    log = Log(os.environ["LOSSES_NAME"])
    weights: list[Any] = list(model.parameters())
    optimizer = torchft.Optimizer(manager, adam)
    x = torch.randn(SAMPLES, WIDTH)
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        ((model(x) - x) ** 2).mean().backward()
        flat: Any = torch.cat([w.grad.view(-1) for w in weights])
        manager.allreduce(flat).wait()
        for w, part in zip(weights, flat.split(WIDTH * WIDTH), strict=True):
            w.grad.copy_(part.view_as(w.grad))
        optimizer.step()
        if manager.current_step() > before:
            log.step(manager.current_step(), manager.num_participants())
        else:
            log.write("gave-up", time.monotonic())


if __name__ == "__main__":
    {"ringjax": ringjax_main, "jax": jax_main, "torchft": torchft_main}[sys.argv[1]]()
