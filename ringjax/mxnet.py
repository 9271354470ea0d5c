"""Horovod's MXNet API: after `import ringjax.mxnet as hvd`, a script runs unchanged.

MXNet is retired; its last version, 1.9.1, runs on Python 3.11 with numpy 1.23, and JAX
needs numpy 2. So this module works in environments without JAX.

MXNet computes in threads of its own. `_memory` waits for them, and every function here
returns when its result is complete. `priority`, an argument of all functions, has no
effect: the lane runs an operation as soon as all ranks have submitted it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import platform
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ringjax import eager
from ringjax.eager import lane, objects
from ringjax.eager.handle import Handle
from ringjax.errors import RingjaxError
from ringjax.horovod.api import *  # noqa: F403
from ringjax.horovod.api import Average, Max, ProcessSet, global_process_set, size
from ringjax.horovod.functions import split_list
from ringjax.horovod.gradient_options import check_reduction
from ringjax.runtime import refuse_groups

try:
    import mxnet as mx
    from mxnet.base import _LIB, check_call
except Exception as error:  # an AttributeError with a newer numpy
    raise ImportError(
        "ringjax.mxnet needs MXNet 1.9.1, which needs Python 3.11 and numpy 1.23. Use "
        "an environment without JAX: pip install mxnet==1.9.1 numpy==1.23.5. "
        f"This one has Python {platform.python_version()}, numpy {np.__version__}, and "
        f"import mxnet fails with {type(error).__name__}: {error}"
    ) from error

NDArray: TypeAlias = mx.nd.NDArray
"""An array of MXNet; an `mx.np.ndarray` is one, too, and gives results of its type."""
Array: TypeAlias = np.ndarray[Any, Any]

refuse_groups("ringjax.mxnet")


# -- memory ----------------------------------------------------------------------------


def _check(op: str, name: str | None, array: object) -> None:
    """Raises TypeError unless `array` is a dense array of MXNet on the CPU."""
    if not isinstance(array, mx.nd.NDArray):
        found = f"got a {type(array).__name__}; use ringjax.eager for other arrays"
    elif array.stype != "default":
        found = f"got {array.stype} storage; write array.tostype('default')"
    elif not array.context.device_type.startswith("cpu"):
        found = f"got one on {array.context}; write array.as_in_context(mx.cpu())"
    else:
        return
    raise TypeError(
        f"{lane.title(op, name)}: expected a dense array of MXNet on the CPU, {found}"
    )


def _memory(op: str, name: str | None, array: NDArray) -> Array:
    """Returns the memory of `array`, which no operation of MXNet uses any more.

    MXNet's engine does not know what ringjax reads and writes, so the caller must not
    use `array` before the operation has ended.
    """
    _check(op, name, array)
    dtype, count = np.dtype(array.dtype), math.prod(array.shape)
    if count == 0:
        return np.empty(array.shape, dtype)
    check_call(_LIB.MXNDArrayWaitToWrite(array.handle))
    # oneDNN may keep an array in a layout of its own. This call converts it.
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    assert address.value is not None
    memory: Any = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address.value)
    memory.owner = array  # lives as long as any view of the memory
    return np.frombuffer(memory, dtype).reshape(array.shape)


def _like(result: Array, tensor: NDArray) -> NDArray:
    """Copies a result to an array of MXNet of the type of `tensor`."""
    make = mx.np.array if isinstance(tensor, mx.np.ndarray) else mx.nd.array
    return make(result, ctx=tensor.context, dtype=result.dtype)


def _copy(op: str, name: str | None, tensor: NDArray) -> NDArray:
    # MXNet's own copy() fails for arrays without dimensions or without elements.
    return _like(_memory(op, name, tensor), tensor)


def _wait_all(handles: Iterable[Handle]) -> None:
    """Waits until all operations have ended, then raises the first error."""
    failure = None
    for handle in handles:
        try:
            handle.wait()
        except RingjaxError as error:
            failure = failure or error
    if failure is not None:
        raise failure


# -- operations ------------------------------------------------------------------------


def allreduce(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> NDArray:
    """Returns the reduction of all ranks' tensors; the argument is not modified.

    Args:
        tensor: a dense array on the CPU, of the same dtype and shape on all ranks.
        average: a deprecated argument. True means op=Average, False means op=Sum.
        name: the name of the operation, the same on all ranks.
        priority: no effect.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part; this rank must be among them.
        op: Average (if None), Sum, Min, Max, Product or Adasum.

    Raises:
        TypeError, ValueError: a bad argument; nothing was sent.
        HorovodInternalError: the ranks disagree, or a rank is lost; the text names the
            rank.

    Example:
        >>> import mxnet as mx, ringjax.mxnet as hvd
        >>> hvd.init()
        >>> hvd.allreduce(mx.nd.arange(3), name="loss").asnumpy().tolist()
        [0.0, 1.0, 2.0]
    """
    op = lane.op_or_average(average, op)
    result = _copy("allreduce", name, tensor)
    factors = prescale_factor, postscale_factor
    return allreduce_(result, None, name, priority, *factors, process_set, op)


def allreduce_(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> NDArray:
    """Runs `allreduce` in the memory of `tensor`, and returns `tensor`."""
    op = lane.op_or_average(average, op)
    memory = _memory("allreduce", name, tensor)
    eager.allreduce(
        memory,
        op,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        out=memory,
    )
    return tensor


def grouped_allreduce(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Sequence[NDArray]:
    """Runs `allreduce` of several tensors as one operation; returns a list."""
    op = lane.op_or_average(average, op)
    results = [_copy("allreduce", name, tensor) for tensor in tensors]
    factors = prescale_factor, postscale_factor
    return grouped_allreduce_(results, None, name, priority, *factors, process_set, op)


def grouped_allreduce_(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Sequence[NDArray]:
    """Runs `allreduce_` of several tensors as one operation; returns `tensors`."""
    op = lane.op_or_average(average, op)
    memory = [_memory("allreduce", name, tensor) for tensor in tensors]
    if memory:
        eager.grouped_allreduce(
            memory,
            op,
            name=name,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            out=memory,
        )
    return tensors


def allgather(
    tensor: NDArray,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Returns the rows of all ranks' tensors, in the order of the ranks.

    Args, Raises: as `allreduce`. The number of rows may differ between the ranks.
    """
    memory = _memory("allgather", name, tensor)
    return _like(eager.allgather(memory, name=name, process_set=process_set), tensor)


def grouped_allgather(
    tensors: Sequence[NDArray],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[NDArray]:
    """Runs `allgather` of several tensors as one operation; returns a list."""
    memory = [_memory("allgather", name, tensor) for tensor in tensors]
    results = eager.grouped_allgather(memory, name=name, process_set=process_set)
    return [_like(r, tensor) for r, tensor in zip(results, tensors, strict=True)]


def broadcast(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Returns the root's tensor on every rank; the argument is not modified.

    Args, Raises: as `allreduce`. `root_rank` is the root's rank in the world.
    """
    result = _copy("broadcast", name, tensor)
    return broadcast_(result, root_rank, name, priority, process_set)


def broadcast_(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Runs `broadcast` in the memory of `tensor`, and returns `tensor`."""
    memory = _memory("broadcast", name, tensor)
    eager.broadcast(memory, root_rank, name=name, process_set=process_set, out=memory)
    return tensor


def alltoall(
    tensor: NDArray,
    splits: NDArray | Sequence[int] | None = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray | tuple[NDArray, NDArray]:
    """Sends some rows to each rank; returns the received rows, in the ranks' order.

    Args, Raises: as `allreduce`. `splits` has the number of rows for each rank; without
        it, all ranks receive equally many rows.

    Returns:
        The received rows. With `splits`, a pair: the rows, and an int32 array with the
        number of rows from each rank.
    """
    if isinstance(splits, mx.nd.NDArray):
        splits = splits.asnumpy()
    memory = _memory("alltoall", name, tensor)
    found = eager.alltoall(memory, splits, name=name, process_set=process_set)
    if splits is None:
        return _like(found, tensor)
    rows, received = found
    return _like(rows, tensor), _like(received, tensor)


def reducescatter(
    tensor: NDArray,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NDArray:
    """Reduces as `allreduce` does, but each rank receives only its part of the rows."""
    factors = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], op, name, priority, process_set, *factors)[0]


def grouped_reducescatter(
    tensors: Sequence[NDArray],
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[NDArray]:
    """Runs `reducescatter` of several tensors as one operation; returns a list."""
    results = eager.grouped_reducescatter(
        [_memory("reducescatter", name, tensor) for tensor in tensors],
        op,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    return [_like(r, tensor) for r, tensor in zip(results, tensors, strict=True)]


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Returns the root's object, which may be anything that cloudpickle can pickle.

    A rank that receives it runs code that the root has chosen;
    `ringjax.eager.broadcast_object` sends plain data only.

    Example:
        >>> import ringjax.mxnet as hvd
        >>> hvd.init()
        >>> hvd.broadcast_object({"epoch": 3})
        {'epoch': 3}
    """
    return objects.broadcast_pickled(obj, root_rank, name, global_process_set)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns the objects of all ranks, sent as in `broadcast_object`."""
    return objects.allgather_object(obj, name, allow_pickle=True)


# -- parameters ------------------------------------------------------------------------


def broadcast_parameters(
    params: Any, root_rank: int = 0, prefix: str | None = None
) -> None:
    """Gives all ranks the parameters of the root.

    A parameter whose shape no rank knows yet is broadcast when the first batch tells
    its shape. If only the root knows the shape, because it alone has loaded a file, the
    other ranks receive the shape, too.

    Args:
        params: `net.collect_params()`, or a dict of parameters or arrays.
        root_rank: the root's rank in the world.
        prefix: put in front of the parameters' names, which are the same on all ranks.

    Raises:
        ValueError: `params` is no dict, `root_rank` is no rank, or the ranks have
            different parameters.
        RuntimeError: a parameter has not been initialized.
        HorovodInternalError: a parameter has different shapes, or a rank is lost.
    """
    if not isinstance(params, dict | mx.gluon.ParameterDict):
        raise ValueError(
            "broadcast_parameters: expected net.collect_params() or a dict, got a "
            f"{type(params).__name__}"
        )
    lane.root_in_set("broadcast_parameters", root_rank, global_process_set)
    if size() == 1:
        return
    named = {f"{prefix or ''}{name}": params[name] for name in params}
    _agree_on_shapes(named, root_rank)
    handles = []
    for name in sorted(named):
        if _shape(named[name]) is None:
            _broadcast_when_made(named[name], root_rank, name)
            continue
        memory = _memory("broadcast", name, _data(named[name]))
        handles.append(eager.broadcast_async(memory, root_rank, name=name, out=memory))
    _wait_all(handles)


def _data(param: Any) -> NDArray:
    return param.data() if isinstance(param, mx.gluon.Parameter) else param


def _shape(param: Any) -> tuple[int, ...] | None:
    """Returns the shape of a parameter or an array, None if it is not known yet."""
    try:
        return tuple(_data(param).shape)
    except mx.gluon.parameter.DeferredInitializationError:
        return None


def _agree_on_shapes(named: dict[str, Any], root_rank: int) -> None:
    """Gives parameters without a shape the shape that they have on the root."""
    mine = {name: _shape(param) for name, param in named.items()}
    everyone = eager.allgather_object(mine, name="shapes of broadcast_parameters")
    roots = everyone[root_rank]
    for other, theirs in enumerate(everyone):
        if differing := sorted(theirs.keys() ^ roots.keys()):
            raise ValueError(
                f"broadcast_parameters: rank {other} and rank {root_rank} do not both "
                f"have the parameters {differing}; MXNet numbers layers without a "
                "prefix in the order in which a rank makes them"
            )
        unknown = [n for n in roots if roots[n] is None and theirs[n] is not None]
        if unknown:
            raise ValueError(
                f"broadcast_parameters: rank {other} knows the shapes of {unknown} and "
                f"rank {root_rank}, the root, does not: run a batch on the root first"
            )
    for name, param in named.items():
        if mine[name] is None and roots[name] is not None:
            param.shape = roots[name]
            param._finish_deferred_init()


def _broadcast_when_made(param: Any, root_rank: int, name: str) -> None:
    """Broadcasts a parameter as soon as MXNet has made its array, once."""
    make = param._init_impl

    def make_and_broadcast(*args: Any, **kwargs: Any) -> None:
        vars(param).pop("_init_impl", None)  # the method of the class again
        make(*args, **kwargs)
        broadcast_(param.data(), root_rank, name)

    param._init_impl = make_and_broadcast


# -- gradients -------------------------------------------------------------------------


class Compression:
    """The forms in which `DistributedTrainer` sends gradients: `none` or `fp16`."""

    class none:  # noqa: N801  (Horovod's name)
        """Sends gradients as they are."""

        @staticmethod
        def compress(tensor: NDArray) -> tuple[NDArray, Any]:
            """Returns the array to send, and the dtype that `decompress` restores."""
            return tensor, tensor.dtype

        @staticmethod
        def decompress(tensor: NDArray, ctx: Any) -> NDArray:
            """Returns the reduced array in its original dtype."""
            return tensor.astype(ctx, copy=False)

    class fp16(none):  # noqa: N801
        """Sends floats as float16: 11 significant bits, magnitudes up to 65504."""

        @staticmethod
        def compress(tensor: NDArray) -> tuple[NDArray, Any]:
            """Casts floats, and leaves arrays of other dtypes as they are."""
            is_float = np.issubdtype(tensor.dtype, np.floating)
            kind = "float16" if is_float else tensor.dtype
            return tensor.astype(kind, copy=False), tensor.dtype


# The elements of an operation on gradients: 4 MiB of float32. One operation for all
# gradients overlaps nothing, and one for each takes longer than that for 100 gradients.
_PART = 1 << 20


@dataclasses.dataclass(frozen=True)
class _Averaging:
    """Averages gradients over the ranks, in their memory."""

    predivide: float
    num_groups: int
    process_set: ProcessSet
    compression: type[Compression.none] = Compression.none

    def __post_init__(self) -> None:
        check_reduction(Average, self.predivide)
        if not hasattr(self.compression, "compress"):
            raise TypeError(
                "compression must be Compression.none or Compression.fp16 of "
                f"ringjax.mxnet, not {self.compression!r}"
            )
        if not isinstance(self.num_groups, int) or self.num_groups < 0:
            raise ValueError(f"num_groups must be 0 or more, not {self.num_groups!r}")

    def is_needed(self) -> bool:
        """Returns whether this rank has others to average with."""
        return self.process_set.included() and self.process_set.size() > 1

    def __call__(self, gradients: Sequence[NDArray], names: Sequence[str]) -> None:
        """Averages `gradients`. All ranks call it with the same names."""
        if not gradients or not self.is_needed():
            return
        for gradient, name in zip(gradients, names, strict=True):
            _check("allreduce", name, gradient)
        sent = [self.compression.compress(gradient) for gradient in gradients]
        _wait_all(
            [
                self._submit([sent[i][0] for i in part], names[part[0]])
                for part in self._parts([math.prod(packed.shape) for packed, _ in sent])
            ]
        )
        for gradient, (reduced, dtype) in zip(gradients, sent, strict=True):
            if reduced is not gradient:
                gradient[:] = self.compression.decompress(reduced, dtype)

    def _parts(self, sizes: Sequence[int]) -> list[list[int]]:
        """Divides the indices of gradients of these sizes into operations.

        MXNet computes the last gradients first, and `_memory` waits for each gradient.
        So the exchange of one part overlaps the computation of the next.
        """
        last_first = range(len(sizes))[::-1]
        if self.num_groups:
            divided = split_list(last_first, self.num_groups)
            return [list(part) for part in divided if part]
        parts: list[list[int]] = []
        filled = _PART
        for i in last_first:
            if filled >= _PART:
                parts.append([])
                filled = 0
            parts[-1].append(i)
            filled += sizes[i]
        return parts

    def _submit(self, tensors: Sequence[NDArray], name: str) -> Handle:
        memory = [_memory("allreduce", name, tensor) for tensor in tensors]
        return eager.grouped_allreduce_async(
            memory,
            Average,
            name=name,
            prescale_factor=1.0 / self.predivide,
            postscale_factor=self.predivide,
            process_set=self.process_set,
            out=memory,
        )


class DistributedOptimizer(mx.optimizer.Optimizer):
    """An optimizer for `Module` that first averages the gradients over the ranks.

    `rescale_grad` stays that of one rank: 1 / (the rank's batch).

    Args:
        optimizer: any optimizer of MXNet. Attributes are read from it and set on it.
        gradient_predivide_factor: gradients are divided by this factor before the sum;
            the sum is multiplied by the factor and divided by the size.
        num_groups: the number of operations for all gradients of a call of `update`. If
            it is 0, an operation has about 4 MiB.
        process_set: the ranks that take part. On other ranks the result behaves like
            `optimizer`.

    Raises:
        TypeError: `optimizer` is no optimizer, or is a DistributedOptimizer already.
        ValueError: a factor or a number of groups is out of range.

    Example:
        >>> import mxnet as mx, ringjax.mxnet as hvd
        >>> hvd.init()
        >>> hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.1)).learning_rate
        0.1
    """

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        is_optimizer = isinstance(optimizer, mx.optimizer.Optimizer)
        if not is_optimizer or isinstance(optimizer, DistributedOptimizer):
            raise TypeError(
                "DistributedOptimizer: expected a plain optimizer, such as "
                f"mx.optimizer.create('sgd'), got a {type(optimizer).__name__}"
            )
        average = _Averaging(gradient_predivide_factor, num_groups, process_set)
        self.__dict__.update(_optimizer=optimizer, _average=average)

    # Horovod's optimizer only reads attributes from the plain one. Module and Trainer
    # set some, such as rescale_grad, which then have no effect.
    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # while an object is copied
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        average = self._average
        is_global = average.process_set is global_process_set
        options = (average.predivide, average.num_groups)
        process_set = () if is_global else (average.process_set,)
        return type(self), (self._optimizer, *options, *process_set)

    def create_state(self, index: Any, weight: NDArray) -> Any:
        """Returns the plain optimizer's state for a weight."""
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: NDArray) -> Any:
        """Returns the plain optimizer's state for a weight that may be float16."""
        return self._optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Averages `grad`, then lets the plain optimizer update `weight`."""
        self._average_gradients(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(
        self, index: Any, weight: Any, grad: Any, state: Any
    ) -> None:
        """Runs `update` for weights that may be float16."""
        self._average_gradients(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def _average_gradients(self, index: Any, grad: Any) -> None:
        several = isinstance(index, tuple | list)
        indices, grads = (index, grad) if several else ([index], [grad])
        self._average(grads, [f"gradient.{i}" for i in indices])


class DistributedTrainer(mx.gluon.Trainer):
    """A `gluon.Trainer` that averages the gradients over the ranks before each update.

    `step` and `update` receive the batch size of this rank. After `allreduce_grads` the
    gradients are the averages, to be clipped or inspected before `update`.

    Args:
        params: `net.collect_params()`, or a list or dict of parameters, each on one
            CPU context and with dense gradients.
        optimizer: an optimizer of MXNet or its name.
        optimizer_params: the arguments of an optimizer that is given by name.
        compression: the form in which gradients are sent, see `Compression`.
        gradient_predivide_factor, num_groups, process_set: as for
            `DistributedOptimizer`; the groups divide all gradients.
        prefix: put in front of the names of the gradients.
        kvstore, update_on_kvstore: only None and False are possible.

    Raises:
        TypeError, ValueError: a bad argument.

    Example:
        >>> import mxnet as mx, ringjax.mxnet as hvd
        >>> hvd.init()
        >>> net = mx.gluon.nn.Dense(1, in_units=2)
        >>> net.initialize()
        >>> hvd.broadcast_parameters(net.collect_params())
        >>> trainer = hvd.DistributedTrainer(net.collect_params(), "adam")
        >>> with mx.autograd.record():
        ...     loss = net(mx.nd.ones((4, 2)))
        >>> loss.backward()
        >>> trainer.step(batch_size=4)
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        compression: type[Compression.none] = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        *,
        kvstore: None = None,
        update_on_kvstore: bool | None = None,
    ) -> None:
        if kvstore is not None or update_on_kvstore:
            raise ValueError(
                "DistributedTrainer: ringjax reduces the gradients; leave out kvstore "
                f"({kvstore!r}) and update_on_kvstore ({update_on_kvstore!r})"
            )
        if not isinstance(params, dict | list | tuple | mx.gluon.ParameterDict):
            raise TypeError(
                "DistributedTrainer: expected net.collect_params(), got a "
                f"{type(params).__name__}"
            )
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer does not take DistributedOptimizer as its "
                "optimizer. We have unwrapped it for you.",
                stacklevel=2,
            )
            optimizer = optimizer._optimizer
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        self._average = _Averaging(
            gradient_predivide_factor, num_groups, process_set, compression
        )
        self._prefix = prefix or ""
        self._check_params()

    def _check_params(self) -> None:
        for param in self._params:
            contexts = param.list_ctx()
            if param._stype != "default" or param._grad_stype != "default":
                found = "is sparse, or has sparse gradients; write sparse_grad=False"
            elif len(contexts) != 1 or contexts[0].device_type != "cpu":
                found = f"is on {contexts}; initialize it with ctx=mx.cpu()"
            else:
                continue
            raise ValueError(f"DistributedTrainer: parameter {param.name} {found}")

    def _allreduce_grads(self) -> None:
        if not self._average.is_needed():
            return
        indices = [i for i, p in enumerate(self._params) if p.grad_req != "null"]
        self._share_freshness([self._params[i] for i in indices])
        self._average(
            [self._params[i].list_grad()[0] for i in indices],
            [f"gradient.{self._prefix}{i}" for i in indices],
        )

    def _share_freshness(self, params: Sequence[Any]) -> None:
        """Makes all ranks update the parameters that the batch of any rank has used.

        MXNet skips parameters that a backward pass has not reached, or raises an error.
        A rank whose own batch has not used a parameter contributes a gradient of zero.
        """
        fresh = np.array([p.list_data()[0]._fresh_grad for p in params], np.uint8)
        name, process_set = f"fresh.{self._prefix}", self._average.process_set
        anywhere = eager.allreduce(fresh, Max, name=name, process_set=process_set)
        for param, here, there in zip(params, fresh, anywhere, strict=True):
            if there and not here:
                param.list_data()[0]._fresh_grad = True
                if param.grad_req == "write":  # otherwise it is a sum that goes on
                    param.zero_grad()
