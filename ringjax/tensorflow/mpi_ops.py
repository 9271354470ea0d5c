"""Horovod's module of operations: every name it has, handed on. No MPI is used.

The operations are in reductions.py and movement.py, those that Horovod keeps to itself
in private_reductions.py; the rest is ringjax's own.
"""

from __future__ import annotations

from ringjax.errors import HorovodInternalError as HorovodInternalError
from ringjax.horovod.basics import HorovodBasics
from ringjax.horovod.functions import num_rank_is_power_2
from ringjax.ops import Adasum as Adasum
from ringjax.ops import Average as Average
from ringjax.ops import Max as Max
from ringjax.ops import Min as Min
from ringjax.ops import Product as Product
from ringjax.ops import Sum as Sum
from ringjax.runtime import ProcessSet as ProcessSet
from ringjax.runtime import add_process_set as add_process_set
from ringjax.runtime import cross_rank as cross_rank
from ringjax.runtime import cross_size as cross_size
from ringjax.runtime import global_process_set as global_process_set
from ringjax.runtime import init as init
from ringjax.runtime import is_homogeneous as is_homogeneous
from ringjax.runtime import is_initialized as is_initialized
from ringjax.runtime import local_rank as local_rank
from ringjax.runtime import local_size as local_size
from ringjax.runtime import rank as rank
from ringjax.runtime import remove_process_set as remove_process_set
from ringjax.runtime import shutdown as shutdown
from ringjax.runtime import size as size
from ringjax.runtime.build import ccl_built as ccl_built
from ringjax.runtime.build import cuda_built as cuda_built
from ringjax.runtime.build import ddl_built as ddl_built
from ringjax.runtime.build import gloo_built as gloo_built
from ringjax.runtime.build import gloo_enabled as gloo_enabled
from ringjax.runtime.build import mpi_built as mpi_built
from ringjax.runtime.build import mpi_enabled as mpi_enabled
from ringjax.runtime.build import mpi_threads_supported as mpi_threads_supported
from ringjax.runtime.build import nccl_built as nccl_built
from ringjax.runtime.build import rocm_built as rocm_built
from ringjax.runtime.build import sycl_built as sycl_built
from ringjax.tensorflow.graph_collectives import normalize_name
from ringjax.tensorflow.movement import allgather as allgather
from ringjax.tensorflow.movement import alltoall as alltoall
from ringjax.tensorflow.movement import barrier as barrier
from ringjax.tensorflow.movement import broadcast as broadcast
from ringjax.tensorflow.movement import broadcast_ as broadcast_
from ringjax.tensorflow.movement import grouped_allgather as grouped_allgather
from ringjax.tensorflow.movement import join as join
from ringjax.tensorflow.movement import local_rank_op as local_rank_op
from ringjax.tensorflow.movement import local_size_op as local_size_op
from ringjax.tensorflow.movement import (
    process_set_included_op as process_set_included_op,
)
from ringjax.tensorflow.movement import rank_op as rank_op
from ringjax.tensorflow.movement import size_op as size_op
from ringjax.tensorflow.private_reductions import _allreduce as _allreduce
from ringjax.tensorflow.private_reductions import (
    _grouped_allreduce as _grouped_allreduce,
)
from ringjax.tensorflow.private_reductions import (
    _grouped_reducescatter as _grouped_reducescatter,
)
from ringjax.tensorflow.private_reductions import _reducescatter as _reducescatter
from ringjax.tensorflow.private_reductions import (
    handle_average_backwards_compatibility as handle_average_backwards_compatibility,
)
from ringjax.timeline import start_timeline as start_timeline
from ringjax.timeline import stop_timeline as stop_timeline

_basics = HorovodBasics()
_normalize_name = normalize_name
check_num_rank_power_of_2 = num_rank_is_power_2
