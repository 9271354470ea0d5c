"""Horovod's callbacks for `model.fit`, under Horovod's path."""

from __future__ import annotations

from ringjax.keras.callbacks import BestModelCheckpoint as BestModelCheckpoint
from ringjax.keras.callbacks import (
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
)
from ringjax.keras.callbacks import (
    LearningRateScheduleCallback as LearningRateScheduleCallback,
)
from ringjax.keras.callbacks import (
    LearningRateWarmupCallback as LearningRateWarmupCallback,
)
from ringjax.keras.callbacks import MetricAverageCallback as MetricAverageCallback
