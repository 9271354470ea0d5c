"""Spark estimators for Lightning: `import ringjax.spark.lightning as hvd`."""

from ringjax.spark.lightning.estimator import TorchEstimator as TorchEstimator
from ringjax.spark.torch.estimator import TorchModel as TorchModel
