"""Horovod's helpers for TensorFlow's data service: other machines prepare the batches.

The training program uses `compute_service`, and the job that prepares data is
`compute_worker`. In `ringjax.data` a rank reads its part of the data itself.
"""

from __future__ import annotations

from ringjax.tensorflow.data.compute_service import (
    TfDataServiceConfig,
    compute_worker_fn,
    send_to_data_service,
    tf_data_service,
)

__all__ = [
    "TfDataServiceConfig",
    "compute_worker_fn",
    "send_to_data_service",
    "tf_data_service",
]
