"""Elastic training in TensorFlow: states, failures, and a killed worker.

tests/unit/test_elastic.py tests the loop itself, with simulated errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.elastic_job import Start

RANKS = pytest.mark.ranks(3)  # three ranks run all code that two ranks run
pytestmark = pytest.mark.launch("tensorflow")


class Trained:
    """A model that differs between ranks, with its optimizer and its elastic state."""

    def __init__(self, world: Any, tf: Any, hvd: Any, mode: str, **more: Any) -> None:
        import keras

        self.world, self.tf = world, tf
        keras.utils.set_random_seed(world.rank)
        # The gradient of a bias would be only rounding errors, which Adam amplifies.
        first = keras.layers.Dense(3, use_bias=False)
        layers = [first, keras.layers.BatchNormalization()]
        self.model = keras.Sequential([keras.layers.Input((2,)), *layers])
        self.optimizer = keras.optimizers.Adam(0.1 * (1 + world.rank))
        self.state = hvd.elastic.TensorFlowKerasState(
            self.model, self.optimizer, step=10 * world.rank, log=[], **more
        )

        def train(rows: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.model(rows, training=True)))
            tape = hvd.DistributedGradientTape(tape)
            variables = self.model.trainable_variables
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

        self.train = tf.function(train) if mode == "function" else train

    def one_step(self) -> None:
        rng = np.random.default_rng((self.state.step, self.world.rank))
        self.train(self.tf.constant(rng.normal(size=(4, 2)).astype("float32")))
        self.state.log.append(self.state.step)
        self.state.step += 1

    def values(self) -> list[np.ndarray]:
        held = [*self.model.trainable_variables, *self.optimizer.variables]
        return [variable.numpy() for variable in held]


def same_everywhere(hvd: Any, values: list[np.ndarray]) -> None:
    for other in hvd.allgather_object(values):
        for one, two in zip(values, other, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.usefixtures("world")
@RANKS
def test_a_state_of_variables(world, tf, hvd) -> None:
    start = 1.0 if world.rank == 0 else 2.0
    variables = [tf.Variable(np.full(shape, start)) for shape in ((2, 2), (2,))]
    more = tf.Variable(world.rank + 1)
    state = hvd.elastic.TensorFlowState(
        variables, batch=20 + world.rank, epoch=10 + world.rank, more=more
    )
    state.sync()
    for variable in variables:
        np.testing.assert_array_equal(variable, np.ones(variable.shape))
    assert (state.batch, state.epoch, int(more)) == (20, 10, 1)

    def change() -> None:
        variables[0].assign([[1.0, 2.0], [3.0, 4.0]])
        variables[1].assign_sub([1.0, 1.0])
        more.assign(7)
        state.batch, state.epoch = 21, 11

    for _ in range(2):
        change()
        state.restore()
        for variable in variables:
            np.testing.assert_array_equal(variable, np.ones(variable.shape))
        assert (state.batch, state.epoch, int(more)) == (20, 10, 1)
    change()
    state.commit()
    # Saved values may share memory with a variable, so `assign` must not change them.
    variables[0].assign_add(np.ones((2, 2)))
    variables[1].scatter_nd_update([[0]], [5.0])
    state.restore()
    np.testing.assert_array_equal(variables[0], [[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(variables[1], [0.0, 0.0])
    assert (state.batch, state.epoch, int(more)) == (21, 11, 7)
    with pytest.raises(ValueError, match="must be built"):
        import keras

        hvd.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(1)]))


@pytest.mark.usefixtures("world")
@RANKS
def test_a_state_in_a_session(world, tf, hvd) -> None:
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("x", initializer=[float(world.rank + 1)])
        with pytest.raises(ValueError, match="needs a session"):
            hvd.elastic.TensorFlowState(batch=0)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            state = hvd.elastic.TensorFlowState(session=session, batch=world.rank)
            state.sync()
            assert session.run(variable)[0] == 1.0 and state.batch == 0
            variable.load([5.0], session)
            state.restore()
            assert session.run(variable)[0] == 1.0


@pytest.mark.usefixtures("world")
@RANKS
@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("failure", ["raised", "mismatch", "one leaves"])
def test_training_continues_after_a_failure(world, tf, hvd, mode, failure) -> None:
    trained, resets = Trained(world, tf, hvd, mode), []
    trained.state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    def graph_of(shape: list[int], name: str) -> Callable:
        call = lambda: hvd.allreduce(tf.ones(shape), name=name)  # noqa: E731
        return tf.function(call) if mode == "function" else call

    @hvd.elastic.run
    def train(state: Any, steps: int) -> int:
        while state.step < steps:
            trained.one_step()
            if state.step % 2 == 0:
                state.commit()
            elif state.step == 5 and len(resets) < 2:
                fail()
        return state.step

    def fail() -> None:
        # Change the model, because a step may fail after it has changed the model.
        trained.model.variables[0].assign_add(np.ones((2, 3)) * world.rank)
        if failure == "mismatch":
            graph_of([1 + world.rank], "mismatch")()
        if failure == "raised" or world.rank == 0:
            raise hvd.HorovodInternalError("made up")
        graph_of([3], "without rank 0")()

    assert train(trained.state, 8) == 8
    assert resets == [world.size] * 2
    assert trained.state.log == list(range(8))  # no step is lost or counted twice
    same_everywhere(hvd, trained.values())
    reference = Trained(world, tf, hvd, mode)
    reference.state.sync()
    while reference.state.step < 8:
        reference.one_step()
    for one, other in zip(trained.values(), reference.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("world")
@pytest.mark.ranks(2)
def test_programming_errors_are_not_retried(world, tf, hvd) -> None:
    attempts = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        attempts.append(1)
        tf.strings.to_number(tf.constant("no number"))

    with pytest.raises(tf.errors.InvalidArgumentError, match="no number"):
        train(hvd.elastic.TensorFlowState([tf.Variable(1.0)], step=0))
    assert attempts == [1]
    other = hvd.elastic.TensorFlowState([tf.Variable(1.0)])
    with pytest.raises(ValueError, match="has 1 variables, and here are 2"):
        other.variables = [tf.Variable(1.0)]
        handler = other._handlers["variables"]
        handler.value = [tf.Variable(1.0)] * 2
        other.restore()


# A worker is killed in a step of a compiled function and is replaced. The other workers
# keep their processes.
LOST_WORKER = """
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import tensorflow as tf
import ringjax.tensorflow as hvd

model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.01)
state = hvd.elastic.TensorFlowKerasState(model, optimizer, step=0)

@tf.function
def step(rows):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(rows)))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return hvd.size_op()

def stopped():  # all ranks must decide equally, but one may see the file earlier
    stop = tf.constant(float(os.path.exists(sys.argv[0] + ".stop")))
    return bool(hvd.allreduce(stop, op=hvd.Max, name="stop"))

@hvd.elastic.run
def train(state):
    say("begin", hvd.rank(), hvd.size(), state.step, int(optimizer.iterations))
    while not stopped():
        size = step(tf.ones((3, 2)) * (1.0 + state.step % 3))
        state.step += 1
        say("step", state.step, int(size), int(optimizer.iterations))
        state.commit()
    say("end", state.step, *model.get_weights()[0].ravel())

train(state)
"""


@pytest.mark.timeout(300)
def test_a_killed_worker_is_replaced(start: Start) -> None:
    job = start(
        *(2, LOST_WORKER),
        env={"RINGJAX_FAILURE_TIMEOUT": "5", "RINGJAX_CHECK_PARAMETERS": "1"},
    )
    job.wait_for(lambda: len(job.lines(0, "step")) > 3, "steps of two", 150)
    job.kill(1)
    alone = lambda: any(size == "1" for _, size, _ in job.lines(0, "step"))  # noqa: E731
    job.wait_for(alone, "steps of one", 40)
    job.add()
    job.wait_for(lambda: len(job.lines(2, "step")) > 3, "steps of worker 2", 150)
    job.create_flag("stop")
    assert (job.wait(0), job.wait(2)) == (0, 0), job.logs()
    steps = [int(step) for step, _, _ in job.lines(0, "step")]
    assert steps == list(range(1, len(steps) + 1)), "steps are neither lost nor undone"
    assert all(step == done for step, _, done in job.lines(0, "step"))
    assert job.lines(2, "begin")[0][2] == job.lines(2, "begin")[0][3] != "0"
    assert job.lines(0, "end") == job.lines(2, "end")
    assert "warning: the ranks' parameters" not in job.logs()
    assert "warning: parameters" not in job.logs()
