"""Now and then, a look whether all ranks have the same variables, in either mode.

The warning is in `ringjax.eager.parameter_check`. A graph counts, and reads its
variables only when a look is due; their hashes are compared by a thread of ours, so
that none of TensorFlow's waits for other ranks. What XLA compiles makes the call that
JAX makes.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from ringjax import _native, stderr
from ringjax.eager import parameter_check
from ringjax.errors import NotInitialized, PeerLost, RingjaxError
from ringjax.tensorflow import c_api, failures, nodes, tensors, xla_calls
from ringjax.tensorflow.calls import Call, number_of
from ringjax.tensorflow.gradient_names import names
from ringjax.tensorflow.pending import Held
from ringjax.tensorflow.variables import unwrapped
from ringjax.world.process_set import ProcessSet

_last: dict[str, threading.Thread] = {}


@dataclass(frozen=True, slots=True)
class _Look:
    """What the nodes of a look know.

    Attributes:
        title: whose variables, alike on all ranks and of no other look of its graph.
        whose: what steps are counted by, on this rank.
        process_set_id: the number of the ranks that take part.
        names: of the variables.
    """

    title: str
    whose: str
    process_set_id: int
    names: list[str]

    def members(self) -> ProcessSet:
        return Call("check", self.title, self.process_set_id).members()


def check(
    title: str, variables: Sequence[Any], process_set: ProcessSet, every: int
) -> list[Any]:
    """To be called where the variables' gradients are reduced, by all ranks.

    Args:
        title: of whose variables, alike on all ranks.
        variables: of TensorFlow or of Keras; whatever else is left out, and so are the
            old variables of TensorFlow 1.
        process_set: the ranks that take part; this rank is one of them.
        every: as RINGJAX_CHECK_PARAMETERS.

    Returns:
        What the reduction is to wait for, in a graph.

    Raises: as collectives, in eager mode; in graphs the reduction itself fails then.
    """
    named = _named(variables)
    if not every or not named:
        return []
    held = [variable for _, variable in named]
    whose = parameter_check.identity_key(held)
    if nodes.executing_eagerly():
        try:
            parameter_check.check(
                *(title, lambda: _memory(named), process_set),
                whose=whose,
                first=parameter_check.AFTER_FIRST_STEP,
            )
        except (RingjaxError, ValueError, TypeError) as error:
            raise failures.as_tensorflow(error) from None
        return []
    number = number_of(process_set, "check")
    written = [name for name, _ in named]
    if nodes.is_compiled(tf.compat.v1.get_default_graph()):
        call = Call("check", f"the check of the parameters of {title}", number)
        values = [variable.read_value() for variable in held]
        xla_calls.check(call, values, written, every, parameter_check.AFTER_FIRST_STEP)
        return []
    return _add(_Look(names(f"{title}.check")(), whose, number, written), held)


def _named(variables: Sequence[Any]) -> list[tuple[str, Any]]:
    found = []
    for variable in variables:
        held = unwrapped(variable)
        if isinstance(held, tf.Variable) and hasattr(held, "handle"):
            name = getattr(variable, "path", "") or held.name.removesuffix(":0")
            found.append((name, held))
    often = Counter(name for name, _ in found)
    return [
        (name if often[name] == 1 else f"{name} ({i})", held)
        for i, (name, held) in enumerate(found)
    ]


def _memory(named: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, int, int]]:
    for name, variable in named:
        _, (array,) = tensors.given("check", name, [tf.convert_to_tensor(variable)])
        yield name, tensors.address(array), array.nbytes


def _add(look: _Look, variables: Sequence[Any]) -> list[Any]:
    """Adds the nodes to the graph of the moment."""
    _ensure_registered()
    text = json.dumps(asdict(look))
    with tf.device("CPU:0"):
        (step,) = nodes.add("RingjaxCheckDue", None, call=text).outputs
        step.set_shape([])

        def compare() -> Any:
            values = [variable.read_value() for variable in variables]
            return nodes.add("RingjaxCheck", None, step=step, tensors=values, call=text)

        done = tf.cond(step >= 0, compare, tf.no_op)
    return [] if done is None else [done]


def _count(look: _Look, context: int) -> None:
    step = parameter_check.due_step(
        look.whose, look.members(), parameter_check.AFTER_FIRST_STEP
    )
    c_api.put_number(context, 0, c_api.INT64, step)


def _compare(look: _Look, context: int) -> None:
    step, *given = c_api.tensors.inputs(context, c_api.count_inputs(context))
    held = Held(given)
    number = c_api.number_of(step)
    places = [(c_api.data_of(t) or 0, c_api.bytes_of(t)) for t in held.tensors]
    hashes = _native.hash_memory(places)
    # One after the other, as on all ranks, where several have this name.
    before = _last.get(look.title)
    thread = threading.Thread(
        target=_exchange,
        args=(look, number, hashes, before),
        name="ringjax-tensorflow-check",
        daemon=True,
    )
    _last[look.title] = thread
    thread.start()


def _exchange(
    look: _Look, step: int, hashes: list[int], before: threading.Thread | None
) -> None:
    if before is not None:
        before.join()
    try:
        members = look.members()
        parameter_check.compare(
            look.title, step, look.names, hashes, members, look.whose
        )
    except (PeerLost, NotInitialized):
        pass  # the gradients' own operations say so
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        stderr.line(f"[ringjax] warning: parameters could not be compared: {why}")


def _read(text: str, _: str) -> _Look:
    return _Look(**json.loads(text))


@functools.cache
def _ensure_registered() -> None:
    """Tells TensorFlow of the nodes, once."""
    code = failures.code_of
    c_api.register("RingjaxCheckDue", [], ["step: int64"], _read, _count, code)
    ends = ["step: int64", "tensors: T"]
    c_api.register("RingjaxCheck", ends, [], _read, _compare, code)
