"""Compression of collectives: the dtype in which floats are sent.

The native core converts tensors while it moves them, and computes sums in float32.
Tensors that are neither float32 nor float64 are sent without conversion.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WireDtype:
    """A compression of collectives: the dtype in which they send floats."""

    name: str  # the name in `Compression`
    wire: str | None  # the core's name of the dtype; None without compression

    def __repr__(self) -> str:
        return f"Compression.{self.name}"


class Compression:
    """The values of the argument `compression`. Horovod has `none` and `fp16`, too.

    Attributes:
        none: no compression.
        fp16: float16, which has 11 significant bits and overflows beyond 65504.
        bf16: bfloat16, which has 8 significant bits and the range of float32, so it
            needs no loss scaling. fp16 and bf16 halve the bytes of float32.

    Example:
        >>> import ringjax
        >>> ringjax.Compression.bf16
        Compression.bf16
        >>> tx = ringjax.allreduce_grads(compression=ringjax.Compression.bf16)
    """

    none = WireDtype("none", None)
    fp16 = WireDtype("fp16", "f16")
    bf16 = WireDtype("bf16", "bf16")
