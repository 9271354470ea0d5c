"""The variables of a graph of TensorFlow 1 from one rank to all, and a hook for it.

With eager execution there are no global variables; `broadcast_variables` is for that.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringjax.tensorflow.functions import broadcast_variables


def broadcast_global_variables(root_rank: int) -> Any:
    """An operation that gives every rank the root's values of all global variables.

    Raises:
        RuntimeError: called with eager execution.

    Example:
        >>> import ringjax.tensorflow as hvd, tensorflow as tf
        >>> hvd.init()
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...     variable = tf.Variable(2.0)
        ...     session.run(tf.compat.v1.global_variables_initializer())
        ...     session.run(hvd.broadcast_global_variables(root_rank=0))
        ...     float(session.run(variable))
        2.0
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please "
            "use `hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives every rank the root's global variables when a session has been made.

    Args:
        root_rank: the rank that has the values.
        device: where the operation is placed.

    Attributes:
        root_rank: as given, as is `device`.
        bcast_op: the operation, once there is one.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.BroadcastGlobalVariablesHook(0).root_rank
        0
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Adds the operation to the graph, if it is another one than last time."""
        graph = tf.compat.v1.get_default_graph()
        if self.bcast_op is None or self.bcast_op.graph is not graph:
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it."""
        session.run(self.bcast_op)
