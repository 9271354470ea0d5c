"""The bits of a tree of arrays: a hash of all of them, and flips that tests ask for."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax import _native, failpoints


def hash_words(tree: object) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns int32[2], a hash of the dtypes, shapes and bits of all leaves.

    The structure is left out: its text may contain addresses of functions, as those of
    equinox's modules, which differ between processes.
    """
    arrays = [np.ascontiguousarray(_bits(leaf)) for leaf in jax.tree.leaves(tree)]
    found = _native.hash_memory([(each.ctypes.data, each.nbytes) for each in arrays])
    kinds = [f"{each.dtype}{each.shape}" for each in arrays]
    text = f"{kinds} {found}"
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.int32)


def _bits(leaf: Any) -> Any:
    is_key = jnp.issubdtype(jax.dtypes.result_type(leaf), jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def with_flips(params: Any) -> Any:
    """Returns the parameters; with bits flipped if a test asks for it."""
    for bit in failpoints.flips("pieces.parameter"):
        leaves, structure = jax.tree.flatten(params)
        memory = [bytearray(np.asarray(leaf).tobytes()) for leaf in leaves]
        place = bit % (8 * sum(map(len, memory)))
        for i, each in enumerate(memory):
            if place < 8 * len(each):
                each[place // 8] ^= 1 << place % 8
                wrong = np.frombuffer(each, leaves[i].dtype)
                wrong = wrong.reshape(leaves[i].shape)
                leaves[i] = jax.device_put(wrong, leaves[i].sharding)
                break
            place -= 8 * len(each)
        params = jax.tree.unflatten(structure, leaves)
    return params
