"""Synchronizes values between ranks: parameters, Python objects and metrics.

The functions use the collectives of `ringjax.collectives`; `control/objects.py` encodes
objects as bytes. All ranks of the process set must call a function together. Only
`broadcast_parameters` may be called inside of jit. Gradients have their own functions,
in `ringjax.optim`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ringjax import _native, errors, runtime
from ringjax.collectives import allgather, arguments, broadcast
from ringjax.control import object_messages
from ringjax.control.objects import comparison_text, is_named_callable
from ringjax.eager import dtypes
from ringjax.ops import ReduceOp
from ringjax.xla import jax_private, primitive

_global = runtime.global_process_set
_Array = np.ndarray | np.generic | jax.Array
_Tree = TypeVar("_Tree")
_Function = TypeVar("_Function", bound=Callable[..., object])
_REDUCTIONS: dict[ReduceOp, Callable[..., object]] = {
    ReduceOp.Sum: np.sum,
    ReduceOp.Min: np.min,
    ReduceOp.Max: np.max,
    ReduceOp.Product: np.prod,
}


def _allows_transfers(function: _Function) -> _Function:
    """Makes JAX's transfer guard allow the transfers that `function` needs."""
    guarded: _Function = jax.transfer_guard("allow")(function)
    return guarded


@_allows_transfers
def broadcast_parameters(
    tree: _Tree,
    root_rank: int = 0,
    *,
    process_set: runtime.ProcessSet = _global,
    name: str = "parameters",
) -> _Tree:
    """Returns the root's values of `tree` on every rank, in one operation.

    First, the ranks compare a hash of the names, shapes and dtypes of all leaves.

    Args:
      tree: any tree of JAX or NumPy arrays, jax.random keys and Python numbers, such as
        parameters, an optimizer state, a flax TrainState, an nnx State or an equinox
        model. These leaves keep their type and dtype, and 64-bit numbers are exact even
        without jax_enable_x64. Other leaves, such as functions and strings, are not
        sent and must be equal on all ranks. Inside jit, every number becomes a JAX
        array, and the ranks compare only sizes and dtypes.
      root_rank: the rank of the sender in the world.
      process_set: the ranks that take part; this rank must be one of them. In a job of
        groups (ringrun --group-size), the default set means that each rank gets the
        values, including shards, of the rank with its index in the root's group.
      name: names the tree in errors.

    Returns:
      A new tree of the same structure.

    Raises:
      NotInitialized: `ringjax.init()` has not been called.
      TypeError, ValueError: an argument is wrong, or an array cannot be sent.
      Mismatch: the trees differ between ranks. All ranks raise it, and the text names
        the leaf.
      PeerLost: a rank is gone.

    Example:
      >>> import jax.numpy as jnp, ringjax
      >>> ringjax.init()
      >>> params = ringjax.broadcast_parameters({"w": jnp.ones(3), "step": 0})
    """
    what = "broadcast_parameters"
    process_set, root_rank = _between_groups(process_set, root_rank)
    runtime.communicator(process_set, what)
    arguments.root_in_set(what, root_rank, process_set)
    leaves, treedef = _flatten(tree)
    if leaves and jax.tree_util.treedef_is_leaf(treedef) and not _is_number(tree):
        raise TypeError(
            f"ringjax.{what}: `tree` is a {type(tree).__name__}, expected a tree of "
            "arrays; is its class registered with JAX?"
        )
    eager = jax_private.is_eager(
        [leaf for leaf in leaves.values() if isinstance(leaf, jax.Array)]
    )
    packed = {path: _pack(what, path, leaf, eager) for path, leaf in leaves.items()}
    operands = {p: leaf.array for p, leaf in packed.items() if leaf.array is not None}
    if not eager:
        sent = broadcast(operands, root_rank, process_set=process_set, name=name)
    else:
        kinds = {path: leaf.kind for path, leaf in packed.items()}
        _compare(what, {"`root_rank`": str(root_rank), **kinds}, process_set)
        with errors.translated():
            sent = jax.block_until_ready(
                broadcast(operands, root_rank, process_set=process_set, name=name)
            )
    values = [leaf.unpack(sent.get(path)) for path, leaf in packed.items()]
    result: _Tree = jax.tree.unflatten(treedef, values)
    return result


def _flatten(tree: object) -> tuple[dict[str, Any], Any]:
    """Returns the leaves of a tree by their paths, and the structure of the tree."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    keystr = jax.tree_util.keystr
    paths = [keystr(path, simple=True, separator="/") for path, _ in pairs]
    if len(set(paths)) < len(paths):  # {"a/b": 1, "a": {"b": 2}} has "a/b" twice
        paths = [keystr(path) for path, _ in pairs]
    return {p: leaf for p, (_, leaf) in zip(paths, pairs, strict=True)}, treedef


def _between_groups(
    process_set: runtime.ProcessSet, root_rank: int
) -> tuple[runtime.ProcessSet, int]:
    """Replaces the default process set, and its root, in a job of process groups.

    The new set is this rank's replica set, and the new root is the rank of that set
    that is in the root's group.
    """
    chosen, size = runtime.between_groups(process_set), runtime.group_size()
    if chosen is process_set or not isinstance(root_rank, int):
        return chosen, root_rank
    return chosen, root_rank - root_rank % size + runtime.group_rank()


@_allows_transfers
def broadcast_object(
    obj: object,
    root_rank: int = 0,
    name: str | None = None,
    process_set: runtime.ProcessSet = _global,
    *,
    allow_pickle: bool = False,
) -> Any:
    """Returns the root's object on every rank.

    Args:
      obj: None, numbers, strings, bytes, lists, tuples, dicts, sets, and NumPy and JAX
        arrays, nested to any depth. Only the root's object is used. JAX arrays arrive
        as NumPy arrays.
      root_rank: the rank of the sender in the world.
      name: names the object in errors.
      process_set: the ranks that take part; this rank must be one of them.
      allow_pickle: whether objects of other types may be sent as a pickle; equal on all
        ranks. Reading a pickle runs code that the sender has chosen.

    Returns:
      A copy of the object, also on the root.

    Raises:
      NotInitialized: `ringjax.init()` has not been called.
      PeerLost: a rank is gone.
      TypeError: the root's object cannot be sent. All ranks raise it.
      ValueError: the root has sent a pickle, and this rank does not allow pickles.

    Example:
      >>> import ringjax
      >>> ringjax.init()
      >>> config = ringjax.broadcast_object({"lr": 1e-3, "layers": [64, 64]})
    """
    what = "broadcast_object"
    communicator = _eager_communicator(what, process_set)
    root = arguments.root_in_set(what, root_rank, process_set)

    def move(array: np.ndarray, _: str) -> np.ndarray:
        return primitive.read_result(
            broadcast(array, root_rank, process_set=process_set, name=name or what)
        )

    with errors.translated():
        return object_messages.broadcast(
            what,
            obj,
            move,
            object_messages.padded_size,
            is_root=communicator.rank == root,
            root_rank=root_rank,
            secret=runtime.current(what).secret,
            allow_pickle=allow_pickle,
        )


@_allows_transfers
def allgather_object(
    obj: object,
    name: str | None = None,
    process_set: runtime.ProcessSet = _global,
    *,
    allow_pickle: bool = False,
) -> list[Any]:
    """Returns the objects of all ranks, in the order of the ranks.

    Args:
      obj: see `broadcast_object`.
      name: names the objects in errors.
      process_set: the ranks that take part; this rank must be one of them.
      allow_pickle: see `broadcast_object`.

    Raises:
      NotInitialized, PeerLost, TypeError, ValueError: see `broadcast_object`.

    Example:
      >>> import ringjax
      >>> ringjax.init()
      >>> ringjax.allgather_object("ready") == ["ready"] * ringjax.size()
      True
    """
    what = "allgather_object"
    _eager_communicator(what, process_set)

    def move(array: np.ndarray, _: str) -> np.ndarray:
        return primitive.read_result(
            allgather(array, process_set=process_set, name=name or what)
        )

    with errors.translated():
        return object_messages.allgather(
            what,
            obj,
            move,
            object_messages.padded_size,
            ranks=process_set.ranks,
            secret=runtime.current(what).secret,
            allow_pickle=allow_pickle,
        )


@_allows_transfers
def allreduce_metrics(
    metrics: Any,
    op: int = ReduceOp.Average,
    *,
    weight: float | None = None,
    process_set: runtime.ProcessSet = _global,
    name: str | None = None,
) -> Any:
    """Reduces a tree of numbers over all ranks in float64, even without jax_enable_x64.

    Every rank receives the numbers of all ranks and adds them in the order of the
    ranks, so the results are bitwise equal on all ranks. Use this function for a few
    numbers now and then, and `allreduce` for many numbers.

    Args:
      metrics: a tree of Python numbers and real arrays, with the same names and shapes
        on all ranks.
      op: Average, Sum, Min, Max or Product.
      weight: the weight of this rank's numbers in an Average, such as the number of
        its samples. The result is ``Σ weight·x / Σ weight``; NaN if all weights are 0.
      process_set: the ranks that take part; this rank must be one of them.
      name: names the metrics in errors.

    Returns:
      A tree of the structure of `metrics`: NumPy arrays for arrays, Python numbers for
      numbers and 0-d arrays. The numbers are ints if the metric is an integer on all
      ranks and `op` is not Average, otherwise floats.

    Raises:
      NotInitialized: `ringjax.init()` has not been called.
      PeerLost: a rank is gone.
      TypeError, ValueError: an argument is wrong.
      Mismatch: names or shapes differ between ranks. All ranks raise it.

    Example:
      >>> import ringjax
      >>> ringjax.init()
      >>> ringjax.allreduce_metrics({"loss": 0.5, "accuracy": 1.0}, weight=32)
      {'accuracy': 1.0, 'loss': 0.5}
    """
    what = "allreduce_metrics"
    _eager_communicator(what, process_set)
    chosen = arguments.reduce_op(what, op, [])
    if weight is not None and chosen is not ReduceOp.Average:
        raise ValueError(
            f"ringjax.{what}: `weight` needs op=Average, not {chosen.name}"
        )
    own = 1.0 if weight is None else arguments.factor(what, "weight", weight, [])
    if not 0.0 <= own < float("inf"):
        raise ValueError(f"ringjax.{what}: `weight` is {own}, expected a number from 0")
    leaves, treedef = _flatten(metrics)
    values = {path: _number(what, path, leaf) for path, leaf in leaves.items()}
    shapes = {path: str(list(value.shape)) for path, value in values.items()}
    _compare(what, {"`op`": chosen.name, **shapes}, process_set)
    gathered = allgather_object([own, *values.values()], name or what, process_set)
    weights = np.array([numbers[0] for numbers in gathered])
    columns = zip(*(numbers[1:] for numbers in gathered), strict=True)
    reduced = [_reduce(chosen, column, weights) for column in columns]
    return jax.tree.unflatten(treedef, reduced)


# -- leaves of parameters --------------------------------------------------------------


class _SyncLeaf(NamedTuple):
    """A leaf of a tree of parameters, converted to an array that can be sent."""

    array: _Array | None  # None: the leaf is not sent, and every rank keeps its own
    kind: str  # a text that must be equal on all ranks
    unpack: Callable[[Any], object]  # converts the received array to the leaf's type


def _is_number(leaf: object) -> bool:
    arrays = np.ndarray | np.generic | jax.Array
    return isinstance(leaf, arrays | bool | int | float | complex)


def _pack(what: str, path: str, leaf: object, eager: bool) -> _SyncLeaf:
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        return _pack_array(what, path, leaf, eager)
    for kind in (bool, int, float, complex):
        if isinstance(leaf, kind):
            try:
                number = np.array(leaf, kind)
            except OverflowError:
                raise ValueError(
                    f"ringjax.{what}: the leaf {path!r} is an int of more than 64 bits"
                ) from None
            if not eager:
                return _SyncLeaf(jnp.asarray(leaf), "", lambda out: out)
            raw = _pack_bytes(number, lambda array: type(leaf)(array.item()))
            return raw._replace(kind=f"a Python {type(leaf).__name__}")
    if not _can_stay(leaf):
        raise TypeError(
            f"ringjax.{what}: the leaf {path!r} is a {type(leaf).__name__}, expected "
            "an array of jax or numpy, a key of jax.random, a number, or what ranks "
            "can compare"
        )
    return _SyncLeaf(None, comparison_text(leaf), lambda _: leaf)


def _can_stay(leaf: object) -> bool:
    """Returns whether the leaf is not sent: a function, or an object without arrays."""
    if is_named_callable(leaf):
        return True
    holds = ("__array__", "__dlpack__", "dtype", "state_dict")
    shown = repr(leaf) != object.__repr__(leaf)
    return shown and not any(hasattr(leaf, name) for name in holds)


def _pack_array(what: str, path: str, leaf: _Array, eager: bool) -> _SyncLeaf:
    dtype, dims = leaf.dtype, ",".join(map(str, leaf.shape))
    kind = f"{dtype.name}[{dims}]"
    if isinstance(leaf, jax.Array) and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return _pack_traced(leaf, kind)
    if not eager:
        return _pack_traced(jnp.asarray(leaf), kind)
    if dtype.hasobject:
        raise TypeError(
            f"ringjax.{what}: the leaf {path!r} is an array of Python objects"
        )
    as_before = _restorer(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        leaf = np.asarray(leaf, dtype.newbyteorder("="))
    # Decide by the dtype alone, because the leaf may be a NumPy array on one rank and a
    # JAX array on another. `dtype.kind` is not enough: the kind of float8_e5m2 is "f",
    # too.
    known = dtype.name in dtypes.NUMBERS
    if known and jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype:
        return _SyncLeaf(leaf, kind, as_before)
    return _pack_bytes(np.asarray(leaf), as_before)._replace(kind=kind)


def _pack_traced(array: jax.Array, kind: str) -> _SyncLeaf:
    """Packs a JAX array; casts it to a larger dtype if its own cannot be sent."""
    sent, restore = arguments.to_sendable(array) or (array, lambda out: out)
    return _SyncLeaf(sent, kind, restore)


def _restorer(leaf: _Array) -> Callable[[_Array], _Array]:
    if isinstance(leaf, jax.Array):
        return jnp.asarray
    if isinstance(leaf, np.generic):
        return lambda out: np.asarray(out)[()]
    return lambda out: np.array(out, leaf.dtype)  # a writable copy


def _pack_bytes(
    array: np.ndarray, restore: Callable[[np.ndarray], object]
) -> _SyncLeaf:
    raw = array.tobytes()
    return _SyncLeaf(
        np.ndarray((len(raw),), np.uint8, buffer=raw),
        "",
        lambda out: restore(
            np.ndarray(array.shape, array.dtype, buffer=np.asarray(out).tobytes())
        ),
    )


def _compare(what: str, lines: dict[str, str], process_set: runtime.ProcessSet) -> None:
    """Raises Mismatch on all ranks if `lines` differ between ranks.

    The ranks exchange digests, and the lines only if the digests differ.
    """
    text = json.dumps(list(lines.items()))
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    with errors.translated():
        rows = allgather(
            digest[None], process_set=process_set, name=f"{what} (structure)"
        )
        rows = primitive.read_result(rows)
    if (rows == digest).all():
        return
    all_lines = allgather_object(lines, f"{what} (structure)", process_set)
    members, first = process_set.ranks, all_lines[0]
    for rank, other in zip(members, all_lines, strict=True):
        for key in [*first, *other]:
            one, two = (side.get(key, "nothing") for side in (first, other))
            if one != two:
                label = key if key.startswith("`") else repr(key)
                text = f"rank {members[0]} has {one}, rank {rank} has {two}"
                raise errors.Mismatch(f"ringjax.{what}: {label}: {text}")
    raise errors.Mismatch(f"ringjax.{what}: the leaves are in another order on a rank")


# -- metrics ---------------------------------------------------------------------------


def _number(what: str, path: str, leaf: object) -> np.ndarray:
    """Converts a metric to float64, or to int64 or uint64 if it is an integer."""
    try:
        array = np.asarray(leaf)
        if array.dtype.name == "bfloat16" or array.dtype.kind == "f":
            return array.astype(np.float64)
        if array.dtype.kind in "biu":
            return array.astype(np.uint64 if array.dtype == np.uint64 else np.int64)
    except (TypeError, ValueError):
        pass
    raise TypeError(
        f"ringjax.{what}: the metric {path!r} is a {type(leaf).__name__}, expected a "
        "real number or array"
    )


def _reduce(
    op: ReduceOp, column: Sequence[np.ndarray], weights: np.ndarray
) -> np.ndarray | int | float:
    stack = np.stack(column)
    if op is ReduceOp.Average:
        with np.errstate(invalid="ignore"):
            weighted = weights.reshape(-1, *[1] * (stack.ndim - 1)) * stack
            out = np.asarray(weighted.sum(axis=0) / weights.sum())
        return out if out.ndim else out.item()
    # In an object array, integers are Python's, which do not overflow.
    exact = stack.astype(object) if stack.dtype.kind in "iu" else stack
    out = np.asarray(_REDUCTIONS[op](exact, axis=0))
    return out.astype(stack.dtype) if out.ndim else out.item()


def _eager_communicator(
    what: str, process_set: runtime.ProcessSet
) -> _native.Communicator:
    communicator = runtime.communicator(process_set, what)
    if not jax_private.is_eager(()):
        raise TypeError(f"ringjax.{what} runs outside of jit only, and this is inside")
    return communicator
