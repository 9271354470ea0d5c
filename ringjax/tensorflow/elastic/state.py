"""TensorFlowState and TensorFlowKerasState: variables that survive a reset.

Variables stay where they are; what is kept of them at a commit is TensorFlow's own
memory, which nobody changes, so that a commit copies nothing. Everything else in a
state is a plain value of `ringjax.elastic.State`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ringjax import elastic
from ringjax.elastic.handlers import StateHandler
from ringjax.tensorflow.variables import as_variable_list, unwrap_variable

Values = list[Any]


class VariablesHandler(StateHandler):
    """Some variables, of which a state keeps the values as arrays of numpy.

    Args:
        value: what the program has as an attribute of the state.
        variables: finds the variables in it, the same number each time.
        session: runs the graph of TensorFlow 1 that they are in; None: eager.
    """

    def __init__(
        self,
        value: Any,
        variables: Callable[[Any], list[Any]],
        session: Any = None,
    ) -> None:
        self._variables = variables
        self._session = session
        super().__init__(value)

    def state(self) -> Values:
        """The values now, in the order of the variables."""
        found = as_variable_list(self._variables(self.value))
        if self._session is not None:
            return list(self._session.run(found))
        # Reading shares the memory; who writes to a variable then takes a copy.
        return [variable.read_value().numpy() for variable in found]

    def load(self, state: Values) -> None:
        """Writes the values into the variables.

        Raises:
            ValueError: there are more or fewer variables here.
        """
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
        """Keeps the values."""
        self._saved = self.state()

    def restore(self) -> None:
        """Brings back what `save` kept last."""
        self.load(self._saved)


def _of_model(model: Any) -> list[Any]:
    return list(model.variables)


def _of_optimizer(optimizer: Any) -> list[Any]:
    held = optimizer.variables
    return list(held() if callable(held) else held)


def handler_of(value: Any) -> StateHandler | None:
    """A handler for a variable, a list of such, a model or an optimizer; or None."""
    if isinstance(unwrap_variable(value), tf.Variable):
        return VariablesHandler(value, lambda variable: [variable])
    if isinstance(value, list | tuple) and value:
        if all(isinstance(unwrap_variable(one), tf.Variable) for one in value):
            return VariablesHandler(value, list)
        return None
    if isinstance(value, tf.compat.v1.train.Optimizer):
        return VariablesHandler(value, _of_optimizer)
    if isinstance(value, tf.Module) or _is_keras(value):
        return VariablesHandler(value, _of_model)
    return None


def _is_keras(value: Any) -> bool:
    """Whether it is a model, a layer or an optimizer, without importing Keras."""
    return any(
        kind.__module__.split(".")[0] in ("keras", "tf_keras")
        and kind.__name__ in ("Layer", "BaseOptimizer", "Optimizer", "OptimizerV2")
        for kind in type(value).__mro__
    )


class _State(elastic.State):
    """Takes variables, models and optimizers as attributes, too."""

    _allow_pickle = True

    def _handler_of(self, value: Any) -> StateHandler | None:
        if isinstance(value, VariablesHandler):
            return value
        return handler_of(value) or super()._handler_of(value)


class TensorFlowState(_State):
    """The state of training with a list of variables.

    Args:
        variables: of TensorFlow or of Keras; None: the global variables of the graph.
        session: of TensorFlow 1, with the variables' graph; None: the default session,
            or eager execution.
        **kwargs: plain objects, and further variables, models and optimizers. Each
            becomes an attribute.

    Raises:
        ValueError: in a graph of TensorFlow 1, and there is no session.

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
        self, variables: Any = None, session: Any = None, **kwargs: Any
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
        optimizer: its optimizer, distributed or not; None: the one that it was compiled
            with. It is built for the model's trainable variables if it is not yet.
        backend: Horovod's, for TensorFlow 1; accepted and ignored.
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
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        if not getattr(model, "built", True):
            raise ValueError(
                "Model must be built first. Run `model.build(input_shape)`."
            )
        optimizer = optimizer or getattr(model, "optimizer", None)
        if not getattr(optimizer, "built", True):
            # Ranks that join have not trained, and must have what the others have.
            optimizer.build(model.trainable_variables)
        super().__init__(model=model, optimizer=optimizer, **kwargs)
        self.backend = backend
