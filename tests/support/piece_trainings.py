"""Small trainings by `ringjax.pieces.step` for tests that compare their bits.

`TRAININGS` makes each: models of linen, nnx and equinox, with batch normalisation,
dropout, clipping, MultiSteps and bfloat16. The data of a late step are so large that
the step has to be repeated for its exponents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import ringjax
from ringjax.pieces.shares import Shares

PIECES, STEPS, REPEATED = 6, 5, 3


class Started(NamedTuple):
    """A training before its first step."""

    step: Any
    training: Any


def load(number: int, piece: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns images and labels of one piece."""
    rng = np.random.default_rng([number, piece])
    images = rng.normal(size=(4, 6, 6, 1)).astype("f4")
    scale = np.float32(2.0**16 if number == REPEATED else 1.0)
    return scale * images, rng.integers(0, 3, 4).astype("i4")


def digest(tree: Any) -> str:
    """Returns the SHA-256 of all leaves of a tree."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def cross_entropy(logits: Any, labels: Any) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.astype(jnp.float32).mean()


class Net(linen.Module):
    """A convolution, batch normalisation and dropout."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Conv(4, (3, 3))(x)
        x = linen.relu(linen.BatchNorm(use_running_average=False)(x))
        x = linen.Dropout(0.2, deterministic=False)(x.reshape(len(x), -1))
        return linen.Dense(3)(x)


def with_linen() -> Started:
    net = Net()

    def loss_of(params: Any, stats: Any, data: Any, key: jax.Array) -> Any:
        logits, new = net.apply(
            {"params": params, "batch_stats": stats},
            data[0],
            rngs={"dropout": key},
            mutable="batch_stats",
        )
        accuracy = (logits.argmax(-1) == data[1]).mean(dtype=jnp.float32)
        return cross_entropy(logits, data[1]), (new["batch_stats"], accuracy)

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    step = ringjax.pieces.step(loss_of, tx, PIECES, has_aux=True)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = net.init(keys, load(0, 0)[0])
    stats = variables["batch_stats"]
    return Started(step, step.init(variables["params"], load, stats=stats))


def with_nnx() -> Started:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        *(nnx.Linear(36, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)),
        *(nnx.relu, nnx.Linear(16, 3, rngs=rngs)),
    )
    graph, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)

    def loss_of(params: Any, stats: Any, data: Any, key: jax.Array) -> Any:
        model = nnx.merge(graph, params, stats)
        x = data[0].reshape(len(data[0]), -1)
        logits = model(x * jax.random.bernoulli(key, 0.8, x.shape))
        return cross_entropy(logits, data[1]), nnx.state(model, nnx.BatchStat)

    tx = optax.MultiSteps(optax.adam(1e-2), 2)
    step = ringjax.pieces.step(loss_of, tx, PIECES)
    return Started(step, step.init(params, load, stats=stats))


def with_equinox(one_program: bool = False) -> Started:
    model = equinox.nn.MLP(36, 3, 16, 2, key=jax.random.key(0))
    params, static = equinox.partition(model, equinox.is_inexact_array)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    def loss_of(params: Any, data: Any, key: jax.Array) -> jax.Array:
        model = equinox.combine(params, static)
        x = data[0].reshape(len(data[0]), -1).astype(jnp.bfloat16)
        return cross_entropy(jax.vmap(model)(x), data[1])

    tx = optax.adam(1e-2)
    step = ringjax.pieces.step(loss_of, tx, PIECES, one_program=one_program)
    return Started(step, step.init(params, load))


TRAININGS: dict[str, Callable[[], Started]] = {
    "linen": with_linen,
    "nnx": with_nnx,
    "equinox": with_equinox,
    "one program": lambda: with_equinox(one_program=True),
}


class RandomShares(Shares):
    """Shares that change in every step, and leave some places without pieces."""

    def __init__(self, pieces: int, places: int) -> None:
        super().__init__(pieces, places)
        self._rng = np.random.default_rng(places)
        self.update([1] * places, [])

    def update(self, present: Any, measured: Any) -> None:
        here = np.array(present) / np.sum(present)
        self.counts = self._rng.multinomial(self._pieces, here).tolist()


def print_digests(names: Iterable[str] = TRAININGS) -> None:
    """Prints a line of name and SHA-256 for each training."""
    for name in names:
        step, training = TRAININGS[name]()
        for _ in range(STEPS):
            training, out = step(training, load)
        print(name.replace(" ", "-"), digest((training, out)), flush=True)
