"""Spark estimators for Keras: `import ringjax.spark.keras as hvd`."""

from ringjax.spark.keras.estimator import KerasEstimator as KerasEstimator
from ringjax.spark.keras.estimator import KerasModel as KerasModel
