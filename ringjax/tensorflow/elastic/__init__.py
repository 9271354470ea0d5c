"""Elastic training in TensorFlow: `run`, `TensorFlowState`, `TensorFlowKerasState`.

A commit keeps the values of the variables without a copy: it holds TensorFlow's own
memory, and TensorFlow writes a variable's next value to new memory. All other
attributes of a state are plain values of `ringjax.elastic.State`, and
`ringjax.elastic.run` runs the training function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from ringjax.elastic import Checkpointer, ObjectState, State, run, run_fn
from ringjax.elastic.handlers import StateHandler
from ringjax.tensorflow.tf_types import Optimizer, Variable
from ringjax.tensorflow.variables import as_variable_list, unwrap_variable

__all__ = [
    "Checkpointer",
    "ObjectState",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
    "run_fn",
]

Values: TypeAlias = list[np.ndarray[Any, Any]]


class VariablesHandler(StateHandler):
    """Keeps the values of variables as arrays of NumPy.

    Args:
        value: an attribute of the state.
        variables: returns the variables of that attribute, always equally many.
        session: runs the TensorFlow 1 graph of the variables; None in eager mode.
    """

    def __init__(
        self,
        value: Any,
        variables: Callable[[Any], list[Variable]],
        session: tf.compat.v1.Session | None = None,
    ) -> None:
        self._variables = variables
        self._session = session
        super().__init__(value)

    def state(self) -> Values:
        """Returns the current values, in the order of the variables."""
        found = as_variable_list(self._variables(self.value))
        if self._session is not None:
            return list(self._session.run(found))
        # The array shares the memory of the variable. The next write uses new memory.
        return [variable.read_value().numpy() for variable in found]

    def load(self, state: Values) -> None:
        """Writes the values into the variables."""
        found = as_variable_list(self._variables(self.value))
        if len(found) != len(state):
            raise ValueError(
                f"the state has {len(state)} variables, and here are {len(found)}: "
                "models and optimizers must be built in the same way on all ranks"
            )
        for variable, value in zip(found, state, strict=True):
            if self._session is not None:
                variable.load(value, self._session)
            else:
                variable.assign(value)

    def save(self) -> None:
        """Keeps the current values."""
        self._saved = self.state()

    def restore(self) -> None:
        """Writes the values that `save` kept last."""
        self.load(self._saved)


def _variables_of(value: Any) -> list[Variable]:
    # `variables` is a method of TensorFlow 1's optimizers, and a property of others.
    variables = value.variables
    return list(variables() if callable(variables) else variables)


def make_handler(value: Any) -> StateHandler | None:
    """Makes a handler for variables, models and optimizers; returns None otherwise."""
    if isinstance(unwrap_variable(value), tf.Variable):
        return VariablesHandler(value, lambda variable: [variable])
    if isinstance(value, list | tuple) and value:
        if all(isinstance(unwrap_variable(item), tf.Variable) for item in value):
            return VariablesHandler(value, list)
        return None
    kinds = (tf.compat.v1.train.Optimizer, tf.Module)
    if isinstance(value, kinds) or _is_keras(value):
        return VariablesHandler(value, _variables_of)
    return None


def _is_keras(value: Any) -> bool:
    """Returns whether a value is a layer, model or optimizer of Keras."""
    return any(
        kind.__module__.split(".")[0] in ("keras", "tf_keras")
        and kind.__name__ in ("Layer", "BaseOptimizer", "Optimizer", "OptimizerV2")
        for kind in type(value).__mro__
    )


class _State(State):
    """A state whose attributes may be variables, models and optimizers."""

    _allow_pickle = True

    def _handler_of(self, value: Any) -> StateHandler | None:
        if isinstance(value, VariablesHandler):
            return value
        return make_handler(value) or super()._handler_of(value)


class TensorFlowState(_State):
    """The training state of a program that lists its variables.

    In a TensorFlow 1 graph, which TensorFlow 2.21 runs in a session, the state reads
    and writes the variables through that session.

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
    """The training state of a model of Keras on TensorFlow.

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
            # A rank that joins has not trained. It receives values for all variables of
            # the optimizer from another rank, so these variables must exist.
            optimizer.build(model.trainable_variables)
        super().__init__(model=model, optimizer=optimizer, **kwargs)
        self.backend = backend
