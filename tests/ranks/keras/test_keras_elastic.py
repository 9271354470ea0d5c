"""An elastic Keras job like Horovod's example: a rank is lost in `fit`, another joins.

test_tensorflow_elastic.py tests a loss in a step of TensorFlow, and
tests/support/keras_callback_checks.py tests resets without a loss.
"""

from __future__ import annotations

import pytest
from support.elastic_job import Start

# The first `one_step` and the reset callback both call `fit`, because `fit` creates the
# variables of the optimizer. So all ranks make equal calls, whether they join or stay.
FIT = """
os.environ["KERAS_BACKEND"] = "jax"
sys.modules["sklearn"] = None  # stops Keras from importing scikit-learn, which is slow
import keras
import ringjax.keras as hvd

rows = np.random.default_rng(WORKER).normal(size=(24, 2)).astype("float32")
data = rows, rows[:, :1]
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")

def say_step():
    model.jax_state_sync()  # within fit, the optimizer's variables are out of date
    say("step", int(model.optimizer.iterations), hvd.size())

def one_step():
    model.fit(*data, batch_size=4, steps_per_epoch=1, verbose=0)
    say_step()

one_step()
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([one_step])

class Report(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        say_step()
        say("batch", batch, state.epoch)

    def on_epoch_end(self, epoch, logs=None):
        stop = float(os.path.exists(sys.argv[0] + ".stop"))
        model.stop_training = bool(hvd.allreduce(stop, op=hvd.Max, name="stop"))
        say("epoch", state.epoch, self.params["steps"])

callbacks = [
    Report(),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state),
]

@hvd.elastic.run
def train(state):
    say("begin", hvd.rank(), hvd.size(), int(model.optimizer.iterations), state.epoch)
    model.fit(
        *data, batch_size=4, epochs=10**6 - state.epoch, callbacks=callbacks, verbose=0
    )

train(state)
variables = [*model.weights, *model.optimizer.variables]
say("end", state.epoch, *(np.asarray(v).tobytes().hex() for v in variables))
"""


@pytest.mark.timeout(300)
def test_a_worker_killed_in_fit_is_replaced_in_fit(
    start: Start,
) -> None:
    kill = "call.complete=kill@1#60"  # in the middle of a batch
    job = start(
        2, FIT, env={"RINGJAX_FAILPOINTS": kill, "RINGJAX_CHECK_PARAMETERS": "1"}
    )

    def alone() -> bool:
        return [size for _, size in job.lines(0, "step")[-3:]] == ["1"] * 3

    job.wait_for(alone, "steps of one", 150)
    assert len(job.lines(1, "step")) > 2, "worker 1 was killed before the training"
    job.add()
    job.wait_for(lambda: len(job.lines(2, "epoch")) > 2, "epochs of worker 2", 150)
    job.create_flag("stop")
    assert [job.wait(worker, 40) for worker in (0, 2)] == [0, 0]
    steps = [int(step) for step, _ in job.lines(0, "step")]
    assert steps == list(range(1, len(steps) + 1)), "steps are neither lost nor undone"
    epochs = [int(epoch) for epoch, _ in job.lines(0, "epoch")]
    assert epochs == list(range(len(epochs)))
    for epoch in epochs:
        batches = [int(b) for b, of in job.lines(0, "batch") if int(of) == epoch]
        assert batches[-6:] == list(range(6)), "an epoch that is counted is complete"
    [[_, size, *began]] = job.lines(2, "begin")
    assert size == "2" and began == job.lines(0, "begin")[-1][2:]
    # Worker 2 makes its first step alone and one in the reset callback, before it has
    # the state. Then it makes the steps of the job.
    own = [int(step) for step, _ in job.lines(2, "step")]
    assert own == [1, 2, *range(int(began[0]) + 1, len(steps) + 1)]
    assert job.lines(0, "end") == job.lines(2, "end") != []
    assert "parameters differ" not in job.logs()
