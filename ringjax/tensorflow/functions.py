"""Horovod's functions on variables and on Python objects.

Objects travel over `ringjax.eager.objects`, at once, also where a graph is being made.
As in Horovod an object of any type may be sent, so what is not plain data is pickled: a
rank runs code that its sender chose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ringjax.eager import objects
from ringjax.tensorflow.autograph import do_not_convert
from ringjax.tensorflow.movement import broadcast_group
from ringjax.tensorflow.variables import as_variable_list
from ringjax.world.process_set import ProcessSet, global_process_set


@do_not_convert
def broadcast_variables(
    variables: Any,
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Gives every rank the root's values.

    All ranks call it with the same variables in the same order, in eager mode, inside
    of `tf.function`, or to get an operation for a session of TensorFlow 1.

    Args:
        variables: variables of TensorFlow or of Keras; any number, of any dtypes.
        root_rank: the rank that has the values, its number in the world.
        process_set: the ranks that take part; this rank must be one of them.
        inplace: Horovod's; variables are always written where they are.

    Returns:
        An operation in a graph, None in eager mode.

    Raises:
        ValueError: `root_rank` is not in the process set.
        RingjaxError, tf.errors.OpError: the ranks' variables differ, or a rank is gone.

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
    sent = broadcast_group(values, root_rank, process_set=process_set)
    written = [
        variable.assign(value) for variable, value in zip(found, sent, strict=True)
    ]
    return None if eager else tf.group(*written)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object on every rank: there the same, elsewhere a copy.

    Any object that cloudpickle can pickle may be sent; receiving one runs code that the
    root chose. `ringjax.broadcast_object` takes plain data only, unless it is asked.

    Args:
        obj: looked at on the root only.
        root_rank: the sender's rank in the world.
        session: Horovod's; no session is needed.
        name: what the operation is called on all ranks.
        process_set: the ranks that take part; this rank must be one of them.

    Raises:
        TypeError: the root's object cannot be pickled; on every rank.
        HorovodInternalError: a rank is gone.

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
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A function that is `broadcast_object` with these arguments.

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
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Returns the objects of all ranks, in their order; see `broadcast_object`.

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
