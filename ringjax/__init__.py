"""ringjax: data-parallel training with JAX, added to a training script by one line.

This module loads the module of a public name when a program first uses the name, so
`import ringjax` imports no framework. The launcher never imports a framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ringjax.settings import init_hooks as _init_hooks
from ringjax.xla import jax_plugin as _jax_plugin

if TYPE_CHECKING:
    from ringjax import data as data
    from ringjax import eager as eager
    from ringjax import elastic as elastic
    from ringjax import errors as errors
    from ringjax import exact as exact
    from ringjax import pieces as pieces
    from ringjax.collectives.allgather import allgather as allgather
    from ringjax.collectives.allgather import grouped_allgather as grouped_allgather
    from ringjax.collectives.allreduce import allreduce as allreduce
    from ringjax.collectives.allreduce import grouped_allreduce as grouped_allreduce
    from ringjax.collectives.alltoall import alltoall as alltoall
    from ringjax.collectives.alltoall import grouped_alltoall as grouped_alltoall
    from ringjax.collectives.barrier import barrier as barrier
    from ringjax.collectives.broadcast import broadcast as broadcast
    from ringjax.collectives.broadcast import grouped_broadcast as grouped_broadcast
    from ringjax.collectives.reducescatter import (
        grouped_reducescatter as grouped_reducescatter,
    )
    from ringjax.collectives.reducescatter import reducescatter as reducescatter
    from ringjax.compression import Compression as Compression
    from ringjax.observe.prometheus import PrometheusCollector as PrometheusCollector
    from ringjax.observe.scalars import write_scalars as write_scalars
    from ringjax.observe.statistics import recent_calls as recent_calls
    from ringjax.observe.statistics import stats as stats
    from ringjax.observe.time_use import progress as progress
    from ringjax.observe.time_use import time_for as time_for
    from ringjax.ops import Adasum as Adasum
    from ringjax.ops import Average as Average
    from ringjax.ops import Max as Max
    from ringjax.ops import Min as Min
    from ringjax.ops import Product as Product
    from ringjax.ops import Sum as Sum
    from ringjax.optim import allreduce_grads as allreduce_grads
    from ringjax.optim import weighted_loss as weighted_loss
    from ringjax.profile import profile as profile
    from ringjax.run import run as run
    from ringjax.runtime import ProcessSet as ProcessSet
    from ringjax.runtime import add_process_set as add_process_set
    from ringjax.runtime import cross_rank as cross_rank
    from ringjax.runtime import cross_size as cross_size
    from ringjax.runtime import global_process_set as global_process_set
    from ringjax.runtime import group_rank as group_rank
    from ringjax.runtime import group_size as group_size
    from ringjax.runtime import init as init
    from ringjax.runtime import is_homogeneous as is_homogeneous
    from ringjax.runtime import is_initialized as is_initialized
    from ringjax.runtime import local_rank as local_rank
    from ringjax.runtime import local_size as local_size
    from ringjax.runtime import rank as rank
    from ringjax.runtime import remove_process_set as remove_process_set
    from ringjax.runtime import replica_set as replica_set
    from ringjax.runtime import shutdown as shutdown
    from ringjax.runtime import size as size
    from ringjax.runtime.build import build_info as build_info
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
    from ringjax.sync import allgather_object as allgather_object
    from ringjax.sync import allreduce_metrics as allreduce_metrics
    from ringjax.sync import broadcast_object as broadcast_object
    from ringjax.sync import broadcast_parameters as broadcast_parameters
    from ringjax.timeline import start_timeline as start_timeline
    from ringjax.timeline import stop_timeline as stop_timeline
    from ringjax.tuning.step import autotune as autotune
    from ringjax.world.timeouts import collective_timeout as collective_timeout

    __version__: str

# module -> public names
_NAMES_BY_MODULE = {
    "runtime": """
        ProcessSet add_process_set cross_rank cross_size global_process_set group_rank
        group_size init is_homogeneous is_initialized local_rank local_size rank
        remove_process_set replica_set shutdown size
    """,
    "collectives": """
        allgather allreduce alltoall barrier broadcast grouped_allgather
        grouped_allreduce grouped_alltoall grouped_broadcast grouped_reducescatter
        reducescatter
    """,
    "compression": "Compression",
    "world.timeouts": "collective_timeout",
    "optim": "allreduce_grads weighted_loss",
    "tuning.step": "autotune",
    "sync": "allgather_object allreduce_metrics broadcast_object broadcast_parameters",
    "observe.prometheus": "PrometheusCollector",
    "observe.scalars": "write_scalars",
    "observe.statistics": "recent_calls stats",
    "observe.time_use": "progress time_for",
    "timeline": "start_timeline stop_timeline",
    "ops": "Adasum Average Max Min Product Sum",
    "runtime.build": """
        build_info ccl_built cuda_built ddl_built gloo_built gloo_enabled mpi_built
        mpi_enabled mpi_threads_supported nccl_built rocm_built sycl_built
    """,
}
_MODULES = ("data", "eager", "elastic", "errors", "exact", "pieces", "profile", "run")
_MODULE_OF = {
    name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()
}

__all__ = sorted([*_MODULE_OF, *_MODULES])


_init_hooks.load_jax_support.append(
    lambda: importlib.import_module("ringjax.xla.jax_private")
)
_init_hooks.watch_jax.append(
    lambda: importlib.import_module("ringjax.xla.compile_time").watch()
)
_jax_plugin.add_cluster()


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = importlib.import_module("ringjax.settings.version").version()
    elif name in _MODULES:
        return importlib.import_module(f"ringjax.{name}")
    elif name in _MODULE_OF:
        module = importlib.import_module(f"ringjax.{_MODULE_OF[name]}")
        value = getattr(module, name)
    else:
        raise AttributeError(f"module 'ringjax' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
