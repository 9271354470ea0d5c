"""Spark estimators for PyTorch: `import ringjax.spark.torch as hvd`."""

from ringjax.spark.torch.estimator import TorchEstimator as TorchEstimator
from ringjax.spark.torch.estimator import TorchModel as TorchModel
