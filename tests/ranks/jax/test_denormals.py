"""Denormals under jit: threads of XLA flush them to zero, but ringjax keeps them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax import Max, Min, Sum, allreduce

pytestmark = [
    pytest.mark.ranks(3),
    pytest.mark.launch("collectives"),
]


@pytest.mark.parametrize("count", [5, 30_000], ids=["inline data", "tiles"])
def test_min_max_and_sum_of_denormals(world, count) -> None:
    kinds = [jnp.dtype(d) for d in ("float16", "bfloat16", "float32", "float64")]
    # All inputs and sums are below the smallest normal number of every dtype.
    all_bits = [np.arange(count) * (2 * r + 3) % 37 + 3 for r in range(3)]
    # Views as integers, because operations of XLA would flush the floats to zero.
    bits = [np.dtype(f"uint{8 * kind.itemsize}") for kind in kinds]
    mine = [
        all_bits[world.rank].astype(bit).view(kind)
        for bit, kind in zip(bits, kinds, strict=True)
    ]
    with jax.enable_x64(True):
        for op, numpys in ((Min, np.minimum), (Max, np.maximum), (Sum, np.add)):
            for run in (allreduce, jax.jit(allreduce, static_argnums=1)):
                for got, bit in zip(run(mine, op), bits, strict=True):
                    want = numpys.reduce(all_bits).astype(bit)
                    np.testing.assert_array_equal(
                        np.asarray(got).view(bit), want, strict=True
                    )
