"""What Keras must do differently around a distributed optimizer.

Keras itself puts a LossScaleOptimizer around the optimizer of a model in float16, and
there is no other place where all ranks could agree whether gradients are finite: if one
rank skipped a step, the others would wait for it. And an optimizer is not asked whether
TensorFlow's XLA may compile a step: it cannot where gradients are exchanged inside of a
branch.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import keras

from ringjax.keras.backends import backend


@functools.cache
def apply_patches() -> None:
    """Adjusts Keras; for models whose optimizer is not distributed nothing changes."""
    _agree_on_finite()
    if keras.backend.backend() == "tensorflow":
        _train_without_xla_in_branches()


def _reducer(optimizer: Any) -> Any:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(inner, "_reducer", None)


def _agree_on_finite() -> None:
    kind = keras.optimizers.LossScaleOptimizer
    plain = kind.check_finite

    @functools.wraps(plain)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = plain(self, grads)
        distribution = _reducer(self)
        return finite if distribution is None else distribution.all_true(finite)

    kind.check_finite = check_finite


def _has_branches(optimizer: Any) -> bool:
    """Whether a step exchanges gradients under a condition."""
    return (
        hasattr(optimizer, "inner_optimizer")
        or bool(optimizer.gradient_accumulation_steps)
        or _reducer(optimizer).options.passes > 1
    )


def _train_without_xla_in_branches() -> None:
    plain = keras.Model.make_train_function

    @functools.wraps(plain)
    def make_train_function(self: Any, force: bool = False) -> Any:
        optimizer = getattr(self, "optimizer", None)
        distributed = _reducer(optimizer) is not None
        if distributed and not self.run_eagerly and self.jit_compile:
            why = "in a branch" if _has_branches(optimizer) else backend().xla_obstacle
            if why:
                warnings.warn(
                    "ringjax.keras: TensorFlow's XLA cannot compile the exchange of "
                    f"gradients {why}; this model trains with jit_compile=False",
                    stacklevel=3,
                )
                self.jit_compile = False
        return plain(self, force)

    keras.Model.make_train_function = make_train_function
