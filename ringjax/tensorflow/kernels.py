"""The nodes that a collective is in a graph, and the functions that TensorFlow runs.

RingjaxStart submits an operation and returns immediately. Its outputs are a number and
a token queue. A reader of TensorFlow's own takes the token from the queue when the
operation has ended; that reader occupies no thread. RingjaxFinish then finds the
results under the number. Sessions do not see ringjax's token queues; graphs of sessions
have RingjaxWait in place of the reader and RingjaxFinish. RingjaxNumber reads numbers
such as rank and size.

TensorFlow runs stateful nodes without a resource one after another, in the order of the
program. RingjaxStart therefore takes a resource that no other node uses, the *anchor*.
"""

from __future__ import annotations

import functools
import itertools
import re
import time
from dataclasses import replace

from ringjax.tensorflow import c_api, failures, rank_queries, token_queues
from ringjax.tensorflow.collective_spec import CollectiveSpec
from ringjax.tensorflow.completion_threads import CompletionThreads
from ringjax.tensorflow.kernel_registration import (
    AsyncKernelRun,
    register_async_op,
    register_op,
)
from ringjax.tensorflow.pending_operations import PendingOperation

# Seconds until a result is dropped that no graph takes, because the graph has failed.
_RESULT_TIMEOUT = 120.0
# Iterations of a loop overlap, ten at most by default, and each needs its own names.
_ITERATION_NAMES = 16

_completions = CompletionThreads()
_operations: dict[int, PendingOperation] = {}
_numbers = itertools.count(1)


def _start(call: CollectiveSpec, context: int) -> None:
    # RingjaxStart has an anchor only in a function, where a token queue does the wait.
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
    # store the operation under its number before.
    _operations[number] = operation
    if queue is not None:
        if operation.done():
            operation.wait_for_end()
            operation.notify()
        else:
            _completions.add(operation)
        c_api.put_handle(context, 1, queue.handle)
    c_api.put_scalar(context, 0, c_api.INT64, number)


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
    if operation.done() or not run.outlives_kernel:
        operation.wait_for_end()
        operation.notify()
    else:
        _completions.add(operation)


def _read_number(call: CollectiveSpec, context: int) -> None:
    value = rank_queries.query(call.op, call.process_set_id)
    c_api.put_scalar(context, 0, c_api.INT32, value)


def _create_spec(text: str, node: str) -> CollectiveSpec:
    call = CollectiveSpec.from_json(text)
    return replace(call, name=name_on_all_ranks(call, node))


def name_on_all_ranks(call: CollectiveSpec, node: str) -> str:
    """Derives the name of an operation from the final name of its node.

    TensorFlow inlines the nodes of functions, branches and loops into the graph that
    calls them, and puts the path to them into their names. The path distinguishes two
    executions of one line of the source. The path also contains numbers that depend on
    all other nodes of the graph. This function removes these numbers, because a graph
    may have nodes that exist on this rank only.

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
    number, tokens, queues = (
        "number: int64",
        "token: N * int64",
        "signals: M * resource",
    )
    register = functools.partial(
        register_op, create=_create_spec, error_code_of=failures.error_code_of
    )
    inputs = ["tensors: T", "anchors: N * resource"]
    register("RingjaxStart", inputs, [number, queues], compute=_start)
    inputs = [number, tokens, queues]
    register("RingjaxFinish", inputs, ["results: T"], compute=_finish)
    register_async_op(
        "RingjaxWait",
        [number],
        ["results: T"],
        create=_create_spec,
        compute=_wait,
        error_code_of=failures.error_code_of,
    )
    register("RingjaxNumber", [], ["number: int32"], compute=_read_number)
