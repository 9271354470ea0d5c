"""HorovodBasics: an object whose methods are Horovod's basic functions.

The object has no state, so all objects are equal.
"""

from __future__ import annotations

from ringjax import ops, runtime, timeline
from ringjax.runtime import build

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """Horovod's object with functions such as `init`, `rank` and `nccl_built`.

    Args:
        pkg_path: accepted and ignored, like further arguments. Horovod looks for its
            compiled library there.

    Example:
        >>> HorovodBasics(__file__, "mpi_lib").gloo_built()
        True
    """

    Average, Sum, Adasum = ops.Average, ops.Sum, ops.Adasum
    Min, Max, Product = ops.Min, ops.Max, ops.Product
    init = staticmethod(runtime.init)
    shutdown = staticmethod(runtime.shutdown)
    is_initialized = staticmethod(runtime.is_initialized)
    rank = staticmethod(runtime.rank)
    size = staticmethod(runtime.size)
    local_rank = staticmethod(runtime.local_rank)
    local_size = staticmethod(runtime.local_size)
    cross_rank = staticmethod(runtime.cross_rank)
    cross_size = staticmethod(runtime.cross_size)
    is_homogeneous = staticmethod(runtime.is_homogeneous)
    start_timeline = staticmethod(timeline.start_timeline)
    stop_timeline = staticmethod(timeline.stop_timeline)
    mpi_threads_supported = staticmethod(build.mpi_threads_supported)
    mpi_enabled = staticmethod(build.mpi_enabled)
    mpi_built = staticmethod(build.mpi_built)
    gloo_enabled = staticmethod(build.gloo_enabled)
    gloo_built = staticmethod(build.gloo_built)
    nccl_built = staticmethod(build.nccl_built)
    ddl_built = staticmethod(build.ddl_built)
    ccl_built = staticmethod(build.ccl_built)
    cuda_built = staticmethod(build.cuda_built)
    rocm_built = staticmethod(build.rocm_built)
    sycl_built = staticmethod(build.sycl_built)

    def __init__(self, pkg_path: str = "", *args: object) -> None:
        del pkg_path, args

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        sets = runtime.current("_get_process_set_ids_and_ranks").sets
        return {number: list(ranks) for number, ranks in sets.items()}
