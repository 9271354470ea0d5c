"""ringjax.keras: `model.fit` of a stack of dense layers, on one of Keras' backends."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from benchmarks.harness.shapes import BATCH, LAYERS, WIDTH
from benchmarks.peers.adapter import Operation, Peer

STEPS = 5  # steps of one `fit`, which share the fixed cost of `fit`


class Fit:
    """Steps of `model.fit`; a call is one step, timed over STEPS of them."""

    def __init__(self, model: Any) -> None:
        draw = np.random.default_rng(0)
        self._model = model
        self._inputs = draw.normal(size=(BATCH * STEPS, WIDTH)).astype("float32")
        self._labels = draw.integers(0, WIDTH, BATCH * STEPS)

    def __call__(self) -> None:
        self._model.fit(
            self._inputs, self._labels, batch_size=BATCH, shuffle=False, verbose=0
        )

    def seconds(self, calls: int) -> float:
        """Returns the time of some steps."""
        start = time.perf_counter()
        for _ in range(calls):
            self()
        return (time.perf_counter() - start) / STEPS


class RingjaxKeras(Peer):
    """ringjax.keras, on the backend that KERAS_BACKEND selects."""

    arrays = models = ()
    trainings = ("together", "alone")
    networks = ("dense",)

    def __init__(self, rank: int, size: int, port: int) -> None:
        import keras

        import ringjax.keras as hvd

        hvd.init()
        self._keras, self._hvd = keras, hvd
        self.rank, self.size = hvd.rank(), hvd.size()
        self.version = f"Keras {keras.__version__} on {keras.backend.backend()}"
        if keras.backend.backend() == "torch":
            import torch

            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.size))

    def total(self, value: float) -> float:
        from ringjax import Sum, eager

        return float(eager.allreduce(np.float32(value), Sum, name="total"))

    def training(self, variant: str, network: str) -> Operation:
        keras = self._keras
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(WIDTH) for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
        if variant == "together":
            optimizer = self._hvd.DistributedOptimizer(optimizer)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
        return Fit(model)

    def close(self) -> None:
        self._hvd.shutdown()
