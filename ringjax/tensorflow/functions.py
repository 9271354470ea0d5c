"""Horovod's functions on variables and on Python objects.

Objects are sent immediately, by `ringjax.eager.objects`, also while a graph is traced.
As in Horovod an object of any type may be sent. Objects that are not plain data are
pickled, so a rank runs code that the sender chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ringjax.eager import objects
from ringjax.tensorflow.autograph import do_not_convert
from ringjax.tensorflow.movement import broadcast_group
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
    """Gives every rank the root's values of variables.

    All ranks call it with equal lists of variables: in eager mode, inside of
    `tf.function`, or to get an operation for a session of TensorFlow 1.

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
    values = [tf.convert_to_tensor(variable) for variable in found]
    received = broadcast_group(values, root_rank, process_set=process_set)
    written = [
        variable.assign(value) for variable, value in zip(found, received, strict=True)
    ]
    return None if eager else tf.group(*written)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: tf.compat.v1.Session | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object: the object itself on the root, copies on other ranks.

    Any object that cloudpickle can pickle may be sent. A rank that receives it runs
    code that the root chose. `ringjax.broadcast_object` takes only plain data by
    default.

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

    Args, Raises: as `broadcast_object`; every rank's object is read.

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
