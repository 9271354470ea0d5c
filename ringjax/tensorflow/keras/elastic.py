"""Elastic training with `model.fit`, under Horovod's path."""

from __future__ import annotations

from ringjax.keras.elastic import CommitStateCallback as CommitStateCallback
from ringjax.keras.elastic import KerasState as KerasState
from ringjax.keras.elastic import UpdateBatchStateCallback as UpdateBatchStateCallback
from ringjax.keras.elastic import UpdateEpochStateCallback as UpdateEpochStateCallback
from ringjax.keras.elastic import run as run
from ringjax.keras.elastic import run_fn as run_fn
