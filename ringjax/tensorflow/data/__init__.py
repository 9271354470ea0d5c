"""Horovod's helpers for TensorFlow's data service: other machines prepare the batches.

`compute_service` is for the training program, `compute_worker` for the job that
prepares data. How a rank takes its share of data itself is `ringjax.data`.
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
