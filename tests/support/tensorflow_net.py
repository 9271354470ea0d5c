"""A small model in plain TensorFlow, and the expected gradients on all ranks.

This module does not import TensorFlow, because only ranks may. The tests pass `tf`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def in_mode(tf: Any, mode: str, call: Callable) -> Callable:
    return tf.function(call) if mode == "function" else call


class Net:
    """An embedding, two dense variables, and an unused variable."""

    def __init__(self, tf: Any, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.tf = tf
        self.table = tf.Variable(rng.normal(size=(5, 4)).astype("float32"))
        self.weight = tf.Variable(rng.normal(size=(4, 3)).astype("float32"))
        self.bias = tf.Variable(np.zeros(3, "float32"))
        self.spare = tf.Variable(np.zeros(2, "float32"))
        self.variables = [self.table, self.weight, self.bias, self.spare]

    def loss(self, rows: Any) -> Any:
        tf = self.tf
        hidden = tf.tanh(tf.gather(self.table, rows))
        return tf.reduce_mean(tf.square(hidden @ self.weight + self.bias))

    def gradients(
        self, rows: Any, wrap: Callable[[Any], Any] = lambda tape: tape
    ) -> Any:
        with self.tf.GradientTape() as tape:
            loss = self.loss(rows)
        return wrap(tape).gradient(loss, self.variables)


def batch(rank: int, step: int = 0) -> np.ndarray:
    return np.random.default_rng((step, rank)).integers(0, 5, size=3).astype("int32")


def dense(tf: Any, gradient: Any) -> np.ndarray:
    return tf.convert_to_tensor(gradient).numpy()


def expected_gradients(
    tf: Any, net: Net, ranks: Sequence[int], op: Callable, step: int = 0
) -> list[Any]:
    """Computes by plain TensorFlow the gradients that all ranks must get."""
    rows = [net.gradients(tf.constant(batch(rank, step))) for rank in ranks]
    return [
        None if one[0] is None else op([dense(tf, g).astype("float64") for g in one])
        for one in zip(*rows, strict=True)
    ]


def mean(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.mean(arrays, axis=0)


def total(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.sum(arrays, axis=0)


def adasum(arrays: Sequence[np.ndarray]) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0]
    half = len(arrays) // 2
    a, b = adasum(arrays[:half]), adasum(arrays[half:])
    dot, aa, bb = np.sum(a * b), np.sum(a * a), np.sum(b * b)
    return (1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b


def close(tf: Any, found: Sequence[Any], expected: Sequence[Any], rtol: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(dense(tf, one), other, rtol=rtol, atol=rtol)
