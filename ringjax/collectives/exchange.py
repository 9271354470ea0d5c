"""exchange: the mean of all ranks' exact sums, the collective behind `ringjax.exact`.

Each rank has sums in 64-bit fixed point, whose total does not depend on the order of
the terms, and receives the mean as float32. The ranks send 8 bytes an element until the
sums are complete, and 4 bytes an element from then on.
xla_ext/engine/communicator/exact_exchange.h describes the steps and the checksums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from ringjax import runtime
from ringjax.xla import primitive

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float32, Int32, UInt32

    from ringjax.xla.jax_types import Aval


def exchange(
    words: UInt32[Array, "n 2"],
    control: Int32[Array, " k"],
    maxima: Int32[Array, " m"],
    units: Int32[Array, " leaves"],
    checksum: UInt32[Array, " 4"],
    *,
    sizes: Sequence[int],
    pieces: int,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
) -> tuple[
    Float32[Array, " n"],
    Int32[Array, " k"],
    Int32[Array, " m"],
    Int32[Array, " leaves"],
    UInt32[Array, " 4"],
]:
    """Adds the exact sums of all ranks, and returns their mean over all pieces.

    Works eagerly and inside jit, cond and while_loop, on a CPU device. The ranks verify
    the checksums. If they do not fit, the exchange is repeated; if they do not fit
    again, the rank to blame is named, and lost in an elastic job.

    Args:
        words: the sums of this rank as int64, the low word first. The leaves follow
            each other.
        control: numbers that are summed over the ranks, modulo 2**32.
        maxima: numbers of which the maximum over the ranks is returned.
        units: the exponent of the last bit of each leaf's sums; equal on all ranks.
        checksum: of `words`, modulo 2**64: the sum of the int64, then the sum of each
            times 2 i + 1, where i is its place; the low word first.
        sizes: the number of elements of each leaf.
        pieces: the number of pieces of the whole batch, by which the total is divided.
        process_set: the ranks that take part; this rank must be among them.
        name: names the operation in error messages.

    Returns:
        The mean, the sums of `control`, the maxima, `units`, and the checksum of the
        total.

    Raises:
        NotInitialized: before ringjax.init().
        ValueError: an argument is wrong; nothing was sent.
        jax.errors.JaxRuntimeError, ValueError: the ranks' calls differ, a checksum does
            not fit, or a rank is lost. Raised when the result is used.

    Example:
        >>> import jax.numpy as jnp, ringjax
        >>> from ringjax.collectives.exchange import exchange
        >>> ringjax.init()
        >>> words = jnp.array([[6, 0], [10, 0]], jnp.uint32)  # 3 and 5, in halves
        >>> zero, half = jnp.zeros(1, jnp.int32), jnp.array([-1], jnp.int32)
        >>> checksum = jnp.array([16, 0, 36, 0], jnp.uint32)
        >>> given = (words, zero, zero, half, checksum)
        >>> mean, *_ = exchange(*given, sizes=(2,), pieces=1)
        >>> mean / ringjax.size()
        Array([3., 5.], dtype=float32)
    """
    communicator = runtime.communicator(process_set, "exchange")
    if words.shape != (sum(sizes), 2) or units.shape != (len(sizes),) or pieces < 1:
        raise ValueError(
            f"ringjax.exchange: `words` {words.shape}, `units` {units.shape}, "
            f"{len(sizes)} `sizes` with the sum {sum(sizes)} and `pieces`={pieces} do "
            "not fit together; expected (sum(sizes), 2), (len(sizes),) and pieces >= 1"
        )
    mean, control, maxima, units, checksum = primitive.bind(
        "exchange",
        [words, control, maxima, units, checksum],
        comm=communicator.id,
        timeout=process_set.limit(),
        name=name or "",
        names=("sums", "control", "maxima", "units", "checksum"),
        counts=((pieces, *sizes), (), (), (), ()),
    )
    return mean, control, maxima, units, checksum


def _shape(avals: Sequence[Aval], **params: Any) -> list[Aval]:
    words, *rest = avals
    mean = words.update(shape=words.shape[:1], dtype=jnp.dtype("float32"))
    return [mean, *(a.update(weak_type=False) for a in rest)]


primitive.define_collective(
    "exchange", shape=_shape, in_place=False, batch=None, jvp=None, transpose=None
)
