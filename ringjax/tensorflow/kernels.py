"""The nodes that collectives are in a graph, and what TensorFlow calls to run them.

RingjaxStart submits an operation and returns at once: a number, and the queue to wait
with. A reader of TensorFlow's own takes the token from that queue, which occupies no
thread. RingjaxFinish then finds the results under the number. In sessions, which do not
see that queue, RingjaxWait takes the place of both. RingjaxNumber reads rank, size and
the like.

TensorFlow gives an order to stateful nodes without a resource: each would wait for the
one before. So RingjaxStart has one of its own, the *anchor*, that nobody else uses.
"""

from __future__ import annotations

import functools
import itertools
import re
import time
from dataclasses import replace
from typing import Any

from ringjax.tensorflow import c_api, failures, signals, world
from ringjax.tensorflow.calls import Call
from ringjax.tensorflow.completions import Completions
from ringjax.tensorflow.pending import PendingOperation

_FORGET_AFTER = 120.0  # seconds for a graph to take a result; then it fell through
# Iterations of a loop may overlap, ten by default; each needs a name of its own.
_OVERLAP = 16

_completions = Completions()
_flights: dict[int, PendingOperation] = {}
_numbers = itertools.count(1)


def _start(call: Call, context: int) -> None:
    # The graph of a function has an anchor and waits with a signal, others do not.
    anchors = 0 if call.waits else 1
    tensors = c_api.tensors.inputs(context, c_api.count_inputs(context) - anchors)
    name = call.name
    if c_api.frame_of(context):  # in a loop
        name = f"{name}@{c_api.turn_of(context) % _OVERLAP}"
    flight = PendingOperation(
        call, name, tensors, None if call.waits else signals.take()
    )
    number = next(_numbers)
    if number % 1024 == 0:
        forget()
    _flights[number] = flight
    if flight.signal is not None:
        if flight.done():
            flight.settle()
            flight.tell()
        else:
            _completions.add(flight)
        c_api.put_handle(context, 1, flight.signal.text)
    c_api.put_number(context, 0, c_api.INT64, number)


def _finish(_: Call, context: int) -> None:
    count = c_api.count_inputs(context)
    number, *others = c_api.tensors.inputs(context, count)
    c_api.tensors.delete(others)
    flight = _flights.pop(c_api.number_of(number))
    if flight.signal is not None:
        flight.signal.reuse()
    c_api.tensors.put(context, 0, flight.results())


def _wait(_: Call, node: c_api.Node) -> None:
    (number,) = c_api.tensors.inputs(node.context, 1)
    flight = _flights.pop(c_api.number_of(number))

    def put() -> None:
        c_api.tensors.put(node.context, 0, flight.results())

    flight.then = functools.partial(node.end, put)
    if flight.done() or not node.late:
        flight.settle()
        flight.tell()
    else:
        _completions.add(flight)


def _number(call: Call, context: int) -> None:
    value = world.number(call.op, call.process_set_id)
    c_api.put_number(context, 0, c_api.INT32, value)


def _read(text: str, node: str) -> Call:
    call = Call.read(text)
    return replace(call, name=name_on_all_ranks(call, node))


def name_on_all_ranks(call: Call, node: str) -> str:
    """What an operation is called, from the name that its node has in the end.

    TensorFlow puts the nodes of functions, branches and loops into the graph that calls
    them, and the way there into their names. That tells operations apart that are one
    in the source. Numbers that TensorFlow adds there depend on all other nodes, also on
    those that only this rank has.

    Example:
        >>> name_on_all_ranks(Call("allreduce"), "cond/then/_13/cond/x")
        'cond/then/cond/x'
        >>> name_on_all_ranks(Call("allreduce", name="a:0"), "outer_1/a_0")
        'outer_1/a:0'
        >>> name_on_all_ranks(Call("allreduce", "a", bare=True), "outer_1/a")
        'a'
    """
    way = re.sub(r"/_\d+(?=/)", "", node)
    if call.bare:
        return call.name or way.rpartition("/")[2]
    given = node_name(call.name)
    if given and way.endswith(given):
        return way[: -len(given)] + call.name
    return way


def node_name(name: str) -> str:
    """A name as TensorFlow allows nodes to have it."""
    name = re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", name)
    return name if re.match(r"[A-Za-z0-9.]|$", name) else f"x{name}"


def under_way() -> int:
    """How many operations graphs have begun and not finished."""
    return len(_flights)


def forget() -> None:
    """Lets go of what graphs have not taken, because something else in them failed."""
    late = time.monotonic() - _FORGET_AFTER
    for number, flight in list(_flights.items()):
        flight.look()
        if flight.ended < late:
            _flights.pop(number, None)


def prepare_signal() -> None:
    """Makes what one more operation waits with."""
    signals.prepare()


@functools.cache
def ensure_registered() -> None:
    """Tells TensorFlow of the nodes, once."""
    signals.ensure_registered()
    number, tokens = "number: int64", "token: N * int64"
    of_queue = "signals: M * resource"
    kinds: tuple[tuple[str, list[str], list[str], Any], ...] = (
        (
            "RingjaxStart",
            ["tensors: T", "anchors: N * resource"],
            [number, of_queue],
            _start,
        ),
        ("RingjaxFinish", [number, tokens, of_queue], ["results: T"], _finish),
        ("RingjaxWait", [number], ["results: T"], _wait),
        ("RingjaxNumber", [], ["number: int32"], _number),
    )
    for name, inputs, outputs, compute in kinds:
        later = compute is _wait
        c_api.register(name, inputs, outputs, _read, compute, failures.code_of, later)
