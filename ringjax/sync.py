"""Values that must be alike or be known on all ranks: parameters, objects, metrics.

Built from the stand-alone collectives, on their lane; how objects become bytes is in
`control/objects.py`. Not for gradients. All functions but `broadcast_parameters` run
outside of jit only, and all must be called by every rank of the process set.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ringjax import errors, runtime
from ringjax.collectives import allgather, arguments, broadcast
from ringjax.control import object_messages
from ringjax.control.objects import comparison_text, is_named_callable
from ringjax.eager import dtypes
from ringjax.ops import ReduceOp
from ringjax.xla import jax_private, primitive

_global = runtime.global_process_set
_Function = TypeVar("_Function", bound=Callable[..., Any])
_REDUCTIONS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.Sum: np.sum,
    ReduceOp.Min: np.min,
    ReduceOp.Max: np.max,
    ReduceOp.Product: np.prod,
}


def _transferring(function: _Function) -> _Function:
    """Lifts jax's transfer guard: such a function is for moving values about."""
    guarded: _Function = jax.transfer_guard("allow")(function)
    return guarded


@_transferring
def broadcast_parameters(
    tree: Any,
    root_rank: int = 0,
    *,
    process_set: runtime.ProcessSet = _global,
    name: str = "parameters",
) -> Any:
    """Returns the root's values of `tree` on every rank, in one operation.

    Before it, the ranks compare names, shapes and dtypes of all leaves by a short hash.

    Args:
      tree: parameters, an optimizer state, a flax TrainState, an nnx State, an equinox
        model, any tree of jax or numpy arrays, jax.random keys and Python numbers.
        Leaves keep their type and dtype, 64-bit numbers are exact also without
        jax_enable_x64. Other leaves, such as functions and strings, stay as they are;
        they must look alike on all ranks. Inside jit every number is a jax array, and
        ranks compare only sizes and dtypes.
      root_rank: the sender's rank in the world.
      process_set: the ranks that take part; this rank must be one of them. In a job of
        groups (ringrun --group-size) all of them means: each rank gets what the one at
        its place in the root's group has, shards included.
      name: stands for the tree in error messages.

    Returns:
      A new tree of the same structure.

    Raises:
      NotInitialized: before ringjax.init().
      TypeError, ValueError: a bad argument, or an array that cannot be sent.
      Mismatch: the trees differ between ranks; the text names the leaf. On every rank.
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
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in pairs]
    if len(pairs) == 1 and not pairs[0][0] and not _is_number(tree):
        raise TypeError(
            f"ringjax.{what}: `tree` is a {type(tree).__name__}, expected a tree of "
            "arrays; is its class registered with JAX?"
        )
    eager = jax_private.is_eager(
        [leaf for _, leaf in pairs if isinstance(leaf, jax.Array)]
    )
    packed = [
        _pack(what, path, leaf, eager)
        for path, (_, leaf) in zip(paths, pairs, strict=True)
    ]
    operands = {
        path: leaf.array
        for path, leaf in zip(paths, packed, strict=True)
        if leaf.array is not None
    }
    if not eager:
        sent = broadcast(operands, root_rank, process_set=process_set, name=name)
    else:
        kinds = {path: leaf.kind for path, leaf in zip(paths, packed, strict=True)}
        _compare(what, {"`root_rank`": str(root_rank), **kinds}, process_set)
        with errors.translated():
            sent = jax.block_until_ready(
                broadcast(operands, root_rank, process_set=process_set, name=name)
            )
    values = [
        leaf.unpack(sent.get(path)) for path, leaf in zip(paths, packed, strict=True)
    ]
    return jax.tree.unflatten(treedef, values)


def _between_groups(
    process_set: runtime.ProcessSet, root_rank: int
) -> tuple[runtime.ProcessSet, int]:
    """Of all ranks, in a job of groups: those at this rank's place, and their root."""
    chosen, size = runtime.between_groups(process_set), runtime.group_size()
    if chosen is process_set or not isinstance(root_rank, int):
        return chosen, root_rank
    return chosen, root_rank - root_rank % size + runtime.group_rank()


@_transferring
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: runtime.ProcessSet = _global,
    *,
    allow_pickle: bool = False,
) -> Any:
    """Returns the root's object on every rank.

    Args:
      obj: None, numbers, strings, bytes, lists, tuples, dicts, sets, numpy and jax
        arrays, nested as you like. Only the root's is looked at. jax arrays arrive as
        numpy arrays.
      root_rank: the sender's rank in the world.
      name: stands for the object in error messages.
      process_set: the ranks that take part; this rank must be one of them.
      allow_pickle: on all ranks: send what else it is as a pickle. Reading a pickle
        runs code that the sender chose.

    Returns:
      A copy of the object, on the root too.

    Raises:
      NotInitialized, PeerLost: as everywhere.
      TypeError: the root's object cannot be sent; raised on every rank.
      ValueError: the root has sent a pickle, and this rank does not allow that.

    Example:
      >>> import ringjax
      >>> ringjax.init()
      >>> config = ringjax.broadcast_object({"lr": 1e-3, "layers": [64, 64]})
    """
    what = "broadcast_object"
    communicator = _eager_communicator(what, process_set)
    root = arguments.root_in_set(what, root_rank, process_set)

    def move(array: Any, _: str) -> Any:
        return primitive.read_result(
            broadcast(array, root_rank, process_set=process_set, name=name or what)
        )

    with errors.translated():
        return object_messages.broadcast(
            *(what, obj, move, object_messages.padded_size),
            is_root=communicator.rank == root,
            root_rank=root_rank,
            secret=runtime.current(what).secret,
            allow_pickle=allow_pickle,
        )


@_transferring
def allgather_object(
    obj: Any,
    name: str | None = None,
    process_set: runtime.ProcessSet = _global,
    *,
    allow_pickle: bool = False,
) -> list[Any]:
    """Returns the objects of all ranks, in the order of the ranks.

    Args, Raises: as `broadcast_object`.

    Example:
      >>> import ringjax
      >>> ringjax.init()
      >>> ringjax.allgather_object("ready") == ["ready"] * ringjax.size()
      True
    """
    what = "allgather_object"
    _eager_communicator(what, process_set)

    def move(array: Any, _: str) -> Any:
        return primitive.read_result(
            allgather(array, process_set=process_set, name=name or what)
        )

    with errors.translated():
        return object_messages.allgather(
            *(what, obj, move, object_messages.padded_size),
            ranks=process_set.ranks,
            secret=runtime.current(what).secret,
            allow_pickle=allow_pickle,
        )


@_transferring
def allreduce_metrics(
    metrics: Any,
    op: int = ReduceOp.Average,
    *,
    weight: float | None = None,
    process_set: runtime.ProcessSet = _global,
    name: str | None = None,
) -> Any:
    """Reduces a tree of numbers over all ranks, in float64 whatever jax is set to.

    Every rank gets every rank's numbers and adds them up in the order of the ranks, so
    the results are exact to float64 and alike bit for bit. Meant for a few numbers now
    and then; for many, use `allreduce`.

    Args:
      metrics: a tree of Python numbers and real arrays, with the same names and shapes
        on all ranks.
      op: Average, Sum, Min, Max or Product.
      weight: with Average: how much this rank's numbers count, such as the number of
        its samples. The result is ``Σ weight·x / Σ weight``; NaN if all weights are 0.
      process_set: the ranks that take part; this rank must be one of them.
      name: stands for the metrics in error messages.

    Returns:
      The same tree: numpy arrays for arrays, Python numbers for numbers and 0-d arrays
      (floats; ints if all ranks gave integers and it is not an Average).

    Raises:
      NotInitialized, PeerLost: as everywhere.
      TypeError, ValueError: a bad argument.
      Mismatch: names or shapes differ between ranks. On every rank.

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
    pairs, treedef = jax.tree_util.tree_flatten_with_path(metrics)
    paths = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in pairs]
    values = [_number(what, p, leaf) for p, (_, leaf) in zip(paths, pairs, strict=True)]
    shapes = {p: str(list(v.shape)) for p, v in zip(paths, values, strict=True)}
    _compare(what, {"`op`": chosen.name, **shapes}, process_set)
    everyone = allgather_object([own, *values], name or what, process_set)
    weights = np.array([numbers[0] for numbers in everyone])
    columns = zip(*(numbers[1:] for numbers in everyone), strict=True)
    reduced = [_reduce(chosen, column, weights) for column in columns]
    return jax.tree.unflatten(treedef, reduced)


# -- leaves of parameters --------------------------------------------------------------


class _Packed(NamedTuple):
    """A leaf as an array that can be sent, and the way back."""

    array: Any  # None: every rank keeps its own
    kind: str  # what the ranks compare
    unpack: Callable[[Any], Any]


def _is_number(leaf: Any) -> bool:
    arrays = np.ndarray | np.generic | jax.Array
    return isinstance(leaf, arrays | bool | int | float | complex)


def _pack(what: str, path: str, leaf: Any, eager: bool) -> _Packed:
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        return _pack_array(what, path, leaf, eager)
    for kind, dtype in ((bool, bool), (int, int), (float, float), (complex, complex)):
        if isinstance(leaf, kind):
            try:
                number = np.array(leaf, dtype)
            except OverflowError:
                raise ValueError(
                    f"ringjax.{what}: the leaf {path!r} is an int of more than 64 bits"
                ) from None
            if not eager:
                return _Packed(jnp.asarray(leaf), "", lambda out: out)
            raw = _pack_bytes(number, lambda array: type(leaf)(array.item()))
            return raw._replace(kind=f"a Python {type(leaf).__name__}")
    if not _can_stay(leaf):
        raise TypeError(
            f"ringjax.{what}: the leaf {path!r} is a {type(leaf).__name__}, expected "
            "an array of jax or numpy, a key of jax.random, a number, or what ranks "
            "can compare"
        )
    return _Packed(None, comparison_text(leaf), lambda _: leaf)


def _can_stay(leaf: Any) -> bool:
    """Whether it has no numbers to send, and looks like what it is."""
    if is_named_callable(leaf):
        return True
    holds = ("__array__", "__dlpack__", "dtype", "state_dict")
    shown = repr(leaf) != object.__repr__(leaf)
    return shown and not any(hasattr(leaf, name) for name in holds)


def _pack_array(what: str, path: str, leaf: Any, eager: bool) -> _Packed:
    dtype, dims = leaf.dtype, ",".join(map(str, leaf.shape))
    kind = f"{dtype.name}[{dims}]"
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
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
    # By dtype alone, so that a rank with numpy arrays understands one with jax arrays.
    known = dtype.name in dtypes.NUMBERS  # not by kind: float8_e5m2 is an "f", too
    if known and jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype:
        return _Packed(leaf, kind, as_before)
    return _pack_bytes(np.asarray(leaf), as_before)._replace(kind=kind)


def _pack_traced(array: Any, kind: str) -> _Packed:
    """Types that are not sent travel in one that holds all their values."""
    sent, restore = arguments.to_sendable(array) or (array, lambda out: out)
    return _Packed(sent, kind, restore)


def _restorer(leaf: Any) -> Callable[[Any], Any]:
    if isinstance(leaf, jax.Array):
        return jnp.asarray
    if isinstance(leaf, np.generic):
        return lambda out: np.asarray(out)[()]
    return lambda out: np.array(out, leaf.dtype)  # a copy that can be written to


def _pack_bytes(array: np.ndarray[Any, Any], restore: Callable[[Any], Any]) -> _Packed:
    raw = array.tobytes()
    return _Packed(
        np.ndarray((len(raw),), np.uint8, buffer=raw),
        "",
        lambda out: restore(
            np.ndarray(array.shape, array.dtype, buffer=np.asarray(out).tobytes())
        ),
    )


def _compare(what: str, lines: dict[str, str], process_set: runtime.ProcessSet) -> None:
    """Raises Mismatch on every rank if `lines` are not the same on all."""
    text = json.dumps(list(lines.items()))
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    with errors.translated():
        rows = allgather(
            digest[None], process_set=process_set, name=f"{what} (structure)"
        )
        rows = primitive.read_result(rows)
    if (rows == digest).all():
        return
    everyone = allgather_object(lines, f"{what} (structure)", process_set)
    members, first = process_set.ranks, everyone[0]
    for rank, other in zip(members, everyone, strict=True):
        for key in [*first, *other]:
            one, two = (side.get(key, "nothing") for side in (first, other))
            if one != two:
                label = key if key.startswith("`") else repr(key)
                who = f"rank {members[0]} has {one}, rank {rank} has {two}"
                raise errors.Mismatch(f"ringjax.{what}: {label}: {who}")
    raise errors.Mismatch(f"ringjax.{what}: the leaves are in another order on a rank")


# -- metrics ---------------------------------------------------------------------------


def _number(what: str, path: str, leaf: Any) -> np.ndarray[Any, Any]:
    """The leaf as float64, or as int64 or Python's int if it is an integer."""
    try:
        array = np.asarray(leaf)
        if array.dtype.name in ("bfloat16", "float16") or array.dtype.kind == "f":
            return array.astype(np.float64)
        if array.dtype.kind in "bi" or array.dtype.kind == "u":
            return array.astype(np.uint64 if array.dtype == np.uint64 else np.int64)
    except (TypeError, ValueError):
        pass
    raise TypeError(
        f"ringjax.{what}: the metric {path!r} is a {type(leaf).__name__}, expected a "
        "real number or array"
    )


def _reduce(op: ReduceOp, column: Sequence[Any], weights: np.ndarray[Any, Any]) -> Any:
    stack = np.stack(column)
    if op is ReduceOp.Average:
        with np.errstate(invalid="ignore"):
            weighted = weights.reshape(-1, *[1] * (stack.ndim - 1)) * stack
            out = np.asarray(weighted.sum(axis=0) / weights.sum())
        return out if out.ndim else out.item()
    exact = stack.astype(object) if stack.dtype.kind in "iu" else stack
    out = np.asarray(_REDUCTIONS[op](exact, axis=0))
    return out.astype(stack.dtype) if out.ndim else out.item()


# -- the world -------------------------------------------------------------------------


def _eager_communicator(what: str, process_set: runtime.ProcessSet) -> Any:
    communicator = runtime.communicator(process_set, what)
    if not jax_private.is_eager(()):
        raise TypeError(f"ringjax.{what} runs outside of jit only, and this is inside")
    return communicator
