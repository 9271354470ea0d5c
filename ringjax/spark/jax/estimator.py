"""`FlaxEstimator` and `FlaxModel`: Flax models on DataFrames."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
from pyspark.ml.param.shared import Param, Params

from ringjax.spark.common.estimator import (
    HorovodEstimator,
    HorovodModel,
    Predict,
    Trained,
)
from ringjax.spark.common.params import EstimatorParams as EstimatorParams
from ringjax.spark.common.training_loop import TrainingJob, train
from ringjax.spark.trainers import flax as trainer


class FlaxEstimator(HorovodEstimator):
    """Trains a Flax model on a DataFrame.

    The learning rate is not scaled. Floating-point columns are float32.

    Args:
        model: a `flax.nnx.Module`, called with an array for each of `feature_cols`. A
            module of linen must be converted by `flax.nnx.bridge.ToNNX`.
        optimizer: an optax transformation.
        loss: a function of output and label as in optax, which returns a value or an
            array for each row; or a list with one function for each label.
        metrics: groups of functions like `loss`. A group has one function for all
            labels, or one for each label.
        input_shapes: the shapes of the inputs. The dimension of the rows is -1 or left
            out.
        params: the Params of all estimators, see `explainParams`.

    Raises:
        TypeError: a Param does not exist.

    Example:
        >>> FlaxEstimator(feature_cols=["x"], label_cols=["y"]).getEpochs()
        1
    """

    input_shapes = Param(Params._dummy(), "input_shapes", "the shape of each input")
    _run_prefix = "flax"

    def _spec(self) -> dict[str, Any]:
        if self.getLoss() is None or self.getOptimizer() is None:
            raise ValueError("loss and optimizer must be given")
        return self._spec_by_label()

    def _env(self) -> dict[str, str]:
        return super()._env() if self.getUseGpu() else {"JAX_PLATFORMS": "cpu"}

    def _train_function(self) -> Callable[[TrainingJob, bytes], Trained | None]:
        return partial(train, trainer.FlaxModelTrainer)

    def _create_model(self, checkpoint: bytes, **params: Any) -> FlaxModel:
        model = cloudpickle.loads(checkpoint)["model"]
        return FlaxModel(model=model, input_shapes=self.getInputShapes(), **params)


class FlaxModel(HorovodModel):
    """A trained Flax model, which adds predictions to a DataFrame.

    Args:
        params: `model`, `history`, `feature_columns`, `label_columns`, `input_shapes`,
            `run_id`.
    """

    input_shapes = Param(Params._dummy(), "input_shapes", "the shape of each input")

    def _predictor(self) -> Callable[[], Predict]:
        model = cloudpickle.dumps(self.getModel())
        return partial(trainer.predictor, model, self.getInputShapes())
