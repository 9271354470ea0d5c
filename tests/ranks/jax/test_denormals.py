"""Denormals inside jit, where XLA's threads flush them: they are numbers to ringjax."""

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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("count", [5, 30_000])  # a note; tiles
def test_min_max_and_sum_of_denormals(world, dtype, count) -> None:
    kind = jnp.dtype(dtype)
    bits = np.dtype(f"uint{8 * kind.itemsize}")
    # All below the least normal number of any type, and their sums too.
    all_bits = [
        (np.arange(count) * (2 * r + 3) % 37 + 3).astype(bits) for r in range(3)
    ]
    mine = all_bits[world.rank].view(kind)
    with jax.enable_x64(True):
        # Bits go out as they come in: XLA's own operations would flush them.
        for op, numpys in ((Min, np.minimum), (Max, np.maximum), (Sum, np.add)):
            for run in (allreduce, jax.jit(allreduce, static_argnums=1)):
                got = np.asarray(run(mine, op)).view(bits)
                want = numpys.reduce(all_bits, dtype=bits)
                np.testing.assert_array_equal(got, want, strict=True)
