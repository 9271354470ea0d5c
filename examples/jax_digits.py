"""A small convolutional network reads handwritten digits, data-parallel.

    python jax_digits.py                    one rank
    ringrun -np 2 python jax_digits.py      two ranks, the same global batch

The data are the 1,797 real images of 8 × 8 pixels inside the wheel of scikit-learn.
In every step the ranks share one global batch, so the number of ranks changes the speed
and not the result. Needs flax and scikit-learn: ``pip install "ringjax[examples]"``.

To go further: ``--batch 384 --learning-rate 4e-3`` gives more ranks something to do,
``--compression bf16`` halves the bytes, ``--overlap`` sends gradients while the rest is
still being computed. See also `jax_char_lm.py`, a transformer, and `jax_plain.py`.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import ringjax

TEST_IMAGES = 360


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=48, help="images of all ranks")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument(
        "--compression", choices=("none", "fp16", "bf16"), default="none"
    )
    parser.add_argument("--overlap", action="store_true", help="also within one host")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Data(NamedTuple):
    """Images and their labels."""

    images: np.ndarray
    labels: np.ndarray

    def rows(self, rows) -> Data:
        """Returns the images and labels with these indices."""
        return Data(self.images[rows], self.labels[rows])

    def shifted(self, steps: np.ndarray) -> Data:
        """Moves every image by its own -1, 0 or 1 pixel, down and to the right."""
        padded = np.pad(self.images, ((0, 0), (1, 1), (1, 1), (0, 0)))
        down, right = (1 + np.arange(8) - steps[:, i, None] for i in (0, 1))
        which = np.arange(len(steps))[:, None, None]
        return Data(padded[which, down[:, :, None], right[:, None, :]], self.labels)


def load(seed: int) -> tuple[Data, Data]:
    """Loads training data and test data, which are equal on all ranks."""
    digits = load_digits()
    everything = Data(
        (digits.images[..., None] / 16).astype(np.float32),
        digits.target.astype(np.int32),
    )
    order = np.random.default_rng(seed).permutation(len(everything.labels))
    return everything.rows(order[TEST_IMAGES:]), everything.rows(order[:TEST_IMAGES])


class Network(nn.Module):
    """A network with two convolutions and two dense layers."""

    @nn.compact
    def __call__(self, x):
        """Returns the logits of the ten digits."""
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.relu(nn.Conv(64, (3, 3), strides=2)(x))
        x = x.reshape(len(x), -1)
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def measure(network, params, data):
    """Returns the loss and the accuracy."""
    logits = network.apply(params, data.images)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, data.labels).mean()
    return loss, (logits.argmax(-1) == data.labels).mean()


def make_step(network, tx):
    @jax.jit
    def step(params, state, batch):
        def loss_fn(p):
            return measure(network, p, batch)

        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, accuracy

    return step


def allreduce_seconds() -> float:
    stats = ringjax.runtime.communicator().stats()
    return stats["allreduce"]["seconds"] if "allreduce" in stats else 0.0


def print_statistics(steps: int) -> None:
    stats = ringjax.runtime.communicator().stats()
    done = stats.get("allreduce")
    if done is None:
        return
    links = [f"{n} × {kind}" for kind, n in stats["transports"].items() if n]
    print(
        f"exchanged: {done['bytes'] / 1e6:.1f} MB of gradients in {done['calls']} "
        f"calls ({done['bytes'] / 1e3 / max(steps, 1):.0f} kB a step)\n"
        f"time in allreduce: {done['seconds']:.2f} s\n"
        f"algorithm: {', '.join(done['algorithms']) or 'none'}\n"
        f"transport: {', '.join(links) or 'none, this is a job of one rank'}"
    )


def main() -> None:
    arguments = parse_arguments()
    ringjax.init()
    rank, size = ringjax.rank(), ringjax.size()
    train, test = load(arguments.seed)
    share = max(arguments.batch // size, 1)
    steps_per_epoch = len(train.labels) // (share * size)
    steps = steps_per_epoch * arguments.epochs

    network = Network()
    params = network.init(jax.random.key(arguments.seed), train.images[:1])
    tx = optax.chain(
        ringjax.allreduce_grads(
            compression=getattr(ringjax.Compression, arguments.compression),
            overlap=arguments.overlap or "auto",
        ),
        optax.adam(optax.cosine_decay_schedule(arguments.learning_rate, max(steps, 1))),
    )
    params = ringjax.broadcast_parameters(params)
    state, step = tx.init(params), make_step(network, tx)
    my_test = test.rows(slice(rank, None, size))
    test_step = jax.jit(lambda p: measure(network, p, my_test))
    if rank == 0:
        count = sum(x.size for x in jax.tree.leaves(params))
        print(f"{size} rank(s), {share * size} images a step, {count:,} parameters")

    # All ranks draw an equal order, and each rank takes its share of every batch.
    rng = np.random.default_rng(arguments.seed + 1)
    for epoch in range(1, arguments.epochs + 1):
        started, waited = time.perf_counter(), allreduce_seconds()
        used = steps_per_epoch * share * size
        shuffled = rng.permutation(len(train.labels))[:used]
        varied = train.shifted(rng.integers(-1, 2, (len(train.labels), 2)))
        history = []
        for rows in shuffled.reshape(steps_per_epoch, size, share):
            params, state, *metrics = step(params, state, varied.rows(rows[rank]))
            history.append(metrics)
        loss, accuracy = (float(v) for v in np.mean(jax.device_get(history), axis=0))
        seconds, waited = time.perf_counter() - started, allreduce_seconds() - waited
        _, tested = test_step(params)
        shown = ringjax.allreduce_metrics({"loss": loss, "train": accuracy})
        tested = ringjax.allreduce_metrics(tested, weight=len(my_test.labels))
        if rank == 0:
            print(
                f"epoch {epoch:2}: loss {shown['loss']:.4f}  "
                f"train {shown['train']:6.2%}  test {tested:6.2%}  "
                f"{used / seconds:6.0f} images/s  "
                f"allreduce {1e3 * waited / steps_per_epoch:.2f} ms a step",
                flush=True,
            )
    if rank == 0:
        print_statistics(steps)
        print("to go further: python jax_digits.py --help, examples/jax_char_lm.py")


if __name__ == "__main__":
    main()
