"""Checks in some steps whether all ranks have equal variables, eagerly and in graphs.

`ringjax.eager.parameter_check` prints the warnings. A graph counts its steps, and reads
its variables only in a step whose parameters are compared. A thread of ringjax compares
the hashes, so no thread of TensorFlow waits for other ranks. In a graph that XLA
compiles, the check is the native call that JAX's programs make, too.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import tensorflow as tf

from ringjax import _native, stderr
from ringjax.eager import parameter_check
from ringjax.errors import NotInitialized, PeerLost, RingjaxError
from ringjax.tensorflow import c_api, failures, tf_private, xla_collectives
from ringjax.tensorflow.collective_spec import CollectiveSpec, process_set_id_of
from ringjax.tensorflow.eager_collectives import address_of, describe_tensors
from ringjax.tensorflow.gradient_names import gradient_namer
from ringjax.tensorflow.kernel_registration import register_op
from ringjax.tensorflow.pending_operations import OwnedTensors
from ringjax.tensorflow.tf_types import Variable
from ringjax.tensorflow.variables import unwrap_variable
from ringjax.world.process_set import ProcessSet

_threads: dict[str, threading.Thread] = {}  # the last thread of each title


@dataclass(frozen=True, slots=True)
class _ParameterCheck:
    """The data that the nodes of a check carry.

    Attributes:
        title: the name of the check. All ranks use the same title, and no other check
            in the graph has it.
        step_key: identifies the step counter on this rank.
        names: the names of the variables.
    """

    title: str
    step_key: str
    process_set_id: int
    names: list[str]

    def process_set(self) -> ProcessSet:
        return CollectiveSpec("check", self.title, self.process_set_id).process_set()


def check(
    title: str, variables: Sequence[Variable], process_set: ProcessSet, every: int
) -> list[tf.Operation]:
    """Compares variables between ranks; all ranks call it where they reduce gradients.

    Args:
        title: the owner of the variables; the same on all ranks.
        variables: the variables. Other objects, and the reference variables of
            TensorFlow 1, are left out.
        process_set: the ranks that take part; this rank must be among them.
        every: the value of RINGJAX_CHECK_PARAMETERS.

    Returns:
        In a graph, the operations that the reduction must wait for.
    """
    named = _with_names(variables)
    if not every or not named:
        return []
    plain = [variable for _, variable in named]
    step_key = parameter_check.identity_key(plain)
    if tf_private.executing_eagerly():
        try:
            parameter_check.check(
                title,
                lambda: _memory_of(named),
                process_set,
                whose=step_key,
                first=parameter_check.AFTER_FIRST_STEP,
            )
        except (RingjaxError, ValueError, TypeError) as error:
            raise failures.to_tensorflow_error(error) from None
        return []
    number = process_set_id_of(process_set, "check")
    names = [name for name, _ in named]
    if tf_private.is_compiled(tf.compat.v1.get_default_graph()):
        call = CollectiveSpec(
            "check", f"the check of the parameters of {title}", number
        )
        values = [variable.read_value() for variable in plain]
        xla_collectives.check(
            call, values, names, every, parameter_check.AFTER_FIRST_STEP
        )
        return []
    unique_title = gradient_namer(f"{title}.check")()
    return _add_nodes(_ParameterCheck(unique_title, step_key, number, names), plain)


def _with_names(variables: Sequence[Variable]) -> list[tuple[str, tf.Variable]]:
    found = []
    for variable in variables:
        plain = unwrap_variable(variable)
        if isinstance(plain, tf.Variable) and hasattr(plain, "handle"):
            name = getattr(variable, "path", "") or plain.name.removesuffix(":0")
            found.append((name, plain))
    uses = Counter(name for name, _ in found)
    return [
        (name if uses[name] == 1 else f"{name} ({i})", plain)
        for i, (name, plain) in enumerate(found)
    ]


def _memory_of(
    named: Sequence[tuple[str, tf.Variable]],
) -> Iterator[tuple[str, int, int]]:
    for name, variable in named:
        _, (array,) = describe_tensors("check", name, [tf.convert_to_tensor(variable)])
        yield name, address_of(array), array.nbytes


def _add_nodes(
    checked: _ParameterCheck, variables: Sequence[tf.Variable]
) -> list[tf.Operation]:
    _ensure_registered()
    text = json.dumps(asdict(checked))
    with tf.device("CPU:0"):
        (step,) = tf_private.add_node("RingjaxCheckDue", None, call=text).outputs
        step.set_shape([])

        def compare() -> tf.Operation:
            values = [variable.read_value() for variable in variables]
            return tf_private.add_node(
                "RingjaxCheck", None, step=step, tensors=values, call=text
            )

        done = tf.cond(step >= 0, compare, tf.no_op)
    return [] if done is None else [done]


def _count(checked: _ParameterCheck, context: int) -> None:
    process_set = checked.process_set()
    step = parameter_check.due_step(
        checked.step_key, process_set, parameter_check.AFTER_FIRST_STEP
    )
    c_api.put_scalar(context, 0, c_api.INT64, step)


def _compare(checked: _ParameterCheck, context: int) -> None:
    step, *values = c_api.tensors.inputs(context, c_api.count_inputs(context))
    owned = OwnedTensors(values)
    number = c_api.take_scalar(step)
    memory = [(c_api.data_of(t) or 0, c_api.bytes_of(t)) for t in owned.tensors]
    hashes = _native.hash_memory(memory)
    # Checks of one title run one after another, so that all ranks exchange the hashes
    # of the same step.
    before = _threads.get(checked.title)
    thread = threading.Thread(
        target=_exchange,
        args=(checked, number, hashes, before),
        name="ringjax-tensorflow-check",
        daemon=True,
    )
    _threads[checked.title] = thread
    thread.start()


def _exchange(
    checked: _ParameterCheck,
    step: int,
    hashes: list[int],
    before: threading.Thread | None,
) -> None:
    if before is not None:
        before.join()
    try:
        parameter_check.compare(
            checked.title,
            step,
            checked.names,
            hashes,
            checked.process_set(),
            checked.step_key,
        )
    except (PeerLost, NotInitialized):
        pass  # the reduction of the gradients reports this failure, too
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        stderr.line(f"[ringjax] warning: parameters could not be compared: {cause}")


def _create(text: str, _: str) -> _ParameterCheck:
    return _ParameterCheck(**json.loads(text))


@functools.cache
def _ensure_registered() -> None:
    register = functools.partial(register_op, create=_create)
    register("RingjaxCheckDue", [], ["step: int64"], compute=_count)
    register("RingjaxCheck", ["step: int64", "tensors: T"], [], compute=_compare)
