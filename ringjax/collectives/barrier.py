"""barrier: no rank continues before all ranks have called `barrier`.

A barrier sends no tensor, so it has no rules for batching or derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from ringjax import runtime
from ringjax.xla import jax_private, primitive

if TYPE_CHECKING:
    from ringjax.xla.jax_types import Aval


def barrier(
    *,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
) -> None:
    """Waits until every rank of `process_set` has called `barrier`.

    Outside of jit the function itself waits. Inside a compiled program, the program
    waits, in order with the other collectives of the program.

    Args:
        process_set: the ranks that take part; this rank must be among them.
        name: names the operation in error messages.

    Raises:
        NotInitialized: before ringjax.init().
        jax.errors.JaxRuntimeError: a rank is lost, or has made another call.

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


def _shape(avals: Sequence[Aval], **params: object) -> list[Aval]:
    return []


primitive.define_collective(
    "barrier", shape=_shape, in_place=False, batch=None, jvp=None, transpose=None
)
