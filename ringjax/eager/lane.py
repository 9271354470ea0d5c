"""The door to the eager lanes: submit a named operation, get a handle.

For what runs line by line, in an order that may differ from rank to rank; compiled
programs do not come here. Knows addresses, dtypes and shapes, and no framework: how an
array becomes those is in arrays.py, and in the adapter packages.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict, Unpack

from ringjax import _native, errors, runtime
from ringjax.eager.handle import Finish, Handle
from ringjax.ops import Average, ReduceOp, Sum

# (address, number of the dtype, shape) of a tensor; its memory is C-contiguous.
TensorRef = tuple[int, int, tuple[int, ...]]

COLLECTIVES = _native.COLLECTIVES
_DTYPE_NAMES = {number: name for name, number in _native.DTYPES.items()}
_global = runtime.global_process_set
_unnamed: dict[tuple[int | None, str], Iterator[int]] = {}
runtime.on_init(_unnamed.clear)
runtime.on_fresh_start(_unnamed.clear)  # a newcomer has not numbered any


class LaneOptions(TypedDict, total=False):
    """What else an operation may say of itself.

    Attributes:
        reduce_op: a number of `ringjax.ops.ReduceOp`.
        prescale: multiplies each rank's tensor before the reduction.
        postscale: multiplies the result.
        root: the sender's rank within the process set.
        splits: for alltoall, rows for each rank, tensor by tensor; empty: equal parts.
        cuda: the addresses are on a device.
        stream: a stream there.
        waits: the caller waits for it at once, so its thread may do the lane's work.
        rooms: the bytes at each of `outs`, for allgather and alltoall: a result of
            another size is in memory of the core.
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
    keep: object = None,
    **call: Unpack[LaneOptions],
) -> Handle:
    """Submits an operation; it begins when all ranks of the set have submitted it.

    Args:
        op: a collective's name, as in `_native.COLLECTIVES`.
        name: what the operation is called on all ranks; None gives it a number, which
            fits if all ranks submit their unnamed ones in the same order.
        ins: the tensors. Several are one operation.
        outs: where the results go; empty for barrier, and for allgather and alltoall
            if their results are to be in memory of the core.
        finish: makes the caller's result from the native work.
        keep: what must live until the operation has ended.

    Raises:
        NotInitialized, PeerLost: as everywhere.
        InvalidArgument: the core refuses it, or one of this name is under way.
        TypeError, ValueError: `name` or `process_set` is wrong.
    """
    lane = runtime.lane(process_set, op)
    name = check_name(op, name) or next_name(op, process_set)
    try:
        alone = len(ins) > 1 and not runtime.config().group_fusion
        work = lane.submit(
            COLLECTIVES[op],
            name,
            ins,
            outs,
            keep=keep,
            alone=alone,
            timeout=process_set.limit(),
            **call,
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
    **call: Unpack[LaneOptions],
) -> None:
    """`submit` and `wait` for one tensor of this host, in one call of the core.

    Args, Raises: as `submit`, and `Handle.wait`. Of `call`, what allreduce, broadcast
    and reducescatter need.
    """
    lane = runtime.lane(process_set, op)
    name = check_name(op, name) or next_name(op, process_set)
    try:
        lane.run_at(
            *(COLLECTIVES[op], name, ref, out),
            call.get("reduce_op", 1),
            call.get("root", 0),
            call.get("prescale", 1.0),
            call.get("postscale", 1.0),
            process_set.limit(),
            keep,
        )
    except _native.StatusError as error:
        raise errors.from_status(error) from None


@contextlib.contextmanager
def submission_group(process_set: runtime.ProcessSet = _global) -> Iterator[None]:
    """Within it, what is submitted waits for the rest, and travels with it.

    Fewer rounds and larger messages. Whoever waits for an operation in the block, or a
    round that another rank begins, takes along what there is.
    """
    native = runtime.lane(process_set, "together")
    native.hold()
    try:
        yield
    finally:
        native.release()


def join(process_set: runtime.ProcessSet = _global) -> int:
    """Says that this rank has no more to submit, and waits until all ranks say so.

    Until then it takes part in what the others submit: with zeros (or what else does
    not change the result) in reductions, with no rows in allgather and alltoall. After
    it, operations without a name are numbered from the beginning.

    Args:
        process_set: the ranks that take part; this rank must be one of them.

    Returns:
        The rank that was the last to join, its number in the world.

    Raises:
        NotInitialized, PeerLost: as everywhere.

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
    # The ranks have come here by different ways; from now on they go in step again.
    for key in [k for k in _unnamed if k[0] == process_set.process_set_id]:
        _unnamed.pop(key, None)
    return process_set.ranks[last]


def check_name(op: str, name: Any) -> str | None:
    """What an operation is to be called, or None."""
    if name and not isinstance(name, str):
        raise TypeError(f"ringjax.{op}: name must be a str, got {name!r}")
    return name or None


def next_name(op: str, process_set: runtime.ProcessSet) -> str:
    """The name of an operation without one: the same on ranks in the same order."""
    return f"noname.{next_number(op, process_set)}"


def next_number(what: str, process_set: runtime.ProcessSet) -> int:
    """1, 2, 3, …, and from 1 again wherever all ranks begin anew, or have joined."""
    key = (process_set.process_set_id, what)
    counter = _unnamed.get(key) or _unnamed.setdefault(key, itertools.count(1))
    return next(counter)


# -- arguments -------------------------------------------------------------------------


def title(op: str, name: str | None, refs: Sequence[TensorRef] = ()) -> str:
    """How errors name an operation: ``ringjax.allreduce 'grad' (f32[8,128])``."""
    shapes = [
        f"{_DTYPE_NAMES[dtype]}[{','.join(map(str, shape))}]"
        for _, dtype, shape in refs
    ]
    label = f" {name!r}" if name else ""
    return f"ringjax.{op}{label}" + (f" ({', '.join(shapes)})" if shapes else "")


def root_in_set(op: str, root_rank: Any, process_set: runtime.ProcessSet) -> int:
    """The place of world rank `root_rank` among the members of the process set."""
    if isinstance(root_rank, bool) or not hasattr(root_rank, "__index__"):
        raise TypeError(f"ringjax.{op}: root_rank must be an int, got {root_rank!r}")
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
    """The shape of this rank's part in a reducescatter of `ref`."""
    return own_shape(op, require_rows(op, name, ref)[2], process_set)


def own_shape(
    op: str, shape: tuple[int, ...], process_set: runtime.ProcessSet
) -> tuple[int, ...]:
    """As `scattered_shape`, for a tensor of this shape, which has rows."""
    native = runtime.lane(process_set, op)
    rows, more = divmod(shape[0], native.size)
    return (rows + (native.rank < more), *shape[1:])


def require_rows(op: str, name: str | None, ref: TensorRef) -> TensorRef:
    """Refuses a tensor without dimensions."""
    if not ref[2]:
        raise ValueError(
            f"{title(op, name, [ref])}: a tensor without dimensions has no rows"
        )
    return ref


def parse_splits(op: str, name: str | None, splits: Any) -> list[int]:
    """Rows for each rank, from a list, a tuple, an array or a tensor of integers."""
    given = splits.tolist() if hasattr(splits, "tolist") else splits
    if not isinstance(given, list | tuple) or not all(type(n) is int for n in given):
        raise ValueError(
            f"{title(op, name)}: splits must be integers, one for each rank, not "
            f"{splits!r}"
        )
    return list(given)


def op_or_average(average: bool | None, op: Any, stacklevel: int = 2) -> Any:
    """What to reduce by, from Horovod's former argument `average` and its present one.

    Args:
        average: True is Average, False is Sum, None: not given.
        op: None: not given; with neither it is Average.
        stacklevel: as `warnings.warn`, seen from the caller.

    Raises:
        ValueError: both are given.

    Example:
        >>> op_or_average(None, None).name
        'Average'
    """
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("ringjax: `op` supersedes `average`; give only one")
    text = "`average` has been replaced by `op`: use op=Average or op=Sum"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)
    return Average if average else Sum


def reduce_op(op: str, value: Any) -> int:
    """The number of a reduction; whether it fits the dtype, the core knows."""
    if type(value) is ReduceOp:  # as usual: what follows is slow in a short call
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 5:
        return int(value)
    raise ValueError(
        f"ringjax.{op}: op is {value!r}, expected Average, Sum, Min, Max, Product or "
        "Adasum"
    )


def as_float(op: str, argument: str, value: Any) -> float:
    """A scaling factor."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"ringjax.{op}: {argument} must be a number, got {value!r}"
        ) from None
