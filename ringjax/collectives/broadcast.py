"""broadcast: each rank receives the tensor of one rank, the root.

`sync.py` broadcasts parameters and Python objects by this collective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from ringjax import runtime
from ringjax.collectives import arguments
from ringjax.ops import ReduceOp
from ringjax.xla import primitive

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import PyTree, Shaped

    from ringjax.xla.jax_types import Aval, Params, Traced, Tree


def broadcast(
    tensor: PyTree[Shaped[ArrayLike, "*?shape"], Tree],
    root_rank: int,
    *,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
) -> PyTree[Shaped[Array, "*?shape"], Tree]:
    """Returns the root's `tensor` on every rank.

    Args:
        tensor: an array, a number, or a tree of these. Only the values of the root are
            sent, but all ranks must pass the same shapes and dtypes.
        root_rank: the sender's rank *in the world*, even if a process set is given. The
            sender must be in the process set. Equal on all ranks.
        process_set: the ranks that take part; this rank must be among them.
        name: names the operation in error messages.

    Returns:
        The root's tensor or tree.

    Raises:
        NotInitialized: before ringjax.init().
        TypeError, ValueError: an argument is wrong; nothing was sent.
        jax.errors.JaxRuntimeError, ValueError: the ranks' calls differ, or a rank is
            lost. Raised when the result is used. `errors.translated` raises a
            RingjaxError instead.

    Example:
        >>> import jax.numpy as jnp, ringjax
        >>> ringjax.init()
        >>> ringjax.broadcast(jnp.arange(3), root_rank=0).tolist()
        [0, 1, 2]

    Derivatives: the tangent is the broadcast of the tangents. All results are the
    root's tensor, so the root's cotangent is the sum of all cotangents. No result
    depends on the tensors of other ranks, so their cotangents are zero.
    """
    return _broadcast("broadcast", tensor, root_rank, process_set, name)


def grouped_broadcast(
    tensors: PyTree[Shaped[ArrayLike, "*?shape"], Tree],
    root_rank: int,
    *,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
) -> PyTree[Shaped[Array, "*?shape"], Tree]:
    """Broadcasts a list, tuple, dict or any other tree as one operation."""
    return _broadcast("grouped_broadcast", tensors, root_rank, process_set, name)


def _broadcast(
    what: str,
    tree: PyTree,
    root_rank: int,
    process_set: runtime.ProcessSet,
    name: str | None,
) -> PyTree:
    communicator = runtime.communicator(process_set, what)
    leaves = arguments.flatten(what, tree, elementwise=True, moves=True, whole=True)
    root = arguments.root_in_set(what, root_rank, process_set)
    if not leaves.arrays:
        return tree
    return leaves.rebuild(
        primitive.bind(
            "broadcast",
            leaves.arrays,
            comm=communicator.id,
            timeout=process_set.limit(),
            name=name or "",
            names=leaves.names,
            root=root,
            ranks=communicator.size,
        )
    )


# -- derivatives -----------------------------------------------------------------------


def _transpose(cts: list[Traced], avals: list[Aval], params: Params) -> list[Traced]:
    """Returns ``ct_x_r = [r = root] Σ_s ct_y_s``, as ``y_s = x_root`` for all s.

    After an elastic restart, this process may have another rank but use the same
    compiled program. So the program computes the rank when it runs, by a reducescatter.
    """
    del avals
    call = {k: params[k] for k in ("comm", "timeout", "name")}
    size = params["ranks"]
    (rank,) = primitive.bind(
        "reducescatter",
        [jnp.asarray(np.arange(size, dtype=np.int32))],
        **call,
        names=("rank",),
        reduce_op=int(ReduceOp.Max),
        size=size,
        counts=((1,) * size,),
        rows=(1,),
    )
    sums = primitive.bind("allreduce", cts, **call, names=params["names"])
    return [jnp.where(rank[0] == params["root"], s, jnp.zeros_like(s)) for s in sums]


primitive.define_collective(
    "broadcast",
    shape=primitive.same_shape,
    in_place=True,
    batch=primitive.batch_elementwise,
    jvp=primitive.linear_jvp,
    transpose=_transpose,
)
