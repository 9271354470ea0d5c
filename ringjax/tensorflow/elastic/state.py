"""TensorFlowState and TensorFlowKerasState: states whose variables survive a reset.

A commit keeps the values of the variables without a copy: it holds TensorFlow's own
memory, and a variable that is written later gets new memory. All other attributes of a
state are plain values of `ringjax.elastic.State`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringjax import elastic
from ringjax.elastic.handlers import StateHandler
from ringjax.tensorflow.elastic.handlers import VariablesHandler, make_handler
from ringjax.tensorflow.tf_types import Optimizer
from ringjax.tensorflow.variables import as_variable_list


class _State(elastic.State):
    """A state whose attributes may be variables, models and optimizers."""

    _allow_pickle = True

    def _handler_of(self, value: Any) -> StateHandler | None:
        if isinstance(value, VariablesHandler):
            return value
        return make_handler(value) or super()._handler_of(value)


class TensorFlowState(_State):
    """The state of training with a list of variables.

    In a TensorFlow 1 graph, which TensorFlow 2.21 runs in a session, it reads and
    writes the variables through that session.

    Args:
        variables: variables of TensorFlow or Keras; None means the global variables of
            the graph.
        session: a session of TensorFlow 1 with the variables' graph; None means the
            default session, or eager execution.
        **kwargs: plain objects, and further variables, models and optimizers. Each
            becomes an attribute.

    Raises:
        ValueError: called in a graph of TensorFlow 1 without a session.

    Example:
        >>> import ringjax.tensorflow as hvd, tensorflow as tf
        >>> hvd.init()
        >>> variable = tf.Variable(1.0)
        >>> state = hvd.elastic.TensorFlowState([variable], batch=0)
        >>> state.sync()
        >>> float(variable.assign(2.0))
        2.0
        >>> state.restore()
        >>> float(variable), state.batch
        (1.0, 0)
    """

    def __init__(
        self,
        variables: Any = None,
        session: tf.compat.v1.Session | None = None,
        **kwargs: Any,
    ) -> None:
        found = as_variable_list(
            tf.compat.v1.global_variables() if variables is None else variables
        )
        if not tf.executing_eagerly():
            session = session or tf.compat.v1.get_default_session()
            if session is None:
                raise ValueError("TensorFlowState in a graph needs a session")
        self._variables_handler = VariablesHandler(found, list, session)
        super().__init__(variables=found, **kwargs)
        self.session = session

    def _handler_of(self, value: Any) -> StateHandler | None:
        if value is self._variables_handler.value:
            return self._variables_handler
        return super()._handler_of(value)


class TensorFlowKerasState(_State):
    """The state of training a model of Keras on TensorFlow.

    Args:
        model: a model that is built.
        optimizer: the optimizer of the model, distributed or not; None means the
            optimizer of the compiled model. It is built for the model's trainable
            variables if it is not built yet.
        backend: an argument of Horovod for TensorFlow 1, without effect.
        **kwargs: plain objects, and further models, optimizers and variables. Each
            becomes an attribute.

    Raises:
        ValueError: the model is not built.

    Example:
        >>> import keras, ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        >>> optimizer = keras.optimizers.SGD(0.1)
        >>> state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0)
        >>> state.epoch = 1
        >>> state.restore()
        >>> state.epoch
        0
    """

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer = None,
        backend: Any = None,
        **kwargs: Any,
    ) -> None:
        if not getattr(model, "built", True):
            raise ValueError(
                "Model must be built first. Run `model.build(input_shape)`."
            )
        optimizer = optimizer or getattr(model, "optimizer", None)
        if not getattr(optimizer, "built", True):
            # A rank that joins has not trained, but receives the optimizer's variables
            # of the other ranks and so must have equally many.
            optimizer.build(model.trainable_variables)
        super().__init__(model=model, optimizer=optimizer, **kwargs)
        self.backend = backend
