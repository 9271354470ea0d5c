"""The state of a training by pieces, and checks of all that a program passes to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ringjax import runtime
from ringjax.optim import AllreduceState
from ringjax.xla import jax_private

NAME = "ringjax.pieces.step"
KEEP_OUT = (
    "keep it out of the tree: nnx.split, equinox.partition, or a constant in `loss_of`"
)
AS_FLOAT = "return its mean over the piece as a float"


class Training(NamedTuple):
    """Everything that the next step depends on: one tree of arrays.

    A checkpoint must hold the whole tree. Equal trees give equal bits on any number of
    ranks.

    Attributes:
        params: the parameters.
        opt_state: the optimizer's state.
        stats: what `loss_of` carries from step to step besides the parameters, such as
            running averages of batch normalisation; None without.
        exponents: int32[leaves], the scale of the exact sums of each tensor.
        number: int32, the number of finished steps.
    """

    params: Any
    opt_state: Any
    stats: Any
    exponents: jax.Array
    number: jax.Array


def paths(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of a tree with their names."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/") or "value", leaf)
        for path, leaf in found
    ]


def described(leaf: Any) -> str:
    """Returns dtype and shape of an array, or the type of anything else."""
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype.name}{list(leaf.shape)}"


def check_floats(what: str, tree: Any, remedy: str) -> None:
    """Raises a TypeError if a leaf is no array of floats. `remedy` says what to do."""
    for name, leaf in paths(tree):
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"{NAME}: {what} {name!r} is {described(leaf)}, expected an array of "
                f"floats; {remedy}"
            )


def check_groups() -> None:
    """Refuses a job in which several processes form a group."""
    if (size := runtime.group_size()) > 1:
        raise ValueError(
            f"{NAME}: groups of {size} processes share a model here, but a piece must "
            "be computed by one process; start the job without --group-size"
        )


def check_not_traced() -> None:
    """Refuses a call inside of jit, vmap, grad or scan."""
    if jax_private.is_tracing():
        raise TypeError(
            f"{NAME}: called inside of jit, vmap, grad or a loop of JAX, but the step "
            "is a loop of the host: call it outside of compiled functions. For several "
            "models, use jax.vmap inside of `loss_of`"
        )


def check_optimizer(opt_state: Any) -> None:
    """Refuses an optimizer that contains `ringjax.allreduce_grads`."""
    parts = jax.tree.leaves(
        opt_state, is_leaf=lambda part: isinstance(part, AllreduceState)
    )
    if any(isinstance(part, AllreduceState) for part in parts):
        raise ValueError(
            f"{NAME}: `tx` contains ringjax.allreduce_grads, but the step sums the "
            "gradients of all pieces itself; remove allreduce_grads from the chain"
        )


def check_loss(loss: Any) -> None:
    """Raises an error if the result of `loss_of` is not one floating-point number."""
    if not hasattr(loss, "dtype") or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"{NAME}: `loss_of` returned {described(loss)} as the loss, expected one "
            "floating-point number; return (loss, aux) with has_aux=True"
        )
    if loss.shape:
        raise ValueError(
            f"{NAME}: `loss_of` returned {described(loss)} as the loss, expected one "
            "number: take the mean over the piece"
        )


def pair(result: Any) -> tuple[Any, Any]:
    """Returns the two values that `loss_of` must return with aux or stats."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"{NAME}: `loss_of` returned {described(result)}, expected pairs: (loss, "
            "aux) with has_aux=True, (loss, stats) with stats, (loss, (stats, aux)) "
            "with both"
        )
    return result
