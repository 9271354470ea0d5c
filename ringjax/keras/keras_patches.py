"""Patches two methods of Keras for models with a distributed optimizer.

Models with other optimizers behave as before. The methods are:

* `LossScaleOptimizer.check_finite`. In float16, Keras wraps the optimizer of a model in
  a LossScaleOptimizer, which skips steps whose gradients are not finite. All ranks must
  skip the same steps, because a rank that skips a step does not reduce gradients, and
  the other ranks would wait for this rank.
* `Model.make_train_function`, with TensorFlow. XLA cannot compile a reduction inside of
  a branch, but Keras checks only the layers before it lets XLA compile a step.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import keras

from ringjax.keras.backends import backend
from ringjax.keras.keras_types import Model, Optimizer, Tensor
from ringjax.keras.reducer import OptimizerReducer


@functools.cache
def apply_patches() -> None:
    """Patches Keras once in a process."""
    _agree_on_finite()
    if keras.backend.backend() == "tensorflow":
        _train_without_xla_in_branches()


def reducer_of(optimizer: Optimizer | None) -> OptimizerReducer | None:
    """Returns the reducer of a distributed optimizer, or None for other optimizers."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(inner, "_reducer", None)


def _agree_on_finite() -> None:
    cls = keras.optimizers.LossScaleOptimizer
    plain = cls.check_finite

    @functools.wraps(plain)
    def check_finite(self: Optimizer, grads: Sequence[Tensor]) -> Tensor:
        finite = plain(self, grads)
        reducer = reducer_of(self)
        return finite if reducer is None else reducer.all_true(finite)

    cls.check_finite = check_finite


def _reduces_in_branch(optimizer: Optimizer, reducer: OptimizerReducer) -> bool:
    return (
        hasattr(optimizer, "inner_optimizer")
        or bool(optimizer.gradient_accumulation_steps)
        or reducer.options.passes > 1
    )


def _train_without_xla_in_branches() -> None:
    plain = keras.Model.make_train_function

    @functools.wraps(plain)
    def make_train_function(self: Model, force: bool = False) -> Any:
        optimizer = getattr(self, "optimizer", None)
        reducer = reducer_of(optimizer)
        if reducer is not None and not self.run_eagerly and self.jit_compile:
            in_branch = _reduces_in_branch(optimizer, reducer)
            obstacle = "in a branch" if in_branch else backend().xla_obstacle
            if obstacle:
                warnings.warn(
                    "ringjax.keras: TensorFlow's XLA cannot compile the exchange of "
                    f"gradients {obstacle}; this model trains with jit_compile=False",
                    stacklevel=3,
                )
                self.jit_compile = False
        return plain(self, force)

    keras.Model.make_train_function = make_train_function
