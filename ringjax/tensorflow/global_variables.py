"""Broadcasts the variables of a TensorFlow 1 graph, by an operation or by a hook.

TensorFlow 2.21 runs such graphs in `tf.compat.v1.Session` and MonitoredTrainingSession.
With eager execution there are no global variables; use `broadcast_variables`.
"""

from __future__ import annotations

import tensorflow as tf

from ringjax.tensorflow.functions import broadcast_variables


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Returns an operation that gives all ranks the root's values of global variables.

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
    """Gives every rank the root's global variables after a session was created.

    Args:
        root_rank: the rank whose values all ranks get.
        device: the device of the operation.

    Attributes:
        root_rank: the argument.
        device: the argument.
        bcast_op: the operation; None before `begin`.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.BroadcastGlobalVariablesHook(0).root_rank
        0
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: tf.Operation | None = None

    def begin(self) -> None:
        """Adds the operation to the graph, unless it is there already."""
        graph = tf.compat.v1.get_default_graph()
        if self.bcast_op is None or self.bcast_op.graph is not graph:
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(
        self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
    ) -> None:
        """Runs the operation."""
        session.run(self.bcast_op)
