"""Elastic training with `model.fit`, under Horovod's path."""

from ringjax.keras.elastic import *  # noqa: F403
