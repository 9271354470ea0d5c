"""ringjax.tensorflow: eager operations, and gradients in one `tf.function`."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers.adapter import COLLECTIVES, Array, Operation, Peer, Shapes
from benchmarks.peers.horovod import out_of_place


class RingjaxTensorflow(Peer):
    """ringjax.tensorflow, whose results are in new memory."""

    arrays = ("eager",)
    models = ("one tf.function",)
    collectives = COLLECTIVES

    def __init__(self, rank: int, size: int, port: int) -> None:
        import tensorflow as tf

        import ringjax.tensorflow as hvd

        hvd.init()
        self._tf, self._hvd = tf, hvd
        self.rank, self.size, self.version = hvd.rank(), hvd.size(), tf.__version__

    def total(self, value: float) -> float:
        return float(self._hvd.allreduce(self._tf.constant(value), op=self._hvd.Sum))

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        tf, hvd = self._tf, self._hvd
        tensors = [tf.zeros(shape, dtype) for shape in shapes]
        if variant in self.arrays:
            name = f"eager.{dtype}.{tensors[0].shape.num_elements()}"
            return lambda: hvd.allreduce(tensors[0], op=hvd.Sum, name=name)

        @tf.function(autograph=False)
        def step(*gradients: Any) -> Any:
            return [hvd.allreduce(gradient, op=hvd.Average) for gradient in gradients]

        return lambda: step(*tensors)

    def collective(self, name: str, given: Array, out: Array) -> Operation:
        called = f"{name}.{given.size}"
        return out_of_place(self._hvd, self._tf.constant(given), called)[name]

    def local(self, result: Any) -> Array:
        return np.asarray(result)

    def close(self) -> None:
        self._hvd.shutdown()
