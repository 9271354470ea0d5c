"""Horovod's TensorFlow API: a script needs only `import ringjax.tensorflow as hvd`.

The package has every name of `horovod.tensorflow` 0.28, in the modules where Horovod
has them. Nothing here is compiled against TensorFlow. Functions such as `init` and
`rank` are ringjax's own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ringjax.horovod.api import *  # noqa: F403
from ringjax.horovod.functions import gpu_available as gpu_available
from ringjax.runtime import refuse_groups as _refuse_groups
from ringjax.tensorflow.compression import Compression as Compression
from ringjax.tensorflow.functions import (
    BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook,
)
from ringjax.tensorflow.functions import allgather_object as allgather_object
from ringjax.tensorflow.functions import (
    broadcast_global_variables as broadcast_global_variables,
)
from ringjax.tensorflow.functions import broadcast_object as broadcast_object
from ringjax.tensorflow.functions import broadcast_object_fn as broadcast_object_fn
from ringjax.tensorflow.functions import broadcast_variables as broadcast_variables
from ringjax.tensorflow.gradients import (
    _make_allreduce_grads_fn as _make_allreduce_grads_fn,
)
from ringjax.tensorflow.mpi_ops import allgather as allgather
from ringjax.tensorflow.mpi_ops import alltoall as alltoall
from ringjax.tensorflow.mpi_ops import barrier as barrier
from ringjax.tensorflow.mpi_ops import broadcast as broadcast
from ringjax.tensorflow.mpi_ops import broadcast_ as broadcast_
from ringjax.tensorflow.mpi_ops import (
    check_num_rank_power_of_2 as check_num_rank_power_of_2,
)
from ringjax.tensorflow.mpi_ops import grouped_allgather as grouped_allgather
from ringjax.tensorflow.mpi_ops import (
    handle_average_backwards_compatibility as handle_average_backwards_compatibility,
)
from ringjax.tensorflow.mpi_ops import join as join
from ringjax.tensorflow.mpi_ops import local_rank_op as local_rank_op
from ringjax.tensorflow.mpi_ops import local_size_op as local_size_op
from ringjax.tensorflow.mpi_ops import (
    process_set_included_op as process_set_included_op,
)
from ringjax.tensorflow.mpi_ops import rank_op as rank_op
from ringjax.tensorflow.mpi_ops import size_op as size_op
from ringjax.tensorflow.optimizer import DistributedOptimizer as DistributedOptimizer
from ringjax.tensorflow.reductions import allreduce as allreduce
from ringjax.tensorflow.reductions import grouped_allreduce as grouped_allreduce
from ringjax.tensorflow.reductions import grouped_reducescatter as grouped_reducescatter
from ringjax.tensorflow.reductions import reducescatter as reducescatter
from ringjax.tensorflow.tape import DistributedGradientTape as DistributedGradientTape
from ringjax.tensorflow.tape import (
    PartialDistributedGradientTape as PartialDistributedGradientTape,
)

if TYPE_CHECKING:
    from ringjax.tensorflow import elastic as elastic
    from ringjax.tensorflow.sync_batch_norm import (
        SyncBatchNormalization as SyncBatchNormalization,
    )

_refuse_groups("ringjax.tensorflow")


def __getattr__(name: str) -> Any:
    if name in ("elastic", "util"):
        return importlib.import_module(f"ringjax.tensorflow.{name}")
    # Horovod's tests use this private name.
    if name == "_executing_eagerly":
        return importlib.import_module("ringjax.tensorflow.util")._executing_eagerly
    # Import this class only when a program uses it, because the import loads Keras.
    if name == "SyncBatchNormalization":
        module = importlib.import_module("ringjax.tensorflow.sync_batch_norm")
        return module.SyncBatchNormalization
    raise AttributeError(f"module 'ringjax.tensorflow' has no attribute {name!r}")
