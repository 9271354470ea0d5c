"""The stateless compressions of collectives: the dtype in which floats travel.

Only names: the conversion happens natively inside the pass over the data, sums are
formed in float32. Tensors that are neither float32 nor float64 travel as they are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WireDtype:
    """A compression that consists of a dtype on the wire.

    Attributes:
      name: the name under `Compression`.
      wire: the native name of the dtype; None sends tensors in their own dtype.
    """

    name: str
    wire: str | None

    def __repr__(self) -> str:
        return f"Compression.{self.name}"


class Compression:
    """What `compression=` accepts. The names are Horovod's; bf16 is ours.

    Example:
      >>> import ringjax
      >>> tx = ringjax.allreduce_grads(compression=ringjax.Compression.bf16)

    fp16 has 11 significant bits and overflows beyond 65504; bf16 has 8 and the range of
    float32, so it needs no loss scaling. Both halve the bytes of float32.
    """

    none = WireDtype("none", None)
    fp16 = WireDtype("fp16", "f16")
    bf16 = WireDtype("bf16", "bf16")
