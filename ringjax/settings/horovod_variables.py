"""Lists Horovod's environment variables, and the ringjax setting for each of them.

Variables without a setting have a reason instead. The log, the tests and
docs/reference/horovod.md use this table, which
`python -m ringjax.settings.horovod_variables` prints. The fields of `Config` name the
variables that have an effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from ringjax import config

# Horovod's variables without an effect here: (reason, names without HOROVOD_).
_WITHOUT_EFFECT: tuple[tuple[str, str], ...] = (
    (
        "ranks find each other by RINGJAX_RENDEZVOUS and RINGJAX_SECRET, which ringrun "
        "sets",
        "GLOO_RENDEZVOUS_ADDR GLOO_RENDEZVOUS_PORT",
    ),
    ("ringjax uses neither MPI, Gloo nor oneCCL as a controller", "CONTROLLER"),
    (
        "the transports are shared memory inside a host, and TCP or RINGJAX_FABRIC "
        "between hosts",
        "CPU_OPERATIONS",
    ),
    (
        "a cost model chooses hierarchical algorithms where they are faster; "
        "RINGJAX_ALGORITHM forces one",
        "HIERARCHICAL_ALLREDUCE HIERARCHICAL_ALLGATHER TORUS_ALLREDUCE",
    ),
    (
        "on CUDA devices RINGJAX_FUSION says which tensors are copied together",
        "BATCH_D2D_MEMCOPIES",
    ),
    (
        "communication has one CUDA stream of its own; RINGJAX_COMM_STREAM=0 uses the "
        "stream of the program",
        "NUM_NCCL_STREAMS",
    ),
    (
        "completion is always asynchronous: on CUDA devices the stream waits, not the "
        "host",
        "ENABLE_ASYNC_COMPLETION",
    ),
    ("inside jit every collective is always an XLA operation", "ENABLE_XLA_OPS"),
    ("process sets may be added and removed at any time", "DYNAMIC_PROCESS_SETS"),
    ("ringrun --min-np or --host-discovery-script makes a job elastic", "ELASTIC"),
    (
        "ringjax tries all candidate settings, without Bayesian optimization",
        "AUTOTUNE_BAYES_OPT_MAX_SAMPLES AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    ),
    (
        "ringjax binds no threads to cores; bind the process (taskset, --cpu-bind)",
        "THREAD_AFFINITY",
    ),
    ("ringjax does not use MPI", "MPI_THREADS_DISABLE ADASUM_MPI_CHUNK_SIZE"),
    ("ringjax does not use oneCCL", "CCL_CACHE"),
    ("ringjax records no NVTX ranges", "DISABLE_NVTX_RANGES"),
    ("log lines have no time; ringrun -prefix-timestamp adds it", "LOG_HIDE_TIME"),
    (
        "pass `start_timeout=` to `ringjax.spark.run`; ranks import modules from the "
        "driver's path, and see the GPUs of their task",
        "SPARK_START_TIMEOUT SPARK_WORK_DIR SPARK_PYTHONPATH "
        "SPARK_USE_LOCAL_RANK_GPU_INDEX",
    ),
    (
        "the variable configures the build of Horovod; ringjax is built without "
        "frameworks, CUDA and NCCL",
        "WITH_TENSORFLOW WITHOUT_TENSORFLOW WITH_PYTORCH WITHOUT_PYTORCH WITH_MXNET "
        "WITHOUT_MXNET WITH_MPI WITHOUT_MPI WITH_GLOO WITHOUT_GLOO WITH_NVTX "
        "WITHOUT_NVTX GPU_OPERATIONS GPU_ALLREDUCE GPU_ALLGATHER GPU_BROADCAST "
        "GPU_ALLTOALL GPU_REDUCESCATTER ALLOW_MIXED_GPU_IMPL GPU CUDA_HOME NCCL_HOME "
        "NCCL_INCLUDE NCCL_LIB NCCL_LINK ROCM_HOME NVTX_INCLUDE BUILD_ARCH_FLAGS "
        "BUILD_CUDA_CC_LIST CMAKE DEBUG SKIP_COMPILE LOCAL_VERSION",
    ),
    ("the variable is for Horovod's own tests", "TEST_GPU MIXED_INSTALL"),
)
WITHOUT_EFFECT = {
    f"HOROVOD_{name}": why for why, names in _WITHOUT_EFFECT for name in names.split()
}
# Horovod's variables whose values mean something else than ringjax's values.
_VALUE_FORMATS = {
    "HOROVOD_STALL_CHECK_DISABLE": "if 1: {}=0",
    "HOROVOD_DISABLE_GROUP_FUSION": "if 1: {}=0",
}


def honoured() -> dict[str, list[str]]:
    """Maps each Horovod variable that has an effect to ringjax's variables for it.

    Example:
        >>> honoured()["HOROVOD_GLOO_IFACE"]
        ['RINGJAX_NETWORK_INTERFACES']
    """
    found: dict[str, list[str]] = {}
    for field in dataclasses.fields(config.Config):
        ours, *horovods = config.variables(field)
        for name in horovods:
            found.setdefault(name, []).append(ours)
    return found


def notes(names: Iterable[str]) -> Iterator[str]:
    """Yields a line for the log for each variable in `names` that has no effect."""
    known = honoured()
    for name in names:
        if name not in known:
            why = WITHOUT_EFFECT.get(name, "ringjax does not know it")
            yield f"{name} has no effect: {why}"


def table() -> str:
    """Returns the table of all Horovod variables in Markdown."""
    rows = [("variable", "here"), ("---", "---")]
    for name, ours in honoured().items():
        text = _VALUE_FORMATS.get(name, "{}")
        rows.append((f"`{name}`", ", ".join(f"`{text.format(x)}`" for x in ours)))
    for why, names in _WITHOUT_EFFECT:
        words = (f"`HOROVOD_{name}`" for name in names.split())
        rows.append((", ".join(words), f"no effect: {why}"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table())
