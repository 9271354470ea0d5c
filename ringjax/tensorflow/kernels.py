"""The kernels of ringjax's nodes in graphs: a collective consists of several nodes.

RingjaxStart submits an operation and returns immediately. Its outputs are a number and
a token queue. QueueDequeueV2, a node of TensorFlow itself, takes the token from the
queue when the operation has ended, and occupies no thread until then. RingjaxFinish
then finds the results under the number. The graph of a session cannot use ringjax's
token queues and has RingjaxWait in place of QueueDequeueV2 and RingjaxFinish.
RingjaxNumber reads numbers such as rank and size.

TensorFlow runs stateful nodes without a resource one after another, in the order of the
program. RingjaxStart therefore has a resource that no other node uses, the *anchor*, as
an input.
"""

from __future__ import annotations

import functools
import itertools
import re
import time
from dataclasses import replace

from ringjax.tensorflow import c_api, rank_queries, token_queues
from ringjax.tensorflow.collective_spec import CollectiveSpec
from ringjax.tensorflow.kernel_registration import (
    AsyncKernelRun,
    register_async_op,
    register_op,
)
from ringjax.tensorflow.pending_operations import CompletionThreads, PendingOperation

# A result is dropped if no graph takes it within these seconds: its graph has failed.
_RESULT_TIMEOUT = 120.0
# Up to ten iterations of a loop overlap by default, and each needs its own names.
_ITERATION_NAMES = 16

_completions = CompletionThreads()
_operations: dict[int, PendingOperation] = {}
_numbers = itertools.count(1)


def _start(call: CollectiveSpec, context: int) -> None:
    # RingjaxStart has an anchor only in a function, where the graph reads a queue.
    anchors = 0 if call.waits else 1
    tensors = c_api.tensors.inputs(context, c_api.count_inputs(context) - anchors)
    name = call.name
    if c_api.frame_of(context):  # the operation is in a loop of the graph
        name = f"{name}@{c_api.iteration_of(context) % _ITERATION_NAMES}"
    queue = None if call.waits else token_queues.acquire()
    operation = PendingOperation(call, name, tensors, queue)
    number = next(_numbers)
    if number % 1024 == 0:
        drop_abandoned()
    # RingjaxFinish may run in another thread as soon as the token is in the queue, so
    # the operation is stored under its number first.
    _operations[number] = operation
    if queue is not None:
        _notify_at_end(operation, immediately=operation.done())
        c_api.put_handle(context, 1, queue.handle)
    c_api.put_scalar(context, 0, c_api.INT64, number)


def _notify_at_end(operation: PendingOperation, *, immediately: bool) -> None:
    if immediately:
        operation.wait_for_end()
        operation.notify()
    else:
        _completions.add(operation)


def _finish(_: CollectiveSpec, context: int) -> None:
    count = c_api.count_inputs(context)
    number, *others = c_api.tensors.inputs(context, count)
    c_api.tensors.delete(others)
    operation = _operations.pop(c_api.take_scalar(number))
    if operation.queue is not None:
        operation.queue.release()
    c_api.tensors.put(context, 0, operation.results())


def _wait(_: CollectiveSpec, run: AsyncKernelRun) -> None:
    (number,) = c_api.tensors.inputs(run.context, 1)
    operation = _operations.pop(c_api.take_scalar(number))

    def put() -> None:
        c_api.tensors.put(run.context, 0, operation.results())

    operation.on_end = functools.partial(run.end, put)
    _notify_at_end(operation, immediately=operation.done() or not run.outlives_kernel)


def _read_number(call: CollectiveSpec, context: int) -> None:
    value = rank_queries.query(call.op, call.process_set_id)
    c_api.put_scalar(context, 0, c_api.INT32, value)


def _create_spec(text: str, node: str) -> CollectiveSpec:
    call = CollectiveSpec.from_json(text)
    return replace(call, name=name_on_all_ranks(call, node))


def name_on_all_ranks(call: CollectiveSpec, node: str) -> str:
    """Derives the name of an operation from the final name of its node.

    TensorFlow copies the nodes of functions, branches and loops into the graph that
    uses them, and adds the path of the function, branch or loop to their names. The
    path distinguishes two executions of one line of the source. The path also contains
    numbers that depend on all other nodes of the graph. This function removes these
    numbers, because the graph may have nodes that other ranks do not have.

    Example:
        >>> name_on_all_ranks(CollectiveSpec("allreduce"), "cond/then/_13/cond/x")
        'cond/then/cond/x'
        >>> name_on_all_ranks(CollectiveSpec("allreduce", name="a:0"), "outer_1/a_0")
        'outer_1/a:0'
        >>> name_on_all_ranks(CollectiveSpec("allreduce", "a", bare=True), "outer_1/a")
        'a'
    """
    path = re.sub(r"/_\d+(?=/)", "", node)
    if call.bare:
        return call.name or path.rpartition("/")[2]
    given = valid_node_name(call.name)
    if given and path.endswith(given):
        return path[: -len(given)] + call.name
    return path


def valid_node_name(name: str) -> str:
    """Replaces the characters that TensorFlow does not allow in names of nodes."""
    name = re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", name)
    return name if re.match(r"[A-Za-z0-9.]|$", name) else f"x{name}"


def pending_count() -> int:
    """Returns how many operations graphs have started and not finished."""
    return len(_operations)


def drop_abandoned() -> None:
    """Drops results that no graph takes, because another node of the graph failed."""
    limit = time.monotonic() - _RESULT_TIMEOUT
    for number, operation in list(_operations.items()):
        operation.note_end()
        if operation.ended < limit:
            _operations.pop(number, None)


@functools.cache
def ensure_registered() -> None:
    """Registers the nodes with TensorFlow, once in a process."""
    token_queues.ensure_registered()
    number, queues, results = "number: int64", "signals: M * resource", ["results: T"]
    register = functools.partial(register_op, create=_create_spec)
    inputs = ["tensors: T", "anchors: N * resource"]
    register("RingjaxStart", inputs, [number, queues], compute=_start)
    inputs = [number, "token: N * int64", queues]
    register("RingjaxFinish", inputs, results, compute=_finish)
    register_async_op(
        "RingjaxWait", [number], results, create=_create_spec, compute=_wait
    )
    register("RingjaxNumber", [], ["number: int32"], compute=_read_number)
