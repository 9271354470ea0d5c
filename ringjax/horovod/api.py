"""Imports the functions and classes that Horovod offers for every framework.

The framework packages import all of these names, so that a script needs one import.
"""

from ringjax.errors import HorovodInternalError as HorovodInternalError
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
from ringjax.timeline import start_timeline as start_timeline
from ringjax.timeline import stop_timeline as stop_timeline
from ringjax.world.timeouts import collective_timeout as collective_timeout
