"""What a graph waits with: TensorFlow's queues, whose readers occupy no thread.

The node that begins an operation takes a signal from the pool and hands its queue to
the graph; when the operation has ended, a token is put in; when the graph has taken it,
the signal goes back. A signal whose graph fell through meanwhile is not used again.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import threading
from typing import Any

import tensorflow as tf

from ringjax.tensorflow import c_api, failures, nodes

_numbers = itertools.count()
_idle: list[Signal] = []
_being_read = threading.Lock()
_read: list[bytes] = []


class Signal:
    """A queue for one token at a time.

    Attributes:
        text: how TensorFlow writes the queue's handle.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._queue: Any = tf.raw_ops.FIFOQueueV2(
                component_types=[tf.int64],
                shapes=[[]],
                shared_name=f"ringjax/{os.getpid()}/{next(_numbers)}",
            )
            self._token = tf.constant(0, tf.int64)
        self.text = _text_of(self._queue)

    def send(self) -> None:
        """Puts the token in."""
        tf.raw_ops.QueueEnqueueV2(handle=self._queue, components=[self._token])

    def reuse(self) -> None:
        """Its token has been taken."""
        _idle.append(self)


def take() -> Signal:
    """One that nobody uses."""
    try:
        return _idle.pop()
    except IndexError:
        return Signal()


def prepare(count: int = 1) -> None:
    """Makes so many before they are needed."""
    _idle.extend(Signal() for _ in range(count))


def _text_of(handle: Any) -> bytes:
    with _being_read:
        nodes.run_now("RingjaxReadHandle", [handle], call="")
        return _read.pop()


def _read_handle(_: None, context: int) -> None:
    (tensor,) = c_api.tensors.inputs(context, 1)
    _read.append(ctypes.string_at(c_api.data_of(tensor), c_api.bytes_of(tensor)))
    c_api.delete_tensor(tensor)


@functools.cache
def ensure_registered() -> None:
    """Tells TensorFlow of the node that reads a handle, once."""
    c_api.register(
        *("RingjaxReadHandle", ["handle: resource"], []),
        create=lambda text, node: None,
        compute=_read_handle,
        code_of=failures.code_of,
    )
