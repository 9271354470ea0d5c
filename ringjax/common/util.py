"""Makes the helper functions that Horovod has importable from Horovod's module path."""

from ringjax.horovod.functions import ccl_built as ccl_built
from ringjax.horovod.functions import check_extension as check_extension
from ringjax.horovod.functions import cuda_built as cuda_built
from ringjax.horovod.functions import ddl_built as ddl_built
from ringjax.horovod.functions import env as env
from ringjax.horovod.functions import extension_available as extension_available
from ringjax.horovod.functions import gloo_built as gloo_built
from ringjax.horovod.functions import gpu_available as gpu_available
from ringjax.horovod.functions import (
    is_version_greater_equal_than as is_version_greater_equal_than,
)
from ringjax.horovod.functions import mpi_built as mpi_built
from ringjax.horovod.functions import nccl_built as nccl_built
from ringjax.horovod.functions import num_rank_is_power_2 as num_rank_is_power_2
from ringjax.horovod.functions import rocm_built as rocm_built
from ringjax.horovod.functions import split_list as split_list
from ringjax.horovod.functions import sycl_built as sycl_built
