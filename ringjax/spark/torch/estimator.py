"""`TorchEstimator` and `TorchModel`: PyTorch models on DataFrames."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
from pyspark.ml.param.shared import Param, Params

from ringjax.spark.common.columns import to_list
from ringjax.spark.common.estimator import (
    HorovodEstimator,
    HorovodModel,
    Predict,
    Trained,
)
from ringjax.spark.common.params import EstimatorParams as EstimatorParams
from ringjax.spark.common.params import ParamAccessors
from ringjax.spark.common.training_loop import TrainingJob, train
from ringjax.spark.trainers import torch as trainer


class _BoundOptimizer(ParamAccessors):
    def getOptimizer(self) -> Any:  # noqa: N802  (Spark ML's way of names)
        """Returns the optimizer, with the parameters of the model."""
        optimizer, model = self.getOrDefault(self.optimizer), self.getModel()
        if model and optimizer:
            return trainer.bind_optimizer(optimizer, model)
        return optimizer


class TorchEstimator(_BoundOptimizer, HorovodEstimator):
    """Trains a PyTorch model on a DataFrame.

    The learning rate is multiplied by the number of ranks, as in Horovod. Inputs,
    labels and weights are float32.

    Args:
        model: a module, called with a tensor for each of `feature_cols`.
        optimizer: an optimizer with the parameters of the model.
        loss: a function of output and label, or a list with one function for each
            label. With `sample_weight_col`, it must accept `reduction="none"`.
        loss_constructors: functions that make the losses, instead of `loss`.
        metrics: groups of functions of output and label. A group has one function for
            all labels, or one for each label.
        input_shapes: the shapes of the inputs. The dimension of the rows is -1 or left
            out.
        train_minibatch_fn: makes a step in place of the built-in function. Its
            arguments are ``(model, optimizer, transform_outputs, loss_fn, inputs,
            labels, sample_weights)``, and it returns outputs and loss.
        backward_passes_per_step: the number of steps between two reductions.
        params: the Params of all estimators, see `explainParams`.

    Raises:
        TypeError: a Param does not exist.
        ValueError: `loss` and `loss_constructors` are both given.

    Example:
        >>> estimator = TorchEstimator(feature_cols=["x"], label_cols=["y"], epochs=3)
        >>> estimator.setBatchSize(64).getBatchSize()
        64
    """

    input_shapes = Param(Params._dummy(), "input_shapes", "the shape of each input")
    loss_constructors = Param(Params._dummy(), "loss_constructors", "make losses")
    train_minibatch_fn = Param(Params._dummy(), "train_minibatch_fn", "makes a step")
    backward_passes_per_step = Param(
        Params._dummy(), "backward_passes_per_step", "steps until a reduction"
    )
    _run_prefix = "pytorch"

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self._setDefault(backward_passes_per_step=1)
        if params.get("loss") is not None and params.get("loss_constructors"):
            raise ValueError("loss and loss_constructors are both given")

    def _spec(self) -> dict[str, Any]:
        losses = self.getLoss(), self.getLossConstructors()
        if losses == (None, None) or self.getOptimizer() is None:
            raise ValueError("loss and optimizer must be given")
        return {
            **self._spec_by_label(),
            "loss_constructors": to_list(losses[1], len(self.getLabelCols())),
            "train_minibatch_fn": self.getTrainMinibatchFn(),
            "backward_passes_per_step": self.getBackwardPassesPerStep(),
        }

    def _train_function(self) -> Callable[[TrainingJob, bytes], Trained | None]:
        return partial(train, trainer.TorchModelTrainer)

    def _create_model(self, checkpoint: bytes, **params: Any) -> TorchModel:
        state = trainer.load_checkpoint(checkpoint)
        model, optimizer = copy.deepcopy((self.getModel(), self.getOptimizer()))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return TorchModel(
            model=model.eval(),
            optimizer=optimizer,
            input_shapes=self.getInputShapes(),
            loss=self.getLoss(),
            loss_constructors=self.getLossConstructors(),
            **params,
        )


class TorchModel(_BoundOptimizer, HorovodModel):
    """A trained PyTorch model, which adds predictions to a DataFrame.

    Args:
        params: `model`, `optimizer`, `history`, `feature_columns`, `label_columns`,
            `input_shapes`, `run_id`, `loss`, `loss_constructors`.
    """

    optimizer = Param(Params._dummy(), "optimizer", "the optimizer in its last state")
    input_shapes = Param(Params._dummy(), "input_shapes", "the shape of each input")
    loss = Param(Params._dummy(), "loss", "the losses")
    loss_constructors = Param(Params._dummy(), "loss_constructors", "make losses")

    def _predictor(self) -> Callable[[], Predict]:
        model = cloudpickle.dumps(self.getModel())
        return partial(trainer.predictor, model, self.getInputShapes())
