"""Tests of gradients in TensorFlow on one rank: buckets, names, sums, bad arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import ringjax
from ringjax import errors
from ringjax.errors import translate as failure

pytestmark = [pytest.mark.ranks(1), pytest.mark.launch("tensorflow")]


@pytest.fixture(scope="module")
def tf() -> Iterator[Any]:
    """Imports TensorFlow when the first test of this file runs."""
    import tensorflow

    ringjax.init()
    yield tensorflow
    ringjax.shutdown()


@pytest.fixture
def slices(tf: Any) -> Any:
    return tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([3, 2]))


def test_buckets_have_one_dtype_and_a_size(tf: Any, slices: Any) -> None:
    from ringjax.tensorflow.gradients import plan_buckets

    gradients = [
        *(tf.zeros(500), slices, None, tf.zeros(500, tf.float64), tf.zeros(600)),
        *(tf.zeros(400), tf.zeros(2000), slices, tf.zeros(3)),
    ]
    found = plan_buckets(gradients, [], 4000)
    assert sorted(i for unit in found for i in unit) == [0, 1, 3, 4, 5, 6, 7, 8]
    for unit in found:
        kinds = {(type(gradients[i]), gradients[i].dtype) for i in unit}
        assert len(kinds) == 1
        if 1 not in unit:
            size = sum(int(np.prod(gradients[i].shape)) * 4 for i in unit)
            assert len(unit) == 1 or size <= 4000
    assert [1, 7] in found and [6] in found and [5, 4] in found
    together = plan_buckets(gradients, [[0, 1, 3, 6], [8, 2]], 4000)
    assert together[:4] == [[0, 6], [1], [3], [8]]
    assert sorted(i for unit in together for i in unit) == [0, 1, 3, 4, 5, 6, 7, 8]
    assert plan_buckets([None, None], [], 4000) == []


def test_buckets_of_unknown_shapes(tf: Any) -> None:
    from ringjax.tensorflow.gradients import plan_buckets

    found = []

    @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec([None, 2])])
    def look(one: Any, two: Any) -> None:
        found.append(plan_buckets([one, two], [], 4000))

    look.get_concrete_function()
    assert found == [[[1, 0]]]


def test_names_do_not_depend_on_the_number_of_traces(tf: Any) -> None:
    """A function that creates variables is traced twice, but not on all ranks."""
    from ringjax.tensorflow.gradient_names import gradient_namer

    def program(made: list[Any]) -> list[str]:
        last: dict[str, str] = {}

        @tf.function
        def inner(x: Any) -> Any:
            if not made:
                made.append(tf.Variable(1.0))
            name = gradient_namer("step")
            last["inner"] = f"{name()} {name()}"
            return x + made[0]

        @tf.function
        def other(x: Any) -> Any:
            last["other"] = gradient_namer("step")()
            return x + 1.0

        @tf.function
        def outer(x: Any) -> Any:
            last["outer"] = gradient_namer("step")()
            inner.get_concrete_function(x)
            y = other(inner(x)) + tf.cond(x > 0, lambda: inner(x), lambda: x)
            last["end"] = gradient_namer("step")()
            return y

        assert float(outer(tf.constant(1.0))) == 5.0
        return list(last.items())

    assert program([]) == program([tf.Variable(1.0)])
    assert program([]) == [
        ("outer", "step.gradients.1"),
        ("inner", "step.gradients.2 step.gradients.3"),
        ("other", "step.gradients.4"),
        ("end", "step.gradients.5"),
    ]


def test_groups_are_found_by_their_variables(tf: Any) -> None:
    import keras

    from ringjax.tensorflow.gradients import group_indices

    variables = [tf.Variable(1.0), keras.Variable(2.0), tf.Variable(3.0)]
    other = tf.Variable(1.0)
    groups = [[variables[2], other, variables[1].value], []]
    assert group_indices(groups, [1, 1, 1], variables) == [[2, 1], []]
    assert group_indices(None, [1, 1, 1], variables) == []
    assert group_indices(2, [1, None, 1], variables) == [[0], [2]]
    with pytest.raises(ValueError, match="can only appear once"):
        group_indices([[other], [other]], [1], [other])


BAD = [
    ({"op": 3}, "op must be Average, Sum or Adasum"),
    ({"op": 1, "gradient_predivide_factor": 2.0}, "not supported with op != Average"),
    ({"gradient_predivide_factor": 0.0}, "must be > 0"),
    ({"gradient_predivide_factor": float("nan")}, "must be > 0"),
    ({"groups": 0}, "groups should be a non-negative integer"),
    ({"groups": -1}, "groups should be a non-negative integer"),
    ({"groups": ["x"]}, "groups should be a non-negative integer"),
    ({"groups": 1.5}, "groups should be a non-negative integer"),
]


@pytest.mark.parametrize(("options", "text"), BAD)
def test_bad_arguments(tf: Any, options: dict[str, Any], text: str) -> None:
    import ringjax.tensorflow as hvd

    legacy = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    makers: list[Callable[..., Any]] = [
        lambda **more: hvd.DistributedGradientTape(tf.GradientTape(), **more),
        lambda **more: hvd.PartialDistributedGradientTape(tf.GradientTape(), **more),
        lambda **more: hvd.DistributedOptimizer(legacy, **more),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=text):
            make(**options)


def test_wrong_tapes_and_optimizers_are_refused(tf: Any) -> None:
    import keras

    import ringjax.tensorflow as hvd

    with pytest.raises(TypeError, match=r"must be a tf\.GradientTape, not 5"):
        hvd.DistributedGradientTape(5)
    tape = hvd.DistributedGradientTape(tf.GradientTape(persistent=True))
    with pytest.raises(TypeError, match="a DistributedGradientTape already"):
        hvd.DistributedGradientTape(tape)
    with pytest.raises(ValueError, match="doesn't inherit from either legacy"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(ValueError, match="Adasum is not supported yet with Keras"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Adasum)
    legacy = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    with pytest.raises(ValueError, match="does not support average_aggregated_grad"):
        hvd.DistributedOptimizer(
            legacy, op=hvd.Adasum, average_aggregated_gradients=True
        )
    with pytest.raises(ValueError, match="backward_passes_per_step must be > 0"):
        hvd.DistributedOptimizer(legacy, backward_passes_per_step=0)
    with pytest.warns(DeprecationWarning, match="has been replaced by `groups`"):
        hvd.DistributedGradientTape(tf.GradientTape(), num_groups=2)


def test_the_reducer_checks_its_arguments(tf: Any, slices: Any) -> None:
    from ringjax.tensorflow.gradients import GradientBucketReducer, GradientSettings

    variable = tf.Variable(1.0)
    reduction = GradientBucketReducer(GradientSettings("test"))
    assert reduction([None, None]) == [None, None] and reduction([], []) == []
    with pytest.raises(ValueError, match="2 gradients of 1 variables"):
        reduction([None, None], [variable])
    reduction.register_local(variable)
    assert reduction.is_local(variable) and not reduction.is_local(tf.Variable(1.0))
    with pytest.raises(ValueError, match="variables are needed"):
        reduction([tf.ones(2)])
    with pytest.raises(NotImplementedError, match="sparse_as_dense=True"):
        GradientBucketReducer(GradientSettings("test", op=ringjax.Adasum))([slices])


def test_tapes_may_be_subclasses_and_recording(tf: Any) -> None:
    import ringjax.tensorflow as hvd

    class Mine(tf.GradientTape):
        def __init__(self, extra: int) -> None:
            super().__init__(persistent=True)
            self.extra = extra

    x = tf.Variable(3.0)
    with Mine(5) as tape:
        y = x * x
    mine = hvd.DistributedGradientTape(tape)
    assert isinstance(mine, Mine) and mine.extra == 5
    nested = mine.gradient(y, {"a": x, "b": [x, tf.Variable(1.0)]})
    assert float(nested["a"]) == 6.0 and nested["b"][1] is None
    zero = tf.UnconnectedGradients.ZERO
    assert float(mine.gradient(y, tf.Variable(1.0), unconnected_gradients=zero)) == 0
    with hvd.DistributedGradientTape(tf.GradientTape()) as recording:
        y = x * x
    assert float(recording.gradient(y, [x])[0]) == 6.0
    with tf.GradientTape() as tape:
        y = x * x
        tape = hvd.DistributedGradientTape(tape)
        assert float(tape.gradient(y, [x])[0]) == 6.0


def test_local_aggregation_sums_several_passes(tf: Any, slices: Any) -> None:
    from ringjax.tensorflow.aggregation import LocalAggregation

    fails = [True]

    def reduce(gradients: list[Any], _: Sequence[Any]) -> list[Any]:
        if fails:
            raise errors.PeerLost(f"made up {fails.pop()}")
        return [None if g is None else g * 10.0 for g in gradients]

    sums = LocalAggregation(2, reduce, True, True, "test")
    given, applied = [tf.constant([1.0, 2.0]), None, slices], []
    assert sums.compute_gradients(given, [])[1] is None
    with pytest.raises(errors.PeerLost):
        sums.compute_gradients(given, [])
    assert int(sums.counter) == 0  # the sums are reset
    for step in range(4):
        found = sums.compute_gradients(given, [])
        call = lambda step=step: applied.append(step)  # noqa: E731
        sums.apply_gradients(call, lambda: None, found)
        if step % 2:
            np.testing.assert_array_equal(found[0], [10.0, 20.0])
            np.testing.assert_array_equal(found[2], [[0, 0], [10, 10], [0, 0]])
    assert applied == [1, 3]
    sparse = LocalAggregation(2, reduce, False, True, "test")
    with pytest.raises(ValueError, match="IndexedSlices are not supported when"):
        sparse.compute_gradients([slices], [])


def test_failures_are_converted_from_and_to_tensorflow(tf: Any) -> None:
    from ringjax.tensorflow.failures import to_tensorflow_error

    lost = to_tensorflow_error(errors.PeerLost("RINGJAX[world]: rank 2 is gone", 2))
    assert isinstance(lost, tf.errors.UnknownError) and failure(lost) is lost
    again = copy.copy(lost)  # calls __reduce__, as pickle does
    assert isinstance(again, errors.PeerLost)
    assert (again.rank, str(again)) == (2, str(lost))
    node = "\n\t [[{{node RingjaxFinish}}]] [Op:__inference_step_7]"
    text = "Graph execution error:\n\nRINGJAX[world]: rank 3 has shut down"
    cases = [
        (tf.errors.UnknownError, errors.PeerLost),
        (tf.errors.FailedPreconditionError, errors.Mismatch),
        (tf.errors.DeadlineExceededError, errors.Stalled),
        (tf.errors.InvalidArgumentError, errors.InvalidArgument),
    ]
    for theirs, ours in cases:
        found = failure(theirs(None, None, text + node))
        assert type(found) is ours
        assert str(found) == "RINGJAX[world]: rank 3 has shut down"
    assert failure(tf.errors.UnknownError(None, None, "the disk is full")) is None
