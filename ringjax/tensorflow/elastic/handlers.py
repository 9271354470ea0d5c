"""Handlers of variables, models and optimizers that are attributes of a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from ringjax.elastic.handlers import StateHandler
from ringjax.tensorflow.tf_types import Variable
from ringjax.tensorflow.variables import as_variable_list, unwrap_variable

Values: TypeAlias = list[np.ndarray[Any, Any]]


class VariablesHandler(StateHandler):
    """Keeps the values of variables as arrays of NumPy.

    Args:
        value: an attribute of the state.
        variables: returns the variables of that attribute, always equally many.
        session: runs the TensorFlow 1 graph of the variables; None with eager
            execution.
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
        # The array shares the memory of the variable, which copies on its next write.
        return [variable.read_value().numpy() for variable in found]

    def load(self, state: Values) -> None:
        """Writes the values into the variables.

        Raises:
            ValueError: the number of variables differs.
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
        """Keeps the current values."""
        self._saved = self.state()

    def restore(self) -> None:
        """Writes the values that `save` kept last."""
        self.load(self._saved)


def _model_variables(model: Any) -> list[Variable]:
    return list(model.variables)


def _optimizer_variables(optimizer: Any) -> list[Variable]:
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def make_handler(value: Any) -> StateHandler | None:
    """Makes a handler for a variable, a list of variables, a model or an optimizer.

    Returns:
        The handler, or None for any other value.
    """
    if isinstance(unwrap_variable(value), tf.Variable):
        return VariablesHandler(value, lambda variable: [variable])
    if isinstance(value, list | tuple) and value:
        if all(isinstance(unwrap_variable(item), tf.Variable) for item in value):
            return VariablesHandler(value, list)
        return None
    if isinstance(value, tf.compat.v1.train.Optimizer):
        return VariablesHandler(value, _optimizer_variables)
    if isinstance(value, tf.Module) or _is_keras(value):
        return VariablesHandler(value, _model_variables)
    return None


def _is_keras(value: Any) -> bool:
    """Returns whether a value is a layer, model or optimizer. Does not import Keras."""
    return any(
        kind.__module__.split(".")[0] in ("keras", "tf_keras")
        and kind.__name__ in ("Layer", "BaseOptimizer", "Optimizer", "OptimizerV2")
        for kind in type(value).__mro__
    )
