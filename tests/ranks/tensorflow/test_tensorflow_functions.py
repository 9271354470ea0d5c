"""Broadcasts of variables and objects in TensorFlow, and batch normalization."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.launch("tensorflow")]
# Most tests run on three ranks only; one test of each file also runs on two.
RANKS = pytest.mark.ranks(3)


DTYPES = [
    *("float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8"),
    *("uint32", "uint64", "bool", "complex64"),
]


@RANKS
@pytest.mark.parametrize("mode", ["eager", "function", "graph"])
def test_broadcast_variables(world, tf, hvd, mode: str) -> None:
    def build() -> Any:
        return [
            tf.Variable(tf.cast(tf.fill([i + 1, 2], (world.rank + i) % 2 + 1), dtype))
            for i, dtype in enumerate(DTYPES)
        ]

    for root in (0, world.size - 1):
        for inplace in (False, True):
            options = {"root_rank": root, "inplace": inplace}
            if mode == "graph":
                with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                    variables = build()
                    move = hvd.broadcast_variables(variables, **options)
                    session.run(tf.compat.v1.global_variables_initializer())
                    session.run(move)
                    found = session.run(variables)
            else:
                variables = build()

                def move(variables: Any = variables, options: dict = options) -> None:
                    result = hvd.broadcast_variables(variables, **options)
                    assert mode == "function" or result is None

                (tf.function(move) if mode == "function" else move)()
                found = [variable.numpy() for variable in variables]
            for i, (array, dtype) in enumerate(zip(found, DTYPES, strict=True)):
                value = np.full((i + 1, 2), (root + i) % 2 + 1)
                expected = tf.cast(tf.constant(value), dtype)
                assert array.dtype == expected.dtype.as_numpy_dtype
                np.testing.assert_array_equal(array, expected.numpy())


@RANKS
def test_broadcast_variables_of_keras(world, tf, hvd) -> None:
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(
                2, kernel_initializer=keras.initializers.Constant(world.rank)
            ),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5, seed=world.rank),
        ]
    )
    optimizer = keras.optimizers.Adam(0.1 * (1 + world.rank))
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=1)
    hvd.broadcast_variables(optimizer.variables, root_rank=1, inplace=True)
    np.testing.assert_array_equal(model.variables[0], np.ones((3, 2)))
    assert float(optimizer.learning_rate) == pytest.approx(0.2)
    hvd.broadcast_variables([], root_rank=0)
    alone = tf.Variable(float(world.rank))
    hvd.broadcast_variables(alone, root_rank=1)
    assert float(alone) == 1.0
    with pytest.raises(ValueError, match="root_rank"):
        hvd.broadcast_variables([alone], root_rank=world.size)


@pytest.mark.ranks(3)
def test_broadcasts_in_a_process_set(world, tf, hvd) -> None:
    pair = hvd.add_process_set([1, 2])
    variable = tf.Variable(float(world.rank))
    if pair.included():
        hvd.broadcast_variables([variable], root_rank=2, process_set=pair)
        assert float(variable) == 2.0
        sent = hvd.broadcast_object({world.rank}, root_rank=1, process_set=pair)
        assert sent == {1}
        bound = hvd.broadcast_object_fn(root_rank=2, process_set=pair)
        assert bound(world.rank) == 2
        assert hvd.allgather_object(world.rank, process_set=pair) == [1, 2]
    hvd.remove_process_set(pair)


class Pickled:
    """A class of the program. Its objects can only be sent by pickle."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pickled) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


@RANKS
def test_objects(world, tf, hvd) -> None:
    for value in (None, {"a": [1, 2.5], 0: "b"}, "text", (1, b"c"), np.arange(4.0)):
        mine = value if world.rank == 1 else 0
        np.testing.assert_equal(hvd.broadcast_object(mine, root_rank=1), value)
    rows = [
        {"rank": rank} | ({"more": 42} if rank == 1 else {})
        for rank in range(world.size)
    ]
    assert hvd.allgather_object(rows[world.rank], name="rows") == rows
    send = hvd.broadcast_object_fn(root_rank=0, name="bound")
    assert [send(Pickled(world.rank + i)).value for i in range(2)] == [0, 1]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        assert hvd.broadcast_object(world.rank, 1, session=session) == 1
        assert hvd.allgather_object("x", session=session) == ["x"] * world.size


@RANKS
def test_global_variables_of_tensorflow_1(world, tf, hvd) -> None:
    with pytest.raises(RuntimeError, match="does not support eager execution"):
        hvd.broadcast_global_variables(root_rank=0)
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("x", initializer=float(world.rank))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(hvd.broadcast_global_variables(1))
            assert session.run(variable) == 1.0
        hook = hvd.BroadcastGlobalVariablesHook(0, device="/cpu:0")
        train = tf.compat.v1.train
        with train.MonitoredTrainingSession(hooks=[hook]) as session:
            assert session.run(variable) == 0.0
    with tf.Graph().as_default():  # the hook works for another graph, too
        other = tf.compat.v1.get_variable("y", initializer=world.rank + 5.0)
        with train.MonitoredTrainingSession(hooks=[hook]) as session:
            assert session.run(other) == 5.0


# -- batch normalization ---------------------------------------------------------------


@RANKS
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_batch_normalization_of_all_batches(world, tf, hvd, mode: str) -> None:
    import keras

    rng = np.random.default_rng(0)
    for shape, axis in [((3,), -1), ((2, 5, 3), -1), ((3, 4), 1)]:
        # Batches of different sizes and a mean far from 0 reveal inexact formulas.
        rows = [
            rng.normal(50.0, 2.0, size=(r + 1, *shape)).astype("float32")
            for r in range(world.size)
        ]
        weights = [rng.normal(size=r.shape).astype("float32") for r in rows]
        ours = hvd.SyncBatchNormalization(axis=axis, momentum=0.5)
        plain = keras.layers.BatchNormalization(axis=axis, momentum=0.5)

        def run(layer: Any, x: Any, weight: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
                loss = tf.reduce_sum(y * weight)
            return y, tape.gradient(loss, [x, *layer.trainable_variables])

        for layer in (ours, plain):
            layer.build((None, *shape))
        compiled = tf.function(run) if mode == "function" else run
        y, gradients = compiled(
            ours, tf.constant(rows[world.rank]), tf.constant(weights[world.rank])
        )
        every = [tf.constant(np.concatenate(parts)) for parts in (rows, weights)]
        want, expected = run(plain, *every)
        start = sum(len(r) for r in rows[: world.rank])
        end = start + len(rows[world.rank])
        close = {"rtol": 2e-3, "atol": 2e-3}
        np.testing.assert_allclose(y, want[start:end], **close)
        np.testing.assert_allclose(gradients[0], expected[0][start:end], **close)
        for mine, whole in zip(gradients[1:], expected[1:], strict=True):
            added = np.sum(hvd.allgather_object(mine.numpy()), axis=0)
            np.testing.assert_allclose(added, whole, **close)
        np.testing.assert_allclose(ours.moving_mean, plain.moving_mean, **close)
        np.testing.assert_allclose(ours.moving_variance, plain.moving_variance, **close)
        x = tf.constant(rows[world.rank])
        np.testing.assert_allclose(ours(x), plain(x), **close)


@RANKS
def test_batch_normalization_with_a_mask(world, tf, hvd) -> None:
    import keras

    x = np.random.default_rng(1).normal(size=(world.size, 4, 3)).astype("float32")
    mask = np.arange(4)[None] <= np.arange(world.size)[:, None]
    ours, plain = hvd.SyncBatchNormalization(), keras.layers.BatchNormalization()
    here = slice(world.rank, world.rank + 1)
    found = ours(x[here], training=True, mask=tf.constant(mask[here]))
    want = plain(x, training=True, mask=tf.constant(mask))
    np.testing.assert_allclose(found, want[here], rtol=1e-3, atol=1e-3)
    assert ours.name.startswith("sync_batch_normalization") and not ours.supports_jit
    for fused in (True, None):
        with pytest.raises(ValueError, match="does not support fused=True"):
            hvd.SyncBatchNormalization(fused=fused)
    assert type(ours).from_config(ours.get_config()).axis == ours.axis


@pytest.mark.ranks(2)
def test_a_process_set_ends_with_its_world(world, hvd, tf) -> None:
    equal = hvd.add_process_set(hvd.ProcessSet([0, 1], timeout=30.0))
    assert hvd.allreduce(tf.ones(2), op=hvd.Sum, process_set=equal).numpy()[0] == 2
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(tf.ones(2), op=hvd.Sum).numpy()[0] == 2
