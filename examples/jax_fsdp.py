"""FSDP: a model is sharded over the devices of each rank, and averaged between ranks.

    python jax_fsdp.py                                 one rank, all its devices
    ringrun -np 2 python jax_fsdp.py                   two ranks with four devices each
    ringrun -np 3 --min-np 2 python jax_fsdp.py        elastic: ranks may be killed
    ringrun -np 4 --group-size 2 python jax_fsdp.py    two models, each over two ranks

Inside a rank, JAX shards parameters, optimizer state and batch over the local devices
(fully sharded data parallel, in plain `jit`). All local devices together make one call
of ringjax. Transformer and text are those of `jax_char_lm.py`. Without accelerators,
JAX uses the CPU as four devices (``--devices``). Needs
``pip install "ringjax[examples]"``.

To go further: shard other dimensions in `sharding_of`, such as the attention heads.
"""

from __future__ import annotations

import argparse
import os
import time
from pydoc_data.topics import topics

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_char_lm import Transformer, make_step, windows

import ringjax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=24, help="sequences of each rank")
parser.add_argument("--length", type=int, default=64, help="characters of a sequence")
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--devices", type=int, default=4, help="if the CPU is used")
parser.add_argument("--pause", type=float, default=0.0, help="seconds after a step")
arguments = parser.parse_args()

jax.config.update("jax_num_cpu_devices", arguments.devices)
# With asynchronous dispatch on a CPU with few cores, two concurrent programs may wait
# for ever for devices that the other program occupies.
jax.config.update("jax_cpu_enable_async_dispatch", False)
ringjax.init()

# The devices of this process, or of all processes of its group.
mesh = jax.make_mesh((jax.device_count(),), ("shard",), (jax.sharding.AxisType.Auto,))


def sharding_of(leaf):
    """Shards `leaf` over its last dimension that is a multiple of the device count."""
    fits = [i for i, n in enumerate(leaf.shape) if n and n % mesh.size == 0]
    spec = [None] * leaf.ndim
    if fits:
        spec[fits[-1]] = "shard"
    return NamedSharding(mesh, P(*spec))


# Each rank reads the text from its own Python, because a process that joins a running
# job cannot take part in a broadcast before it is a member.
text = "\n\n".join(topics[name] for name in sorted(topics))
alphabet = sorted(set(text))
tokens = np.searchsorted(alphabet, list(text)).astype(np.int32)
model = Transformer(len(alphabet), arguments.length, arguments.width, arguments.layers)
tx = optax.chain(
    ringjax.allreduce_grads(),
    optax.clip_by_global_norm(1.0),  # JAX sums the norm over all shards
    optax.adamw(3e-3),
)


def init_state():
    params = model.init(jax.random.key(0), tokens[None, : model.length])
    return params, tx.init(params)


# The model is created in shards, so no device ever holds the whole model. The step
# returns arrays with the shardings of its arguments, because otherwise the next call
# would compile the step again.
shardings = jax.tree.map(sharding_of, jax.eval_shape(init_state))
params, opt_state = jax.jit(init_state, out_shardings=shardings)()
train_step = jax.jit(make_step(model, tx), out_shardings=(*shardings, None))


def batch_of(number):
    """Returns the sequences of this rank in a step, sharded over its devices."""
    rng = np.random.default_rng([number, ringjax.rank()])
    count = jax.local_device_count()
    rows = max(arguments.batch // count, 1) * count
    share = windows(tokens, rng, rows, model.length)
    sharding = NamedSharding(mesh, P("shard"))
    return jax.make_array_from_process_local_data(sharding, share)


def warm_up(state):
    """Compiles the step in a joining rank, while the members train."""
    jax.block_until_ready(train_step(state.params, state.opt_state, batch_of(0)))


@ringjax.elastic.run(warm_up=warm_up)
def train(state):
    who = f"rank {ringjax.rank()} of {ringjax.size()}, pid {os.getpid()}"
    print(f"{who}, {mesh.size} devices: from step {state.step}", flush=True)
    while state.step < arguments.steps:
        batch = batch_of(state.step)
        new = train_step(state.params, state.opt_state, batch)
        state.params, state.opt_state, loss = jax.block_until_ready(new)
        state.step += 1
        if ringjax.rank() == 0 and state.step % 10 == 0:
            print(
                f"step {state.step:4}  {ringjax.size()} rank(s)  {float(loss):.3f} "
                "bits/char",
                flush=True,
            )
        time.sleep(arguments.pause)
        state.commit()
    if ringjax.rank() == 0:
        kernels = [x for x in jax.tree.leaves(state.params) if x.ndim > 1]
        pieces = {len({str(s.index) for s in x.addressable_shards}) for x in kernels}
        print(f"result: {float(loss):.3f} bits/char; kernels in {max(pieces)} shards")


train(ringjax.elastic.State(params=params, opt_state=opt_state, step=0))
