"""`KerasEstimator` and `KerasModel`: Keras models on DataFrames."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import keras
from pyspark.ml.param.shared import Param, Params

from ringjax.spark.common.estimator import (
    HorovodEstimator,
    HorovodModel,
    Predict,
    Trained,
)
from ringjax.spark.common.params import EstimatorParams as EstimatorParams
from ringjax.spark.common.params_io import PersistentParams
from ringjax.spark.common.training_loop import TrainingJob
from ringjax.spark.trainers import keras as trainer


class _CustomObjects(PersistentParams):
    """Loads Params with the program's own classes of Keras."""

    def _unpickle(self, values: dict[str, bytes]) -> dict[str, Any]:
        objects = values.get("custom_objects")
        with keras.saving.custom_object_scope(
            cloudpickle.loads(objects) if objects else {}
        ):
            return super()._unpickle(values)


class KerasEstimator(_CustomObjects, HorovodEstimator):
    """Trains a Keras model on a DataFrame, on the backend that Keras has here.

    The learning rate is multiplied by the number of ranks, as in Horovod.

    Args:
        model: a model with known inputs, one for each of `feature_cols`.
        optimizer: an optimizer; None means the optimizer of a compiled model.
        loss: a loss, or one for each output.
        metrics: the metrics for `compile`.
        custom_objects: the program's own classes and functions by their names.
        callbacks: callbacks of Keras for all ranks.
        checkpoint_callback: a `ModelCheckpoint`; the result is the model that it has
            saved last.
        backend_env: environment variables for the ranks.
        params: the Params of all estimators, see `explainParams`.

    Raises:
        TypeError: a Param does not exist.

    Example:
        >>> KerasEstimator(feature_cols=["x"], label_cols=["y"], epochs=3).getEpochs()
        3
    """

    custom_objects = Param(Params._dummy(), "custom_objects", "classes by their names")
    checkpoint_callback = Param(
        Params._dummy(), "checkpoint_callback", "chooses the model that is kept"
    )
    backend_env = Param(Params._dummy(), "backend_env", "variables for the ranks")
    _run_prefix = "keras"

    def get_model_shapes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Returns the shapes of the model's inputs and outputs; -1 means any size."""
        model = self.getModel()
        inputs, outputs = (
            [[n or -1 for n in tensor.shape] for tensor in tensors]
            for tensors in (model.inputs, model.outputs)
        )
        return inputs, outputs

    def _input_shapes(self) -> list[list[int]]:
        return self.get_model_shapes()[0]

    def _spec(self) -> dict[str, Any]:
        optimizer = self.getOptimizer() or getattr(self.getModel(), "optimizer", None)
        if self.getLoss() is None or optimizer is None:
            raise ValueError("loss and optimizer must be given")
        return {
            "optimizer": keras.optimizers.get(optimizer),
            "loss": self.getLoss(),
            "loss_weights": self.getLossWeights(),
            "metrics": self.getMetrics(),
            "callbacks": self.getCallbacks() or [],
            "checkpoint_callback": self.getCheckpointCallback(),
            "floatx": keras.config.floatx(),
        }

    def _env(self) -> dict[str, str]:
        backend = {"KERAS_BACKEND": keras.backend.backend()}
        return {**super()._env(), **backend, **(self.getBackendEnv() or {})}

    def _pickle_custom_objects(self) -> bytes:
        objects: bytes = cloudpickle.dumps(self.getCustomObjects() or {})
        return objects

    def _train_function(self) -> Callable[[TrainingJob, bytes], Trained | None]:
        return partial(trainer.train, self._pickle_custom_objects())

    def _load_model_from_checkpoint(self, run_id: str) -> bytes:
        return super()._load_checkpoint(run_id)

    def _load_checkpoint(self, run_id: str) -> bytes:
        return self._load_model_from_checkpoint(run_id)

    def _create_model(self, checkpoint: bytes, **params: Any) -> KerasModel:
        pickled = cloudpickle.dumps(self.getModel())
        model = trainer.unpickle_model(pickled, self._pickle_custom_objects())
        model.set_weights(cloudpickle.loads(checkpoint)["weights"])
        return KerasModel(
            model=model,
            custom_objects=self.getCustomObjects() or {},
            _floatx=keras.config.floatx(),
            **params,
        )


class KerasModel(_CustomObjects, HorovodModel):
    """A trained Keras model, which adds predictions to a DataFrame.

    Args:
        params: `model`, `history`, `feature_columns`, `label_columns`,
            `custom_objects`, `run_id`.
    """

    custom_objects = Param(Params._dummy(), "custom_objects", "classes by their names")
    _floatx = Param(Params._dummy(), "_floatx", "Keras's default type of floats")

    def _predictor(self) -> Callable[[], Predict]:
        model = cloudpickle.dumps(self.getModel())
        objects = cloudpickle.dumps(self.getCustomObjects() or {})
        return partial(trainer.predictor, keras.backend.backend(), model, objects)
