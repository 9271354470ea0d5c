"""Models of each framework, and a local backend, for tests of Spark estimators."""

# ruff: noqa: E402

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Stop Keras from importing TensorFlow, which must not share a process with PyTorch.
os.environ.setdefault("KERAS_BACKEND", "jax")
sys.modules["tensorflow"] = None  # type: ignore[assignment]

import pytest

pytest.importorskip("pyspark", reason="Spark's extra is not installed")

import ringjax
from ringjax.spark.common.backend import Backend


class LocalBackend(Backend):
    """A backend that starts ranks on this machine, without Spark."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        both = {**os.environ, "JAX_PLATFORMS": "cpu", **(env or {})}
        return ringjax.run(fn, args, kwargs or {}, np=self.size, env=both)

    def num_processes(self) -> int:
        return self.size


COMMON: dict[str, Any] = {
    "feature_cols": ["features"],
    "label_cols": ["y"],
    "sample_weight_col": "weight",
    "random_seed": 3,
    "verbose": 0,
}


def torch_model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(2, 8),
        torch.nn.Tanh(),
        torch.nn.Linear(8, 1),
        torch.nn.Sigmoid(),
    )


def is_correct(output: Any, label: Any) -> Any:
    return ((output > 0.5) == (label > 0.5)) * 1.0


def torch_estimator(store: Any, **params: Any) -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from ringjax.spark.torch import TorchEstimator

    model = torch_model()
    given = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "loss": torch.nn.functional.binary_cross_entropy,
        "metrics": [is_correct],
        "input_shapes": [[2]],
    }
    return TorchEstimator(store=store, **{**COMMON, **given, **params})


def flax_model() -> Any:
    from flax import nnx

    class Model(nnx.Module):  # a local class, because those are pickled by value
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(2, 8, rngs=rngs)
            self.second = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.second(nnx.tanh(self.first(x)))

    return Model(nnx.Rngs(0))


def flax_estimator(store: Any, **params: Any) -> Any:
    pytest.importorskip("flax", reason="Flax is not installed")
    import optax

    from ringjax.spark.jax import FlaxEstimator

    given = {
        "model": flax_model(),
        "optimizer": optax.adam(0.01),
        "loss": optax.sigmoid_binary_cross_entropy,
        "metrics": [lambda output, label: (output > 0) == (label > 0.5)],
    }
    return FlaxEstimator(store=store, **{**COMMON, **given, **params})


def keras_estimator(store: Any, **params: Any) -> Any:
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    from ringjax.spark.keras import KerasEstimator

    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((2,)), layers.Dense(8, "tanh"), layers.Dense(1, "sigmoid")]
    )
    size = params["backend"].num_processes()
    given = {
        "model": model,
        # Divided by `size` because the estimator multiplies the rate by the ranks.
        "optimizer": keras.optimizers.Adam(0.01 / size),
        "loss": "binary_crossentropy",
        "metrics": ["accuracy"],
    }
    return KerasEstimator(store=store, **{**COMMON, **given, **params})


def weights(model: Any) -> list[Any]:
    if hasattr(model, "get_weights"):
        return list(model.get_weights())
    import jax
    from flax import nnx

    return jax.tree.leaves(nnx.state(model, nnx.Param))
