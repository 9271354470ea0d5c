"""`jax.distributed.initialize()` without arguments, in processes of ringrun.

JAX asks the subclasses of its class ClusterEnv for the processes of a job. JAX imports
no plugin before that. But jaxlib loads libringjax_mpi.so when jaxlib is imported, and
the library calls this module, as does `import ringjax`. Neither may import JAX: the
import of jaxlib has not ended, or the program does not use JAX.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_MODULE = "jax._src.clusters.cluster"
_watches = False


def watch() -> None:
    """Makes a job of ringrun the first of JAX's clusters, as soon as JAX has them.

    Further calls do nothing.
    """
    global _watches
    if _watches:
        return
    _watches = True
    if _MODULE in sys.modules:
        _add_cluster(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _ClusterFinder())


class _ClusterFinder:
    """Adds the cluster after the import of one module, and then finds no more."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_add(module: ModuleType) -> None:
                execute(module)
                _add_cluster(module)

            loader.exec_module = execute_and_add
        return spec


def _add_cluster(module: Any) -> None:
    """Makes a subclass of `module.ClusterEnv`, which JAX asks before all others."""

    class RingjaxCluster(module.ClusterEnv):  # type: ignore[misc]
        name = "ringjax"

        @classmethod
        def is_env_present(cls) -> bool:
            return _launched_job().find() is not None

        @classmethod
        def get_coordinator_address(cls, *args: Any, **kwargs: Any) -> Any:
            return _launched_job().coordinator_address()

        @classmethod
        def get_process_count(cls) -> Any:
            return _launched_job().find().size

        @classmethod
        def get_process_id(cls) -> Any:
            return _launched_job().find().rank

        @classmethod
        def get_local_process_id(cls) -> Any:
            return _launched_job().local_rank()

    # JAX has appended the new class. A shell of Slurm has Slurm's variables, too.
    known = module.ClusterEnv._cluster_types
    known.insert(0, known.pop(known.index(RingjaxCluster)))


def _launched_job() -> Any:
    return importlib.import_module("ringjax.world.launched_job")
