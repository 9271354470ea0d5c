"""A small convolutional network reads handwritten digits with TensorFlow, in parallel.

    python tensorflow_digits.py                    one rank
    ringrun -np 2 python tensorflow_digits.py      two ranks, the same global batch

The data and the network are those of `jax_digits.py`: 1,797 real images of 8 × 8 pixels
inside the wheel of scikit-learn. The training loop uses a `DistributedGradientTape` in
a `tf.function`, and data from `tf.data`. A program for Horovod differs only by its
import. Needs ``pip install "ringjax[tensorflow,examples]"``.

To go further: ``--batch 384 --learning-rate 4e-3`` gives more ranks something to do,
``--compression bf16`` halves the bytes. See also `keras_digits.py` for `model.fit`.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import ringjax.tensorflow as hvd
from ringjax.data import shard

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


def shifted(image, label):
    """Moves an image by -1, 0 or 1 pixel, down and to the right."""
    padded = tf.pad(image, ((1, 1), (1, 1), (0, 0)))
    return tf.image.random_crop(padded, (8, 8, 1)), label


def make_network() -> tf.keras.Model:
    """Returns a network with two convolutions and two dense layers."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def make_step(network, optimizer, compression):
    """Returns a training step as a graph. The step returns loss and accuracy."""

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            logits = network(images, training=True)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            )
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, network.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, network.trainable_variables, strict=True)
        )
        right = tf.equal(tf.argmax(logits, -1, tf.int32), labels)
        return tf.stack([loss, tf.reduce_mean(tf.cast(right, tf.float32))])

    return step


def evaluate(network, images, labels) -> float:
    """Returns the accuracy on all test images. Each rank tests its share."""
    share = slice(hvd.rank(), None, hvd.size())
    found = tf.argmax(network(images[share], training=False), -1, tf.int32)
    correct = tf.reduce_sum(tf.cast(tf.equal(found, labels[share]), tf.int32))
    return int(hvd.allreduce(correct, op=hvd.Sum, name="correct")) / len(labels)


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    tf.random.set_seed(arguments.seed)  # decides the order of the data
    images, labels, *test = load(arguments.seed)
    share = max(arguments.batch // size, 1)
    steps = len(labels) // (share * size)

    # All ranks draw an equal order, and each rank takes every size-th image.
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    data = data.shuffle(len(labels), seed=arguments.seed + 1)
    data = shard(data).map(shifted).batch(share, drop_remainder=True).take(steps)

    network = make_network()
    schedule = tf.keras.optimizers.schedules.CosineDecay(
        arguments.learning_rate, max(steps * arguments.epochs, 1)
    )
    optimizer = tf.keras.optimizers.Adam(schedule)
    optimizer.build(network.trainable_variables)
    compression = getattr(hvd.Compression, arguments.compression)
    step = make_step(network, optimizer, compression)
    hvd.broadcast_variables(network.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)
    if rank == 0:
        count = network.count_params()
        print(f"{size} rank(s), {share * size} images a step, {count:,} parameters")

    accuracy = evaluate(network, *test)
    for epoch in range(1, arguments.epochs + 1):
        started = time.perf_counter()
        history = [step(*batch) for batch in data]
        seconds = time.perf_counter() - started
        loss, train = hvd.allreduce(tf.reduce_mean(history, 0), name="metrics").numpy()
        accuracy = evaluate(network, *test)
        if rank == 0:
            print(
                f"epoch {epoch:2}: loss {loss:.4f}  train {train:6.2%}  "
                f"test {accuracy:6.2%}  {steps * share * size / seconds:6.0f} images/s",
                flush=True,
            )
    if rank == 0:
        print(f"result: {accuracy:.2%} of {TEST_IMAGES} unseen digits read correctly")
        print("to go further: python tensorflow_digits.py --help, keras_digits.py")


if __name__ == "__main__":
    main()
