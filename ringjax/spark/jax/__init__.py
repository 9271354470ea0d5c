"""Spark estimators for JAX: `FlaxEstimator` and `FlaxModel`."""

from ringjax.spark.jax.estimator import FlaxEstimator as FlaxEstimator
from ringjax.spark.jax.estimator import FlaxModel as FlaxModel
