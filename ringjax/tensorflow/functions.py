"""Horovod's functions on variables and on Python objects.

`ringjax.eager.objects` sends objects immediately, also while TensorFlow traces a graph.
As in Horovod, a rank may send an object of any type. Objects that are not plain data
are pickled, so a rank that receives an object runs code that the sender chose.

TensorFlow 2.21 runs graphs of TensorFlow 1 in `tf.compat.v1.Session` and in
MonitoredTrainingSession. Only these graphs have global variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ringjax.eager import objects
from ringjax.tensorflow.autograph import do_not_convert
from ringjax.tensorflow.movement import assign_root_values
from ringjax.tensorflow.tf_types import Variable
from ringjax.tensorflow.variables import as_variable_list
from ringjax.world.process_set import ProcessSet, global_process_set


@do_not_convert
def broadcast_variables(
    variables: Iterable[Variable] | Variable,
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Sets variables on every rank to their values on the root.

    All ranks call this function with equal lists of variables: in eager mode, inside of
    a `tf.function`, or to create an operation for a session of TensorFlow 1.

    Args:
        variables: any number of variables of TensorFlow or Keras, of any dtypes.
        root_rank: the root's rank in the world.
        process_set: the ranks that take part; this rank must be among them.
        inplace: an argument of Horovod without effect; the variables are always
            assigned in place.

    Returns:
        An operation in a graph, None in eager mode.

    Raises:
        ValueError: `root_rank` is not in the process set.
        RingjaxError, tf.errors.OpError: the ranks' variables differ, or a rank is lost.

    Example:
        >>> import ringjax.tensorflow as hvd, tensorflow as tf
        >>> hvd.init()
        >>> hvd.broadcast_variables([tf.Variable([1.0, 2.0])], root_rank=0)
    """
    del inplace
    found = as_variable_list(variables)
    eager = tf.executing_eagerly()
    if not found:
        return None if eager else tf.no_op()
    written = assign_root_values(found, root_rank, None, process_set)
    return None if eager else tf.group(*written)


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Returns an operation that sets global variables to their values on the root.

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
    """Sets global variables to their values on the root when a session is created.

    Args:
        root_rank: the root's rank in the world.
        device: the device of the operation that assigns the variables.

    Attributes:
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
        """Adds the broadcast to the graph, unless the graph has it already."""
        graph = tf.compat.v1.get_default_graph()
        if self.bcast_op is None or self.bcast_op.graph is not graph:
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(
        self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
    ) -> None:
        """Runs the broadcast."""
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: tf.compat.v1.Session | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object: the object itself on the root, copies on other ranks.

    The root may send any object that cloudpickle can pickle. A rank that receives the
    object runs code that the root chose. `ringjax.broadcast_object` accepts only plain
    data by default.

    Args:
        obj: the object to send; only the root's argument is used.
        root_rank: the root's rank in the world.
        session: an argument of Horovod without effect; no session is needed.
        name: the name of the operation on all ranks.
        process_set: the ranks that take part; this rank must be among them.

    Raises:
        TypeError: the root's object cannot be pickled; all ranks raise it.
        HorovodInternalError: a rank is lost.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast_object({"epoch": 3})
        {'epoch': 3}
    """
    del session
    return objects.broadcast_pickled(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: tf.compat.v1.Session | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Returns `broadcast_object` with these arguments, as a function of the object.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast_object_fn()("ready")
        'ready'
    """

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


def allgather_object(
    obj: Any,
    session: tf.compat.v1.Session | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Returns the objects of all ranks in the order of the ranks.

    Args, Raises: as `broadcast_object`, but every rank sends its object.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.allgather_object("ready") == ["ready"] * hvd.size()
        True
    """
    del session
    found: list[Any] = objects.allgather_object(
        obj, name, process_set, allow_pickle=True
    )
    return found
