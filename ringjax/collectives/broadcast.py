"""broadcast: every rank gets the tensor of one rank, the root.

Not the broadcast of parameters or objects: `sync.py` builds those from this.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ringjax import runtime
from ringjax.collectives import arguments
from ringjax.ops import ReduceOp
from ringjax.xla import primitive


def broadcast(
    tensor: Any,
    root_rank: int,
    *,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
) -> Any:
    """Returns the root's `tensor` on every rank.

    Args:
      tensor: an array, a number, or a tree of them; the same shapes and dtypes on all
        ranks, also where the values do not matter.
      root_rank: the sender's rank *in the world*, also when a process set is given; it
        must be a member of that set. The same on all ranks.
      process_set: the ranks that take part; this rank must be one of them.
      name: stands for the operation in error messages.

    Returns:
      The root's tensor or tree.

    Raises:
      NotInitialized: before ringjax.init().
      TypeError, ValueError: a bad argument; nothing was sent.
      jax.errors.JaxRuntimeError, ValueError: when the result is used, if the ranks
        disagree or one is lost; `errors.translated` raises a RingjaxError instead.

    Example:
      >>> import jax.numpy as jnp, ringjax
      >>> ringjax.init()
      >>> ringjax.broadcast(jnp.arange(3), root_rank=0).tolist()
      [0, 1, 2]

    Derivatives: the tangent is the broadcast of the tangents. The root's tensor is in
    every rank's result, so its cotangent is the sum of all cotangents; the other ranks'
    tensors are in none, and their cotangents are zero.
    """
    return _broadcast("broadcast", tensor, root_rank, process_set, name)


def grouped_broadcast(
    tensors: Any,
    root_rank: int,
    *,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    name: str | None = None,
) -> Any:
    """`broadcast` of a list, tuple, dict or any tree as one operation; returns such."""
    return _broadcast("grouped_broadcast", tensors, root_rank, process_set, name)


def _broadcast(
    what: str,
    tree: Any,
    root_rank: int,
    process_set: runtime.ProcessSet,
    name: str | None,
) -> Any:
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


def _transpose(cts: list[Any], avals: list[Any], params: dict[str, Any]) -> list[Any]:
    """``y_s = x_root`` for all s, so ``ct_x_r = [r = root] Σ_s ct_y_s``.

    Which rank this is, is asked while the program runs: after an elastic restart a
    compiled program may serve another rank.
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
