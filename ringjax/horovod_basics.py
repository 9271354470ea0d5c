"""HorovodBasics: the object through which Horovod's own modules call the functions.

For programs that make one themselves. It has no state: all of them are the same.
"""

from __future__ import annotations

from . import basics, ops, runtime, timeline

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """Horovod's object with the functions of runtime, basics and timeline.

    Args:
        pkg_path: accepted and ignored, as are further ones: where Horovod would look
            for its compiled library.

    Example:
        >>> HorovodBasics(__file__, "mpi_lib").gloo_built()
        False
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
    mpi_threads_supported = staticmethod(basics.mpi_threads_supported)
    mpi_enabled = staticmethod(basics.mpi_enabled)
    mpi_built = staticmethod(basics.mpi_built)
    gloo_enabled = staticmethod(basics.gloo_enabled)
    gloo_built = staticmethod(basics.gloo_built)
    nccl_built = staticmethod(basics.nccl_built)
    ddl_built = staticmethod(basics.ddl_built)
    ccl_built = staticmethod(basics.ccl_built)
    cuda_built = staticmethod(basics.cuda_built)
    rocm_built = staticmethod(basics.rocm_built)
    sycl_built = staticmethod(basics.sycl_built)

    def __init__(self, pkg_path: str = "", *args: object) -> None:
        del pkg_path, args

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        sets = runtime.current("_get_process_set_ids_and_ranks").sets
        return {number: list(ranks) for number, ranks in sets.items()}
