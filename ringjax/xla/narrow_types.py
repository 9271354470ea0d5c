"""Says in which element types JAX's collectives carry narrow ones, such as float16.

XLA refuses to reduce or gather float16 over processes before it calls ringjax. So the
collectives of `shard_map` receive such a tensor in float32, and their result becomes
float16 again: a sum is rounded once. XLA's partitioner inserts collectives only later,
and those keep their type.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

DType = np.dtype[Any]


def carrier(dtype: DType) -> DType:
    """Returns the type in which elements travel, which is `dtype` itself if it can.

    The other type holds all values of `dtype`, and a sum of integers that is cut to
    `dtype` again has wrapped around as it would in `dtype`.

    Example:
        >>> for name in ("float16", "float8_e5m2", "int4", "uint4", "int8", "bfloat16"):
        ...     print(name, carrier(jnp.dtype(name)))
        float16 float32
        float8_e5m2 float32
        int4 int8
        uint4 uint8
        int8 int8
        bfloat16 bfloat16
    """
    if jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.bfloat16:
        return np.promote_types(dtype, np.float32)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        signed = jnp.issubdtype(dtype, jnp.signedinteger)
        return np.dtype(np.int8 if signed else np.uint8)
    return dtype  # XLA widens bfloat16 itself
