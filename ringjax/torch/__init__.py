"""Horovod's PyTorch API: after `import ringjax.torch as hvd`, a script runs unchanged.

The package has all names of `horovod.torch` 0.28, in the same modules. Nothing in it is
compiled against PyTorch, so it works with any version from 2.4 on.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from ringjax.runtime import refuse_groups as _refuse_groups
from ringjax.torch.compression import Compression as Compression
from ringjax.torch.exact import exact_allreduce as exact_allreduce
from ringjax.torch.exact_gradients import ExactGradients as ExactGradients
from ringjax.torch.functions import allgather_object as allgather_object
from ringjax.torch.functions import broadcast_object as broadcast_object
from ringjax.torch.functions import (
    broadcast_optimizer_state as broadcast_optimizer_state,
)
from ringjax.torch.functions import broadcast_parameters as broadcast_parameters
from ringjax.torch.mpi_ops import Adasum as Adasum
from ringjax.torch.mpi_ops import Average as Average
from ringjax.torch.mpi_ops import HorovodInternalError as HorovodInternalError
from ringjax.torch.mpi_ops import Max as Max
from ringjax.torch.mpi_ops import Min as Min
from ringjax.torch.mpi_ops import ProcessSet as ProcessSet
from ringjax.torch.mpi_ops import Product as Product
from ringjax.torch.mpi_ops import Sum as Sum
from ringjax.torch.mpi_ops import add_process_set as add_process_set
from ringjax.torch.mpi_ops import allgather as allgather
from ringjax.torch.mpi_ops import allgather_async as allgather_async
from ringjax.torch.mpi_ops import allreduce as allreduce
from ringjax.torch.mpi_ops import allreduce_ as allreduce_
from ringjax.torch.mpi_ops import allreduce_async as allreduce_async
from ringjax.torch.mpi_ops import allreduce_async_ as allreduce_async_
from ringjax.torch.mpi_ops import alltoall as alltoall
from ringjax.torch.mpi_ops import alltoall_async as alltoall_async
from ringjax.torch.mpi_ops import barrier as barrier
from ringjax.torch.mpi_ops import broadcast as broadcast
from ringjax.torch.mpi_ops import broadcast_ as broadcast_
from ringjax.torch.mpi_ops import broadcast_async as broadcast_async
from ringjax.torch.mpi_ops import broadcast_async_ as broadcast_async_
from ringjax.torch.mpi_ops import ccl_built as ccl_built
from ringjax.torch.mpi_ops import cross_rank as cross_rank
from ringjax.torch.mpi_ops import cross_size as cross_size
from ringjax.torch.mpi_ops import cuda_built as cuda_built
from ringjax.torch.mpi_ops import ddl_built as ddl_built
from ringjax.torch.mpi_ops import global_process_set as global_process_set
from ringjax.torch.mpi_ops import gloo_built as gloo_built
from ringjax.torch.mpi_ops import gloo_enabled as gloo_enabled
from ringjax.torch.mpi_ops import grouped_allgather as grouped_allgather
from ringjax.torch.mpi_ops import grouped_allgather_async as grouped_allgather_async
from ringjax.torch.mpi_ops import grouped_allreduce as grouped_allreduce
from ringjax.torch.mpi_ops import grouped_allreduce_ as grouped_allreduce_
from ringjax.torch.mpi_ops import grouped_allreduce_async as grouped_allreduce_async
from ringjax.torch.mpi_ops import grouped_allreduce_async_ as grouped_allreduce_async_
from ringjax.torch.mpi_ops import grouped_reducescatter as grouped_reducescatter
from ringjax.torch.mpi_ops import (
    grouped_reducescatter_async as grouped_reducescatter_async,
)
from ringjax.torch.mpi_ops import init as init
from ringjax.torch.mpi_ops import is_homogeneous as is_homogeneous
from ringjax.torch.mpi_ops import is_initialized as is_initialized
from ringjax.torch.mpi_ops import join as join
from ringjax.torch.mpi_ops import local_rank as local_rank
from ringjax.torch.mpi_ops import local_size as local_size
from ringjax.torch.mpi_ops import mpi_built as mpi_built
from ringjax.torch.mpi_ops import mpi_enabled as mpi_enabled
from ringjax.torch.mpi_ops import mpi_threads_supported as mpi_threads_supported
from ringjax.torch.mpi_ops import nccl_built as nccl_built
from ringjax.torch.mpi_ops import poll as poll
from ringjax.torch.mpi_ops import rank as rank
from ringjax.torch.mpi_ops import reducescatter as reducescatter
from ringjax.torch.mpi_ops import reducescatter_async as reducescatter_async
from ringjax.torch.mpi_ops import remove_process_set as remove_process_set
from ringjax.torch.mpi_ops import rocm_built as rocm_built
from ringjax.torch.mpi_ops import shutdown as shutdown
from ringjax.torch.mpi_ops import size as size
from ringjax.torch.mpi_ops import sparse_allreduce_async as sparse_allreduce_async
from ringjax.torch.mpi_ops import start_timeline as start_timeline
from ringjax.torch.mpi_ops import stop_timeline as stop_timeline
from ringjax.torch.mpi_ops import sycl_built as sycl_built
from ringjax.torch.mpi_ops import synchronize as synchronize
from ringjax.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from ringjax.torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from ringjax.world.timeouts import collective_timeout as collective_timeout

if TYPE_CHECKING:
    from ringjax.torch import elastic as elastic

_refuse_groups("ringjax.torch")


def __getattr__(name: str) -> ModuleType:
    if name == "elastic":
        return importlib.import_module("ringjax.torch.elastic")
    raise AttributeError(f"module 'ringjax.torch' has no attribute {name!r}")
