"""The parameter check of tapes and optimizers of TensorFlow warns if variables differ.

tests/support/keras_parameter_checks.py tests the optimizers of Keras.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.frameworks import in_ranks
from support.parameter_warnings import (
    check_every,
    errors,
    read_warnings,
    warning_of_rank_0,
)

tf, hvd = in_ranks("tensorflow"), in_ranks("ringjax.tensorflow")

# Tests that need no third rank run on two ranks, because tracing is slow.
pytestmark = [
    pytest.mark.ranks(3),
    pytest.mark.launch("tensorflow"),
    pytest.mark.usefixtures("world"),
]
MODES = pytest.mark.parametrize("mode", ["eager", "function", "xla"])


class Training:
    """Two variables, and training steps that shrink them."""

    def __init__(
        self, mode: str, optimizer: Any = None, name: str = "", **options: Any
    ) -> None:
        self.first = tf.Variable([1.0, 2.0, 3.0], name=f"{name}first")
        self.other = tf.Variable(tf.ones([4, 2]), name=f"{name}other")
        self.variables = [self.first, self.other]
        self._optimizer, self._options = optimizer, options
        step = self._apply if optimizer else self._descend
        compiled = mode == "xla"
        self._step: Callable[[], Any] = (
            step if mode == "eager" else tf.function(step, jit_compile=compiled)
        )

    def _loss(self) -> Any:
        return sum(tf.reduce_sum(tf.square(v)) for v in self.variables)

    def _descend(self) -> None:
        with tf.GradientTape() as tape:
            loss = self._loss()
        tape = hvd.DistributedGradientTape(tape, **self._options)
        for gradient, variable in zip(
            tape.gradient(loss, self.variables), self.variables, strict=True
        ):
            variable.assign_sub(0.1 * gradient)

    def _apply(self) -> None:
        pairs = self._optimizer.compute_gradients(self._loss, self.variables)
        self._optimizer.apply_gradients(pairs)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def change(self, variable: Any, is_here: bool) -> None:
        variable.assign_add(tf.fill(variable.shape, float(is_here)))

    def broadcast(self) -> None:
        hvd.broadcast_variables(self.variables, root_rank=0)


def legacy(**options: Any) -> Any:
    plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    return hvd.DistributedOptimizer(plain, **options)


def check_warnings(world: Any, capfd: Any, training: Training, passes: int = 1) -> None:
    """Checks the warnings without a broadcast, after a broadcast, and after drift.

    The parameters are compared in every second step.
    """
    last = world.size - 1
    training.change(training.other, world.rank == last)
    training.run(6 * passes)
    assert read_warnings(capfd) == warning_of_rank_0(world, 1, "other", last)
    training.broadcast()
    training.run(4 * passes)
    assert read_warnings(capfd) == []
    training.change(training.first, world.rank == 1)
    training.run(2 * passes)
    assert read_warnings(capfd) == warning_of_rank_0(world, 11, "first", 1)


@MODES
def test_a_tape_reports_a_forgotten_broadcast(world, capfd, monkeypatch, mode) -> None:
    check_every(monkeypatch, 2)
    check_warnings(world, capfd, Training(mode))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("mode", "passes"), [("eager", 2), ("function", 1), ("function", 2)]
)
def test_an_optimizer_reports_a_forgotten_broadcast(
    world, capfd, monkeypatch, mode, passes
) -> None:
    check_every(monkeypatch, 2)
    optimizer = legacy(backward_passes_per_step=passes)
    check_warnings(world, capfd, Training(mode, optimizer), passes)


@pytest.mark.ranks(2)
def test_the_check_in_a_session(world, capfd, monkeypatch) -> None:
    check_every(monkeypatch, 2)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        make = tf.compat.v1.get_variable
        start = tf.constant([1.0, 2.0 + world.rank])
        kept = make("kept", initializer=start, use_resource=True)
        old = make("old", initializer=start, use_resource=False)
        loss = tf.reduce_sum(kept * kept + old * old)
        step = legacy().minimize(loss, var_list=[kept, old])
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(4):
            session.run(step)
    assert read_warnings(capfd) == warning_of_rank_0(world, 1, "kept", 1)


@pytest.mark.ranks(2)
@MODES
def test_the_broadcast_after_the_first_step_is_in_time(
    world, capfd, monkeypatch, mode
) -> None:
    check_every(monkeypatch, 1)
    # Each training counts its own steps. With XLA, steps are counted by the names of
    # variables, so the names must differ.
    names = ("a_", "b_") if mode == "xla" else ("", "")
    both = [Training(mode, name=name) for name in names]
    for training in both:
        training.change(training.first, world.rank == 0)
        training.run(1)
    for training in both:
        training.broadcast()
    for training in both:
        training.run(3)
    assert read_warnings(capfd) == []


@pytest.mark.ranks(2)
@MODES
def test_no_check_if_it_is_off(world, capfd, monkeypatch, mode) -> None:
    check_every(monkeypatch, 0)
    training = Training(mode)
    training.change(training.first, world.rank == 0)
    training.run(4)
    assert read_warnings(capfd) == []


@pytest.mark.ranks(3)
@MODES
def test_a_process_set_is_compared_within_itself(
    world, capfd, monkeypatch, mode
) -> None:
    check_every(monkeypatch, 2)
    members = hvd.add_process_set([0, 2])
    training = Training(mode, process_set=members)
    training.change(training.first, world.rank == 1)
    training.run(4)
    assert read_warnings(capfd) == []
    training.change(training.other, world.rank == 2)
    training.run(2)
    assert read_warnings(capfd) == warning_of_rank_0(world, 5, "other", 2)
    hvd.remove_process_set(members)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_the_wait_for_a_rank_without_the_check_is_limited(
    world, capfd, monkeypatch, mode
) -> None:
    # The timeout also applies to the first step, so it must exceed the usual delay
    # between the ranks.
    members = hvd.add_process_set(hvd.ProcessSet([0, 1], timeout=5.0))
    check_every(monkeypatch, 2 if world.rank == 0 else 0)
    training = Training(mode, process_set=members)
    training.run(1)
    if mode == "eager":
        if world.rank == 0:
            with pytest.raises(tf.errors.DeadlineExceededError, match="the check of"):
                training.run(1)
    else:
        training.run(1)  # the step does not wait for the check
        text = errors(capfd)
        warned = "warning: parameters could not be compared: Stalled: " in text
        assert warned == (world.rank == 0), text
    hvd.remove_process_set(members)


@pytest.mark.ranks(2)
def test_sources_that_are_no_variables_are_skipped(world, capfd, monkeypatch) -> None:
    check_every(monkeypatch, 1)
    own = tf.constant([1.0 + world.rank])
    for _ in range(3):
        with tf.GradientTape() as tape:
            tape.watch(own)
            loss = own * own
        hvd.DistributedGradientTape(tape).gradient(loss, [own])
    assert read_warnings(capfd) == []
