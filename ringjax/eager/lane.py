"""Submits named operations to the eager lanes of process sets.

Each rank may submit its operations in another order. Compiled programs use the jit
lane instead. This module uses addresses, dtypes and shapes, but no framework:
`operands.py` and the adapter packages convert arrays.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, SupportsFloat, TypedDict, Unpack

from ringjax import _native, errors, runtime
from ringjax.eager.handle import Finish, Handle
from ringjax.ops import Average, ReduceOp, Sum

# The address, the dtype code (`dtypes.NUMBERS`) and the shape of a C-contiguous tensor.
TensorRef = tuple[int, int, tuple[int, ...]]

COLLECTIVES = _native.COLLECTIVES
_DTYPE_NAMES = {number: name for name, number in _native.DTYPES.items()}
_global = runtime.global_process_set
# Counters of the operations without a name, by process set and operation.
_counters: dict[tuple[int | None, str], Iterator[int]] = {}
runtime.on_init(_counters.clear)
# A rank that joins an elastic job counts from 1, so the other ranks restart at 1, too.
runtime.on_fresh_start(_counters.clear)


class LaneOptions(TypedDict, total=False):
    """Optional properties of an operation.

    Attributes:
        reduce_op: a value of `ringjax.ops.ReduceOp`.
        prescale: multiplies each rank's tensor before the reduction.
        postscale: multiplies the result.
        root: the sender's rank within the process set.
        splits: for alltoall, the rows for each rank, tensor by tensor. If `splits` is
            empty, all parts are equal.
        cuda: True if the addresses are on a CUDA device.
        stream: the CUDA stream on which the tensors are computed.
        waits: True if the caller waits for the operation immediately. The caller's
            thread may then do the work of the lane.
        rooms: for allgather and alltoall, the bytes at each address of `outs`. The
            native core stores a result of another size in its own memory.
    """

    reduce_op: int
    prescale: float
    postscale: float
    root: int
    splits: Sequence[int]
    cuda: bool
    stream: int
    waits: bool
    rooms: Sequence[int]


WAITS: LaneOptions = {"waits": True}


def submit(
    op: str,
    name: str | None,
    ins: Sequence[TensorRef],
    outs: Sequence[int],
    finish: Finish,
    process_set: runtime.ProcessSet = _global,
    *,
    keep: object = None,
    **options: Unpack[LaneOptions],
) -> Handle:
    """Submits an operation, which begins when all ranks of the set have submitted it.

    Args:
        op: a key of `_native.COLLECTIVES`.
        name: equal on all ranks. An operation without a name is named by a counter,
            which is equal on all ranks if all ranks submit their unnamed operations in
            the same order.
        outs: the addresses of the results; empty for barrier, and for an allgather or
            alltoall whose results the native core allocates.
        finish: makes the caller's result when the operation has ended.
        keep: an object that the lane keeps alive until the operation has ended.

    Raises:
        PeerLost: a rank is lost.
        InvalidArgument: the native core refuses the operation, or another operation of
            this name is in progress.
    """
    lane = runtime.lane(process_set, op)
    name = check_name(op, name) or next_name(op, process_set)
    try:
        work = lane.submit(
            COLLECTIVES[op],
            name,
            ins,
            outs,
            keep=keep,
            alone=len(ins) > 1 and not runtime.config().group_fusion,
            timeout=process_set.limit(),
            **options,
        )
    except _native.StatusError as error:
        raise errors.from_status(error) from None
    return Handle(work, finish)


def run(
    op: str,
    name: str | None,
    ref: TensorRef,
    out: int,
    process_set: runtime.ProcessSet,
    keep: object,
    **options: Unpack[LaneOptions],
) -> None:
    """Submits an operation on one host tensor and waits until the operation has ended.

    Works only for allreduce, broadcast and reducescatter, and only with the options
    `reduce_op`, `root`, `prescale` and `postscale`. This single native call takes 0.5
    microseconds less than `submit` and a handle, about 8 % of a short operation.
    """
    lane = runtime.lane(process_set, op)
    name = check_name(op, name) or next_name(op, process_set)
    try:
        lane.run_at(
            COLLECTIVES[op],
            name,
            ref,
            out,
            options.get("reduce_op", 1),
            options.get("root", 0),
            options.get("prescale", 1.0),
            options.get("postscale", 1.0),
            process_set.limit(),
            keep,
        )
    except _native.StatusError as error:
        raise errors.from_status(error) from None


@contextlib.contextmanager
def submission_group(process_set: runtime.ProcessSet = _global) -> Iterator[None]:
    """Negotiates all operations that the `with` block submits in one round.

    This saves rounds and makes messages larger. The operations begin before the block
    ends if a thread waits for one of the operations, or if another rank begins a round.
    """
    lane = runtime.lane(process_set, "submission_group")
    lane.hold()
    try:
        yield
    finally:
        lane.release()


def join(process_set: runtime.ProcessSet = _global) -> int:
    """Waits until all ranks have called `join`. Meanwhile this rank submits nothing.

    Until then this rank takes part in the operations of the other ranks: it contributes
    zeros (or the value that does not change the result) to reductions, and no rows to
    allgather and alltoall. After `join`, the counter that names operations without a
    name restarts at 1.

    Args:
        process_set: the ranks that take part; this rank must be among them.

    Returns:
        The world rank of the rank that joined last.

    Raises:
        NotInitialized: before ringjax.init().
        PeerLost: a rank is lost.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> ringjax.eager.join() in range(ringjax.size())
        True
    """
    lane = runtime.lane(process_set, "join")
    try:
        work = lane.join()
    except _native.StatusError as error:
        raise errors.from_status(error) from None
    last: int = Handle(work, operator.attrgetter("last_joined")).wait()
    # Ranks may have submitted different numbers of unnamed operations before `join`, so
    # restart all counters of the process set.
    for key in [k for k in _counters if k[0] == process_set.process_set_id]:
        _counters.pop(key, None)
    return process_set.ranks[last]


def check_name(op: str, name: object) -> str | None:
    """Returns `name`, or None if empty. Raises TypeError if `name` is not a str."""
    if not name:
        return None
    if not isinstance(name, str):
        raise TypeError(f"ringjax.{op}: name must be a str, got {name!r}")
    return name


def next_name(op: str, process_set: runtime.ProcessSet) -> str:
    """Makes a name for an operation that has none: "noname." and a counter."""
    return f"noname.{next_number(op, process_set)}"


def next_number(counter: str, process_set: runtime.ProcessSet) -> int:
    """Returns 1, 2, 3, …; restarts at 1 after an init, a fresh start or a `join`."""
    key = (process_set.process_set_id, counter)
    numbers = _counters.get(key) or _counters.setdefault(key, itertools.count(1))
    return next(numbers)


# -- arguments -------------------------------------------------------------------------


def title(op: str, name: str | None, refs: Sequence[TensorRef] = ()) -> str:
    """Names an operation in errors: ``ringjax.allreduce 'grad' (f32[8])``."""
    shapes = [
        f"{_DTYPE_NAMES[dtype]}[{','.join(map(str, shape))}]"
        for _, dtype, shape in refs
    ]
    label = f" {name!r}" if name else ""
    return f"ringjax.{op}{label}" + (f" ({', '.join(shapes)})" if shapes else "")


def root_in_set(op: str, root_rank: object, process_set: runtime.ProcessSet) -> int:
    """Converts the world rank `root_rank` to the rank within the process set."""
    if isinstance(root_rank, bool) or not hasattr(root_rank, "__index__"):
        raise TypeError(
            f"ringjax.{op}: root_rank must be an int, got {root_rank!r} of type "
            f"{type(root_rank).__name__}"
        )
    rank = operator.index(root_rank)
    if rank not in process_set.ranks:
        raise ValueError(
            f"ringjax.{op}: root_rank is {rank}, expected a rank of the process set: "
            f"{process_set.ranks}"
        )
    return process_set.ranks.index(rank)


def scattered_shape(
    op: str, name: str | None, ref: TensorRef, process_set: runtime.ProcessSet
) -> tuple[int, ...]:
    """Returns the shape of this rank's result in a reducescatter of `ref`.

    If the rows cannot be divided evenly, the first ranks have one row more.
    """
    rows, *row = require_rows(op, name, ref)[2]
    lane = runtime.lane(process_set, op)
    each, more = divmod(rows, lane.size)
    return (each + (lane.rank < more), *row)


def require_rows(op: str, name: str | None, ref: TensorRef) -> TensorRef:
    """Returns `ref`. Raises ValueError if the tensor has no dimensions."""
    if not ref[2]:
        raise ValueError(
            f"{title(op, name, [ref])}: a tensor without dimensions has no rows"
        )
    return ref


def parse_splits(op: str, name: str | None, splits: Any) -> list[int]:
    """Converts the argument `splits`, a list, tuple, array or tensor, to a list."""
    given = splits.tolist() if hasattr(splits, "tolist") else splits
    if not isinstance(given, list | tuple) or not all(type(n) is int for n in given):
        raise ValueError(
            f"{title(op, name)}: splits must be integers, one for each rank, not "
            f"{splits!r}"
        )
    return list(given)


def op_or_average(
    average: bool | None, op: int | None, stacklevel: int = 2
) -> ReduceOp | int:
    """Returns the reduction that Horovod's arguments `average` and `op` select.

    `average` is Horovod's former argument: True means Average, and False means Sum. If
    both arguments are None, the reduction is Average.

    Args:
        stacklevel: as in `warnings.warn`, counted from the caller of this function.

    Raises:
        ValueError: both arguments are given.
    """
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("ringjax: `op` supersedes `average`; give only one")
    text = "`average` has been replaced by `op`: use op=Average or op=Sum"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)
    return Average if average else Sum


def reduce_op(op: str, value: object) -> int:
    """Checks and returns a reduction. The native core checks the dtype later."""
    # Check the usual type first, because the other checks slow down short operations.
    if type(value) is ReduceOp:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 5:
        return int(value)
    raise ValueError(
        f"ringjax.{op}: op is {value!r}, expected Average, Sum, Min, Max, Product or "
        "Adasum"
    )


def reduction_options(
    op: str, value: object, prescale: float, postscale: float
) -> LaneOptions:
    """Checks the reduction `value` and both factors, and returns all as options."""
    if type(prescale) is not float or type(postscale) is not float:
        prescale = as_float(op, "prescale_factor", prescale)
        postscale = as_float(op, "postscale_factor", postscale)
    return {
        "reduce_op": reduce_op(op, value),
        "prescale": prescale,
        "postscale": postscale,
    }


def as_float(op: str, argument: str, value: SupportsFloat | str) -> float:
    """Converts a scaling factor to float. Raises TypeError if it is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"ringjax.{op}: {argument} must be a number, got {value!r}"
        ) from None
