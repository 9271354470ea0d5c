"""`TorchEstimator` for LightningModules on DataFrames."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from pyspark.ml.param.shared import Param, Params, TypeConverters

from ringjax.spark.common.estimator import Trained
from ringjax.spark.common.training_loop import TrainingJob
from ringjax.spark.torch import estimator as plain
from ringjax.spark.trainers.torch import load_checkpoint

# Params that a LightningModule itself replaces, and by which method.
_IN_MODULE = {
    "optimizer": "configure_optimizers",
    "loss": "training_step",
    "loss_weights": "training_step",
    "loss_constructors": "training_step",
    "train_minibatch_fn": "training_step",
    "metrics": "self.log in training_step",
    "sample_weight_col": "training_step, with the column among feature_cols",
}


class TorchEstimator(plain.TorchEstimator):
    """Trains a LightningModule on a DataFrame, by Lightning's Trainer.

    A batch is a dict of a tensor for each column of `feature_cols` and `label_cols`.
    Fractions are float32, and integers stay integers. The learning rate is that of
    `configure_optimizers`: it is not multiplied by the number of ranks.

    Args:
        model: a LightningModule, whose `forward` takes a tensor for each of
            `feature_cols`.
        input_shapes: the shapes of the features. The dimension of the rows is -1 or
            left out.
        callbacks: callbacks of Lightning. With a `ModelCheckpoint`, its best model is
            returned.
        trainer_args: further arguments of Trainer, which override the estimator's.
        logger, profiler, log_every_n_steps: arguments of Trainer.
        terminate_on_nan: whether a loss that is no number is an error.
        backward_passes_per_step: `accumulate_grad_batches` of Trainer.
        params: the Params of all estimators, see `explainParams`.

    Raises:
        TypeError: a Param does not exist.
        ValueError: raised by `fit`: `model` is no LightningModule, or a Param is given
            that the module replaces, such as `optimizer`.

    Example:
        >>> estimator = TorchEstimator(feature_cols=["x"], label_cols=["y"], epochs=3)
        >>> estimator.setTrainerArgs({"precision": "bf16-mixed"}).getEpochs()
        3
    """

    trainer_args = Param(Params._dummy(), "trainer_args", "arguments of Trainer")
    logger = Param(Params._dummy(), "logger", "a logger of Lightning")
    profiler = Param(Params._dummy(), "profiler", "a profiler of Lightning")
    log_every_n_steps = Param(
        Params._dummy(), "log_every_n_steps", "steps", TypeConverters.toInt
    )
    terminate_on_nan = Param(
        Params._dummy(), "terminate_on_nan", "not a number is an error"
    )
    # Params of Horovod that ringjax does not need, for example for Petastorm.
    num_gpus = Param(Params._dummy(), "num_gpus", "without effect")
    loader_num_epochs = Param(Params._dummy(), "loader_num_epochs", "without effect")
    debug_data_loader = Param(Params._dummy(), "debug_data_loader", "without effect")
    train_async_data_loader_queue_size = Param(
        Params._dummy(), "train_async_data_loader_queue_size", "without effect"
    )
    val_async_data_loader_queue_size = Param(
        Params._dummy(), "val_async_data_loader_queue_size", "without effect"
    )

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self._setDefault(log_every_n_steps=50, terminate_on_nan=False)

    def _spec(self) -> dict[str, Any]:
        model = self.getModel()
        if "LightningModule" not in [kind.__name__ for kind in type(model).__mro__]:
            raise ValueError(
                f"model is a {type(model).__name__} and no LightningModule: use "
                "ringjax.spark.torch.TorchEstimator"
            )
        for name, method in _IN_MODULE.items():
            if self.getOrDefault(getattr(self, name)):
                raise ValueError(
                    f"{name} cannot be given with a LightningModule: use {method}"
                )
        if self.getDataModule() is not None:
            raise ValueError("data_module cannot be given: the store has the data")
        return {
            "input_shapes": self.getInputShapes(),
            "callbacks": self.getCallbacks() or [],
            "terminate_on_nan": self.getTerminateOnNan(),
            "trainer": {
                "logger": self.getLogger() or False,
                "profiler": self.getProfiler(),
                "log_every_n_steps": self.getLogEveryNSteps(),
                "accumulate_grad_batches": self.getBackwardPassesPerStep(),
                **(self.getTrainerArgs() or {}),
            },
        }

    def _train_function(self) -> Callable[[TrainingJob, bytes], Trained | None]:
        from ringjax.spark.trainers import lightning as trainer

        return trainer.train

    def _create_model(self, checkpoint: bytes, **params: Any) -> plain.TorchModel:
        model = copy.deepcopy(self.getModel())
        model.load_state_dict(load_checkpoint(checkpoint)["model"])
        return plain.TorchModel(
            model=model.eval(), input_shapes=self.getInputShapes(), **params
        )
