"""Horovod's place for its small functions; only hands them on."""

from ringjax.horovod.functions import (
    ccl_built,
    check_extension,
    cuda_built,
    ddl_built,
    env,
    extension_available,
    gloo_built,
    gpu_available,
    is_version_greater_equal_than,
    mpi_built,
    nccl_built,
    num_rank_is_power_2,
    rocm_built,
    split_list,
    sycl_built,
)

__all__ = [
    "ccl_built",
    "check_extension",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
    "sycl_built",
]
