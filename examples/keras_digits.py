"""A small convolutional network reads handwritten digits with Keras 3, data-parallel.

    python keras_digits.py                                   one rank
    ringrun -np 2 python keras_digits.py                     two, the same global batch
    KERAS_BACKEND=jax ringrun -np 2 python keras_digits.py   on JAX; also torch

The data and the network are those of `jax_digits.py`: 1,797 real images of 8 × 8 pixels
inside the wheel of scikit-learn. `model.fit` trains on each backend of Keras. On JAX,
gradients are averaged inside the step that Keras compiles. A program for Horovod
differs only by its import. Needs ``pip install "ringjax[keras,examples]"`` and the
backend.

To go further: ``--batch 384 --learning-rate 4e-3`` gives more ranks something to do,
``--compression bf16`` halves the bytes. See also `tensorflow_digits.py`, which has a
custom training loop, and `jax_digits.py`.
"""

from __future__ import annotations

import argparse
import time

import keras
import numpy as np
from sklearn.datasets import load_digits

import ringjax.keras as hvd
from ringjax.data import DistributedSampler

TEST_IMAGES = 360


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=48, help="images of all ranks")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument(
        "--compression", choices=("none", "fp16", "bf16"), default="none"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load(seed: int) -> list[np.ndarray]:
    """Loads training data and test data, which are equal on all ranks."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images = (digits.images[order, :, :, None] / 16).astype("float32")
    labels = digits.target[order].astype("int32")
    parts = [np.split(x, [len(x) - TEST_IMAGES]) for x in (images, labels)]
    return [part[which] for which in (0, 1) for part in parts]


def shifted(images: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Moves every image by its own -1, 0 or 1 pixel, down and to the right."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    down, right = (1 + np.arange(8) - steps[:, i, None] for i in (0, 1))
    which = np.arange(len(steps))[:, None, None]
    return padded[which, down[:, :, None], right[:, None, :]]


class Batches(keras.utils.PyDataset):
    """The share of this rank of every global batch, in a new order in every epoch."""

    def __init__(self, images, labels, share: int, seed: int) -> None:
        super().__init__()
        self.images, self.labels, self.share = images, labels, share
        self.sampler = DistributedSampler(len(labels), seed=seed, drop_last=True)
        self.draw = np.random.default_rng([seed, hvd.rank()])
        self.rows = np.fromiter(self.sampler, int)

    def __len__(self) -> int:
        return len(self.rows) // self.share

    def __getitem__(self, index: int):
        rows = self.rows[index * self.share :][: self.share]
        steps = self.draw.integers(-1, 2, (len(rows), 2))
        return shifted(self.images[rows], steps), self.labels[rows]

    def on_epoch_end(self) -> None:
        """Draws the order of the next epoch."""
        self.sampler.set_epoch(self.sampler.epoch + 1)
        self.rows = np.fromiter(self.sampler, int)


class EpochPrinter(keras.callbacks.Callback):
    """Prints a line for each epoch on rank 0, after the metrics have been averaged."""

    def __init__(self, images_an_epoch: int) -> None:
        super().__init__()
        self.images = images_an_epoch

    def on_epoch_begin(self, epoch: int, logs=None) -> None:
        """Starts the clock."""
        self.started = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs=None) -> None:
        """Prints the metrics of the epoch."""
        speed = self.images / (time.perf_counter() - self.started)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1:2}: loss {logs['loss']:.4f}  "
                f"train {logs['accuracy']:6.2%}  test {logs['val_accuracy']:6.2%}  "
                f"{speed:6.0f} images/s",
                flush=True,
            )


def make_network() -> keras.Model:
    """Returns a network with two convolutions and two dense layers."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    keras.utils.set_random_seed(arguments.seed + rank)  # the broadcast makes them equal
    images, labels, *test = load(arguments.seed)
    share = max(arguments.batch // size, 1)
    batches = Batches(images, labels, share, arguments.seed)

    steps = max(len(batches) * arguments.epochs, 1)
    optimizer = keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(arguments.learning_rate, steps)
    )
    network = make_network()
    network.compile(
        hvd.DistributedOptimizer(
            optimizer, compression=getattr(hvd.Compression, arguments.compression)
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    if rank == 0:
        count, on = network.count_params(), keras.backend.backend()
        print(
            f"{size} rank(s), {share * size} images a step, {count:,} parameters, {on}"
        )

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        EpochPrinter(len(batches) * share * size),
    ]
    # Every rank tests its share. The shares have equal sizes, so the average over ranks
    # is the average over all images.
    test_share = [part[rank : TEST_IMAGES // size * size : size] for part in test]
    history = network.fit(
        batches,
        epochs=arguments.epochs,
        validation_data=tuple(test_share),
        callbacks=callbacks,
        verbose=0,
    )
    if rank == 0:
        accuracy = history.history["val_accuracy"][-1]
        print(f"result: {accuracy:.2%} of {TEST_IMAGES} unseen digits read correctly")
        print("to go further: python keras_digits.py --help, tensorflow_digits.py")


if __name__ == "__main__":
    main()
