"""Horovod's API for Keras in TensorFlow: `import ringjax.tensorflow.keras as hvd`.

Since Keras 3, `tf.keras` is `keras`, and this package is `ringjax.keras`. It runs on
TensorFlow, or on another backend that KERAS_BACKEND names.
"""

from __future__ import annotations

from typing import Any

from ringjax import keras as _keras
from ringjax.keras import Adasum as Adasum
from ringjax.keras import Average as Average
from ringjax.keras import DistributedOptimizer as DistributedOptimizer
from ringjax.keras import HorovodInternalError as HorovodInternalError
from ringjax.keras import Max as Max
from ringjax.keras import Min as Min
from ringjax.keras import PartialDistributedOptimizer as PartialDistributedOptimizer
from ringjax.keras import ProcessSet as ProcessSet
from ringjax.keras import Product as Product
from ringjax.keras import Sum as Sum
from ringjax.keras import add_process_set as add_process_set
from ringjax.keras import allgather as allgather
from ringjax.keras import allreduce as allreduce
from ringjax.keras import broadcast as broadcast
from ringjax.keras import broadcast_global_variables as broadcast_global_variables
from ringjax.keras import ccl_built as ccl_built
from ringjax.keras import collective_timeout as collective_timeout
from ringjax.keras import cross_rank as cross_rank
from ringjax.keras import cross_size as cross_size
from ringjax.keras import cuda_built as cuda_built
from ringjax.keras import ddl_built as ddl_built
from ringjax.keras import global_process_set as global_process_set
from ringjax.keras import gloo_built as gloo_built
from ringjax.keras import gloo_enabled as gloo_enabled
from ringjax.keras import init as init
from ringjax.keras import is_homogeneous as is_homogeneous
from ringjax.keras import is_initialized as is_initialized
from ringjax.keras import load_model as load_model
from ringjax.keras import local_rank as local_rank
from ringjax.keras import local_size as local_size
from ringjax.keras import mpi_built as mpi_built
from ringjax.keras import mpi_enabled as mpi_enabled
from ringjax.keras import mpi_threads_supported as mpi_threads_supported
from ringjax.keras import nccl_built as nccl_built
from ringjax.keras import rank as rank
from ringjax.keras import reducescatter as reducescatter
from ringjax.keras import remove_process_set as remove_process_set
from ringjax.keras import rocm_built as rocm_built
from ringjax.keras import shutdown as shutdown
from ringjax.keras import size as size
from ringjax.keras import start_timeline as start_timeline
from ringjax.keras import stop_timeline as stop_timeline
from ringjax.keras import sycl_built as sycl_built
from ringjax.tensorflow.keras import callbacks as callbacks
from ringjax.tensorflow.keras import elastic as elastic


def __getattr__(name: str) -> Any:
    # Each backend has a class of its own.
    if name == "Compression":
        return _keras.Compression
    raise AttributeError(f"module 'ringjax.tensorflow.keras' has no attribute {name!r}")
