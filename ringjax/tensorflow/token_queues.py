"""Token queues: a graph waits for an operation by reading from a queue of TensorFlow.

The node that reads from a queue occupies no thread. The node that starts an operation
acquires a queue from a pool and passes its handle to the graph. When the operation has
ended, ringjax puts a token into the queue. When the graph has taken the token, the
queue returns to the pool. If the graph fails before it takes the token, the queue is
not used again, because its token may still be inside.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import threading

import tensorflow as tf

from ringjax.tensorflow import c_api, tf_private
from ringjax.tensorflow.kernel_registration import register_op

_queue_ids = itertools.count()
_idle: list[TokenQueue] = []
_read_lock = threading.Lock()
_read: list[bytes] = []


class TokenQueue:
    """A queue for one token at a time; `handle` is its handle, as serialized bytes."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._queue = tf.raw_ops.FIFOQueueV2(
                component_types=[tf.int64],
                shapes=[[]],
                shared_name=f"ringjax/{os.getpid()}/{next(_queue_ids)}",
            )
            self._token = tf.constant(0, tf.int64)
        self.handle = _serialize_handle(self._queue)

    def put_token(self) -> None:
        """Makes the reader of the queue continue."""
        tf.raw_ops.QueueEnqueueV2(handle=self._queue, components=[self._token])

    def release(self) -> None:
        """Returns the queue to the pool. The graph must have taken the token."""
        _idle.append(self)


def acquire() -> TokenQueue:
    """Takes an idle queue from the pool, or makes a new one."""
    # Several threads of TensorFlow call this function at the same time. pop() of a list
    # is atomic, but a test of the length before pop() would be a race.
    try:
        return _idle.pop()
    except IndexError:
        return TokenQueue()


def preallocate() -> None:
    """Adds one queue to the pool, before a graph needs it."""
    _idle.append(TokenQueue())


def _serialize_handle(handle: tf.Tensor) -> bytes:
    # The operation's kernel, _read_handle, appends the bytes to `_read`. The lock keeps
    # other threads from using `_read` meanwhile.
    with _read_lock:
        tf_private.execute_eagerly("RingjaxReadHandle", [handle], call="")
        return _read.pop()


def _read_handle(_: None, context: int) -> None:
    (tensor,) = c_api.tensors.inputs(context, 1)
    _read.append(ctypes.string_at(c_api.data_of(tensor), c_api.bytes_of(tensor)))
    c_api.delete_tensor(tensor)


@functools.cache
def ensure_registered() -> None:
    """Registers the node that reads a handle with TensorFlow, once in a process."""
    register_op(
        "RingjaxReadHandle",
        ["handle: resource"],
        [],
        create=lambda call, node: None,
        compute=_read_handle,
    )
