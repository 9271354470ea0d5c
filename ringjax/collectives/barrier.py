"""barrier: no rank goes on before all have come.

Moves no tensor, so it has no shape, batch or derivative rules.
"""

from __future__ import annotations

from typing import Any

import jax

from ringjax import runtime
from ringjax.xla import jax_private, primitive


def barrier(
    *,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
) -> None:
    """Waits until every rank of `process_set` has called it.

    Outside of jit it returns when all ranks are there, and raises if one is lost.
    Inside a compiled program it is one more operation in the order of the others.

    Args:
      process_set: the ranks that take part; this rank must be one of them.
      name: stands for the operation in error messages.

    Raises:
      NotInitialized: before ringjax.init().
      jax.errors.JaxRuntimeError: if a rank is lost, or calls something else.

    Example:
      >>> import ringjax
      >>> ringjax.init()
      >>> ringjax.barrier()
    """
    communicator = runtime.communicator(process_set, "barrier")
    primitive.bind(
        "barrier",
        [],
        comm=communicator.id,
        timeout=process_set.limit(),
        name=name or "",
    )
    if jax_private.is_eager([]):
        jax.effects_barrier()
        primitive.confirm()


def _shape(avals: Any, **params: Any) -> list[Any]:
    return []


primitive.define_collective(
    "barrier", shape=_shape, in_place=False, batch=None, jvp=None, transpose=None
)
