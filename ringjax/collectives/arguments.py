"""Checks and converts the arguments of all collectives, before any data are sent.

The module converts trees to arrays and back, and checks dtypes, reduce ops, factors,
roots and splits. Errors name the function, the argument and the value. In this module,
`what` is the name of the collective's function, for errors.
"""

from __future__ import annotations

import functools
import numbers
import operator
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ringjax import _native
from ringjax.compression import WireDtype
from ringjax.eager import dtypes, lane
from ringjax.ops import ReduceOp
from ringjax.world.process_set import ProcessSet
from ringjax.xla import jax_private

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from ringjax.xla.jax_types import Traced

P = ParamSpec("P")
T = TypeVar("T")


class FlatArguments(NamedTuple):
    """The leaves of a tree, converted to arrays that can be sent.

    Attributes:
        names: the path of each array in the tree, for errors.
        rebuild: makes a tree of the same structure from the results.
    """

    arrays: list[Traced]
    names: tuple[str, ...]
    rebuild: Callable[[Sequence[Traced]], PyTree]


def flatten(
    what: str,
    tree: PyTree,
    *,
    elementwise: bool = False,
    moves: bool = False,
    whole: bool = False,
) -> FlatArguments:
    """Converts the leaves of `tree` to arrays of dtypes that the native core supports.

    Args:
        elementwise: True if results have the shapes of the tensors. Leaves of dtype
            float0 (gradients of integers, which have no value) are then not sent.
        moves: True if the collective does no arithmetic. Then keys of jax.random and
            dtypes without arithmetic in the native core can be sent, see `to_sendable`.
        whole: True if a result is the whole tensor of one rank. Then sparse arrays can
            be sent.
    """
    if not whole:
        _refuse_sparse(what, tree)
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in pairs]
    kept = [i for i, x in enumerate(leaves) if not (elementwise and is_float0(x))]
    names = tuple(
        jax.tree_util.keystr(pairs[i][0], simple=True, separator="/") for i in kept
    )
    restore: dict[int, Callable[[Traced], Traced]] = {}
    for i in kept if moves else ():
        if getattr(leaves[i], "dtype", None) is not None:
            found = to_sendable(leaves[i], rows=not elementwise)
            if found is not None:
                leaves[i], restore[i] = found
    arrays = [_array(what, leaves[i], n) for i, n in zip(kept, names, strict=True)]

    def rebuild(out: Sequence[Traced]) -> PyTree:
        for i, value in zip(kept, out, strict=True):
            leaves[i] = restore[i](value) if i in restore else value
        return jax.tree.unflatten(treedef, leaves)

    return FlatArguments(arrays, names, rebuild)


def to_sendable(
    array: Traced, *, rows: bool = False
) -> tuple[Traced, Callable[[Traced], Traced]] | None:
    """Converts an array of a dtype that the native core does not support.

    Floats of 8 or fewer bits are sent as bfloat16, which represents all their values
    and has derivatives. A key of jax.random is sent as its data.
    If `rows` is true, a key without dimensions becomes one row.

    Returns:
        An array with the values of `array`, and a function that converts back. Returns
        None if the native core supports the dtype, or if no supported dtype can
        represent all values.
    """
    dtype = array.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        impl = jax.random.key_impl(array)
        keys = array.reshape(1) if rows and array.ndim == 0 else array
        return jax.random.key_data(keys), functools.partial(
            jax.random.wrap_key_data, impl=impl
        )
    if dtype.name in dtypes.NUMBERS:
        return None
    if jnp.issubdtype(dtype, jnp.integer):
        sent: Any = jnp.int8
    # In bfloat16 the least value of float8_e8m0fnu is denormal, so send the bits.
    elif dtype.name == "float8_e8m0fnu":
        return jax.lax.bitcast_convert_type(array, jnp.uint8), (
            lambda out: jax.lax.bitcast_convert_type(out, dtype)
        )
    elif jnp.issubdtype(dtype, jnp.floating):
        sent = jnp.bfloat16
    else:
        return None
    return jnp.asarray(array).astype(sent), lambda out: out.astype(dtype)


def is_float0(leaf: object) -> bool:
    """Returns True if `leaf` is the gradient of an integer, which has no value."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def _refuse_sparse(what: str, tree: PyTree) -> None:
    """Refuses sparse arrays, because adding indices of several ranks has no meaning."""
    sparse = sys.modules.get("jax.experimental.sparse")
    # A program that has not imported jax.experimental.sparse has no sparse arrays.
    if sparse is None:
        return

    def is_sparse(x: object) -> bool:
        return isinstance(x, sparse.JAXSparse)

    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sparse):
        if is_sparse(leaf):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(
                f"ringjax.{what}: `tensor`{' ' + repr(name) if name else ''} is a "
                f"{type(leaf).__name__} of shape {leaf.shape}, whose indices are no "
                "values; send x.todense(), or the values x.data alone if all ranks "
                "have the same indices, or gather the data and the indices of all "
                "ranks by ringjax.allgather and make a sparse array of both"
            )


def _array(what: str, leaf: Any, name: str) -> Traced:
    label = f"`tensor` {name!r}" if name else "`tensor`"
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "iu":
        _check_truncation(what, leaf, label)
    try:
        array = jnp.asarray(leaf)
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"ringjax.{what}: {label} is a {type(leaf).__name__}, expected an array, a "
            f"number or a tree of them ({e})"
        ) from None
    if array.dtype.name not in dtypes.NUMBERS:
        hint = (
            "; send jax.random.key_data(key)"
            if jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
            else ""
        )
        raise TypeError(
            f"ringjax.{what}: {label} has dtype {array.dtype.name}, expected one of "
            f"{', '.join(dtypes.NUMBERS)}{hint}"
        )
    return array


def _check_truncation(what: str, leaf: Any, label: str) -> None:
    """Refuses 64-bit integers that do not fit into 32 bits if JAX has only 32 bits.

    JAX would silently keep only the lower half of each integer.
    """
    narrow = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if narrow == leaf.dtype or not leaf.size:
        return
    least, most = leaf.min(), leaf.max()
    if least < np.iinfo(narrow).min or most > np.iinfo(narrow).max:
        raise ValueError(
            f"ringjax.{what}: {label} is {leaf.dtype.name} with values from {least} to "
            f"{most}, and JAX keeps {narrow.name} of it; set jax_enable_x64, or use "
            "ringjax.eager, which sends 64 bits"
        )


def outside_mesh(
    call: Callable[Concatenate[str, PyTree, P], T],
) -> Callable[Concatenate[str, PyTree, P], T]:
    """Decorates an operation that changes shapes, so that it runs outside of a mesh.

    Under `jax.set_mesh`, JAX would put a number or a numpy array on all devices of the
    mesh, and an operation that changes shapes cannot run over several devices.
    """

    @functools.wraps(call)
    def without_mesh(
        what: str, tree: PyTree, /, *rest: P.args, **options: P.kwargs
    ) -> T:
        leaves = jax.tree.leaves(tree)
        own = all(jax_private.device_count(leaf) == 1 for leaf in leaves)
        if not own or not jax_private.in_mesh() or not jax_private.is_eager(leaves):
            return call(what, tree, *rest, **options)
        with jax.set_mesh(None):
            return call(what, tree, *rest, **options)

    return without_mesh


def require_rows(
    what: str, leaves: FlatArguments, *, scalars: bool = False
) -> FlatArguments:
    """Refuses 0-d arrays, or converts 0-d arrays to one row if `scalars` is True."""
    for array, name in zip(leaves.arrays, leaves.names, strict=True):
        if array.ndim == 0 and not scalars:
            raise ValueError(
                f"ringjax.{what}: `tensor`{' ' + repr(name) if name else ''} has "
                "shape (), expected an array with rows to distribute (dimension 0)"
            )
    return leaves._replace(
        arrays=[a if a.ndim else a.reshape(1) for a in leaves.arrays]
    )


def reduce_op(
    what: str, op: Any, arrays: Sequence[Traced], *, adasum_ranks: int = 0
) -> ReduceOp:
    """Converts `op` to a `ReduceOp`, and checks that it suits the dtypes of `arrays`.

    `adasum_ranks` is the number of ranks, or 0 if the function does not allow Adasum.
    """
    try:
        if isinstance(op, bool):
            raise TypeError
        chosen = ReduceOp(operator.index(op))
    except (TypeError, ValueError):
        raise ValueError(
            f"ringjax.{what}: `op` is {op!r}, expected ringjax.Average, Sum, Min, Max, "
            "Product or Adasum"
        ) from None
    if chosen is ReduceOp.Adasum:
        _check_adasum(what, arrays, adasum_ranks)
    for array in arrays:
        if chosen is ReduceOp.Average and array.dtype == bool:
            raise TypeError(
                f"ringjax.{what}: op=Average is not defined for `tensor` of dtype "
                "bool; use Sum (or) or Min (and), or cast it to a number"
            )
        if chosen in (ReduceOp.Min, ReduceOp.Max) and jnp.iscomplexobj(array):
            raise TypeError(
                f"ringjax.{what}: op={chosen.name} is not defined for `tensor` of "
                f"dtype {array.dtype.name}: complex numbers have no order"
            )
    return chosen


def _check_adasum(what: str, arrays: Sequence[Traced], ranks: int) -> None:
    if ranks == 0:
        raise ValueError(
            f"ringjax.{what}: op=Adasum is for allreduce, grouped_allreduce and "
            "allreduce_grads only"
        )
    if ranks & (ranks - 1):
        raise ValueError(
            f"ringjax.{what}: op=Adasum needs a power of two of ranks, this process "
            f"set has {ranks}"
        )
    for array in arrays:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"ringjax.{what}: op=Adasum is not defined for `tensor` of dtype "
                f"{array.dtype.name}, expected float16, bfloat16, float32 or float64"
            )


def factor(what: str, argument: str, value: Any, arrays: Sequence[Traced]) -> float:
    """Converts a scaling factor, which must be known while tracing, to float."""
    concrete = isinstance(value, numbers.Real | np.number) or (
        getattr(value, "ndim", None) == 0 and not isinstance(value, jax.core.Tracer)
    )
    if not concrete or isinstance(value, bool):
        traced = isinstance(value, jax.core.Tracer)
        hint = "; multiply the tensor by it instead" if traced else ""
        raise TypeError(
            f"ringjax.{what}: `{argument}` must be a number that is known while "
            f"tracing, got {value!r}{hint}"
        )
    number = float(value)
    if number != 1.0 and any(a.dtype == bool for a in arrays):
        raise ValueError(
            f"ringjax.{what}: `{argument}` is {number}, but a `tensor` has dtype bool, "
            "which cannot be scaled"
        )
    return number


def wire_dtype(what: str, compression: WireDtype, op: int) -> int:
    """Returns the native core's code of the wire dtype, or -1 without compression."""
    if not isinstance(compression, WireDtype):
        raise TypeError(
            f"ringjax.{what}: `compression` is {compression!r}, expected "
            "ringjax.Compression.none, fp16 or bf16"
        )
    if compression.wire is None:
        return -1
    if op == ReduceOp.Adasum:
        raise ValueError(
            f"ringjax.{what}: `compression` is not supported with op=Adasum; cast the "
            "tensors instead"
        )
    return _native.DTYPES[compression.wire]


def reduction(
    what: str,
    leaves: FlatArguments,
    op: object,
    prescale: object,
    postscale: object,
    *,
    compression: WireDtype,
    name: str | None,
    adasum_ranks: int = 0,
) -> dict[str, Any]:
    """Checks the arguments that all reductions have, and returns them as parameters."""
    chosen = reduce_op(what, op, leaves.arrays, adasum_ranks=adasum_ranks)
    return {
        "reduce_op": int(chosen),
        "prescale": factor(what, "prescale_factor", prescale, leaves.arrays),
        "postscale": factor(what, "postscale_factor", postscale, leaves.arrays),
        "wire": wire_dtype(what, compression, chosen),
        "name": name or "",
        "names": leaves.names,
    }


def root_in_set(what: str, root_rank: object, process_set: ProcessSet) -> int:
    """Converts the world rank `root_rank` to the rank within the process set."""
    if isinstance(root_rank, jax.core.Tracer):
        raise TypeError(
            f"ringjax.{what}: `root_rank` must be known while tracing, got {root_rank}"
        )
    return lane.root_in_set(what, root_rank, process_set)


def splits(what: str, argument: str, value: Any, size: int) -> tuple[int, ...]:
    """Checks splits: `size` integers from 0 that are known while tracing."""
    try:
        if any(isinstance(v, jax.core.Tracer) for v in jax.tree.leaves(value)):
            raise TypeError("it is traced; pass a tuple or a numpy array")
        given = np.asarray(value)
        if given.dtype.kind not in "iu" and given.size:
            raise TypeError(f"its dtype is {given.dtype}")
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"ringjax.{what}: `{argument}` must be integers known while tracing: {e}"
        ) from None
    rows = tuple(int(n) for n in given.reshape(-1))
    if given.ndim != 1 or len(rows) != size or any(n < 0 for n in rows):
        raise ValueError(
            f"ringjax.{what}: `{argument}` is {value!r}, expected {size} non-negative "
            "row counts, one for each rank"
        )
    return rows
