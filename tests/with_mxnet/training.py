"""ringjax.mxnet: training on several ranks equals one process with the whole batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import ringjax.mxnet as hvd
from ringjax.errors import Mismatch

pytestmark = pytest.mark.ranks(1, 2, 3)
BATCH, STEPS = 24, 50
DATA = np.random.default_rng(0).standard_normal((4 * BATCH, 12)).astype("f4")
LABELS = (DATA[:, :6].sum(1) > 0).astype("f4") + (DATA[:, 6] > 0)
SGD = ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3})


def dense(deferred: bool = False) -> gluon.HybridBlock:
    net = nn.HybridSequential()
    for units, inputs in (16, 12), (16, 16), (3, 16):
        kind = "tanh" if units > 3 else None
        net.add(nn.Dense(units, kind, in_units=0 if deferred else inputs))
    return net


def convolution() -> gluon.HybridBlock:
    """oneDNN keeps arrays of convolutions in layouts of its own."""
    net = nn.HybridSequential()
    net.add(nn.HybridLambda(lambda _, x: x.reshape((-1, 3, 2, 2))))
    net.add(nn.Conv2D(16, 2, in_channels=3, activation="relu"), nn.Flatten())
    net.add(nn.Dense(3, in_units=16))
    return net


def initialized(make: Callable[[], gluon.Block], seed: int) -> gluon.Block:
    mx.random.seed(seed)
    net = make()
    net.initialize(mx.init.Xavier())
    return net


def share(step: int, rank: int = 0, size: int = 1) -> slice:
    """Returns the rows of a rank in the batch of a step."""
    start, each = step * BATCH % len(DATA), BATCH // size
    return slice(start + rank * each, start + (rank + 1) * each)


def backward(net: gluon.Block, rows: slice, array: Any = mx.nd.array) -> int:
    """Computes gradients on some rows. Returns the number of rows."""
    with autograd.record():
        out = net(array(DATA[rows]))
        loss = gluon.loss.SoftmaxCrossEntropyLoss()(out, array(LABELS[rows]))
    loss.backward()
    return rows.stop - rows.start


def weights(net: gluon.Block) -> list[Any]:
    return [p.data().asnumpy() for p in net.collect_params().values()]


def close(found: gluon.Block, expected: gluon.Block, tolerance: float = 1e-5) -> None:
    """Asserts that two nets have the same weights, and all ranks exactly the same."""
    pairs = zip(weights(found), weights(expected), strict=True)
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)
    for others in hvd.allgather_object(weights(found)):
        for mine, theirs in zip(weights(found), others, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def both(
    world: Any,
    make: Callable[[], gluon.Block],
    optimizer: Any,
    array: Any = mx.nd.array,
    **options: Any,
) -> tuple[Any, ...]:
    """Returns a net and a trainer for one process, and for this rank of several."""
    inputs = array(DATA[:1])
    alone = initialized(make, 3)
    alone(inputs)  # now or before, the same weights are drawn
    net = initialized(make, 3 + world.rank)
    hvd.broadcast_parameters(net.collect_params())
    net(inputs)
    plain = gluon.Trainer(alone.collect_params(), *optimizer, kvstore=None)
    trainer = hvd.DistributedTrainer(net.collect_params(), *optimizer, **options)
    return alone, plain, net, trainer


SCENARIOS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "momentum": (dense, SGD, {}),
    "adam, two groups": (dense, ("adam", {"learning_rate": 0.01}), {"num_groups": 2}),
    "shapes known later": (lambda: dense(deferred=True), SGD, {}),
    "predivided": (dense, SGD, {"gradient_predivide_factor": 2.0, "prefix": "a"}),
    "convolution": (convolution, SGD, {}),
    "rescaled": (dense, ("sgd", {"learning_rate": 0.1, "rescale_grad": 0.5}), {}),
}


@pytest.mark.parametrize("hybrid", [False, True], ids=["imperative", "hybrid"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gluon_equals_one_process(world, scenario: str, hybrid: bool) -> None:
    make, optimizer, options = SCENARIOS[scenario]
    alone, plain, net, trainer = both(world, make, optimizer, **options)
    for each in (alone, net) if hybrid else ():
        each.hybridize(static_alloc=True)
    for step in range(STEPS):
        plain.step(backward(alone, share(step)))
        trainer.step(backward(net, share(step, world.rank, world.size)))
    close(net, alone)


def test_gradients_in_several_parts(world, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvd, "_PART", 20)  # elements
    alone, plain, net, trainer = both(world, dense, SGD)
    for step in range(STEPS):
        plain.step(backward(alone, share(step)))
        trainer.step(backward(net, share(step, world.rank, world.size)))
    close(net, alone)
    parts = hvd._Averaging(1.0, 0, hvd.global_process_set)._parts([9, 30, 5, 15, 1])
    assert parts == [[4, 3, 2], [1], [0]]


@contextmanager
def numpy_arrays() -> Iterator[None]:
    mx.npx.set_np()
    try:
        yield
    finally:
        mx.npx.reset_np()


def test_numpy_arrays_equal_one_process(world) -> None:
    with numpy_arrays():
        alone, plain, net, trainer = both(
            world, lambda: dense(deferred=True), SGD, mx.np.array
        )
        for step in range(STEPS):
            plain.step(backward(alone, share(step), mx.np.array))
            rows = share(step, world.rank, world.size)
            trainer.step(backward(net, rows, mx.np.array))
        assert isinstance(net[0].weight.data(), mx.np.ndarray)
        close(net, alone)


def test_gradients_are_clipped_between_allreduce_and_update(world) -> None:
    alone, plain, net, trainer = both(world, dense, SGD)
    for step in range(STEPS):
        pairs = (
            (alone, plain, share(step)),
            (net, trainer, share(step, world.rank, world.size)),
        )
        for each, its_trainer, rows in pairs:
            count = backward(each, rows)
            its_trainer.allreduce_grads()
            gradients = [p.grad() for p in each.collect_params().values()]
            norm = gluon.utils.clip_global_norm(gradients, 0.1 * count)
            assert norm > 0.1 * count
            its_trainer.update(count)
    close(net, alone)


def test_gradients_of_several_passes_and_frozen_parameters(world) -> None:
    alone, plain, net, trainer = both(world, dense, SGD)
    for each in alone, net:
        each.collect_params().setattr("grad_req", "add")
        each[1].collect_params().setattr("grad_req", "null")
    frozen = net[1].weight.data().asnumpy()
    for step in range(STEPS):
        for each, its_trainer, part in (
            (alone, plain, ()),
            (net, trainer, (world.rank, world.size)),
        ):
            each.collect_params().zero_grad()
            count = sum(backward(each, share(2 * step + i, *part)) for i in range(2))
            its_trainer.step(count)
    close(net, alone)
    np.testing.assert_array_equal(net[1].weight.data().asnumpy(), frozen)


class Scale(gluon.Block):
    """Multiplies with float16 weights. Dense layers have no float16 on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.params.get("weight", shape=(1, 12), dtype="float16")

    def forward(self, x: Any) -> Any:
        return (x.astype("float16") * self.weight.data()).sum(axis=1)


def test_float16_weights_with_multi_precision(world) -> None:
    optimizer = ("sgd", {"learning_rate": 0.01, "multi_precision": True})
    alone, plain, net, trainer = both(world, Scale, optimizer)
    for step in range(STEPS):
        for each, its_trainer, part in (
            (alone, plain, ()),
            (net, trainer, (world.rank, world.size)),
        ):
            rows = share(step, *part)
            with autograd.record():
                labels = mx.nd.array(LABELS[rows], dtype="float16")
                wrong = each(mx.nd.array(DATA[rows])) - labels
                loss = (wrong * wrong).sum()
            loss.backward()
            its_trainer.step(rows.stop - rows.start)
    assert net.weight.data().dtype == np.float16
    close(net, alone, 5e-3)  # float16 has 11 bits


def test_compressed_gradients(world) -> None:
    compression = hvd.Compression.fp16
    alone, plain, net, trainer = both(world, dense, SGD, compression=compression)
    for step in range(10):
        plain.step(backward(alone, share(step)))
        trainer.step(backward(net, share(step, world.rank, world.size)))
    close(net, alone, 1e-3)
    integers = mx.nd.ones(2, dtype="int32")
    assert compression.compress(integers)[0] is integers


class Branches(gluon.Block):
    """Two layers side by side, of which a batch may use only one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        self.layers.add(nn.Dense(2, in_units=12), nn.Dense(2, in_units=12))

    def forward(self, x: Any) -> Any:
        return self.layers[0](x) + self.layers[1](x)

    def backward_of_one(self, rank: int, step: int) -> None:
        """Computes gradients of a layer; of none at all in every third step."""
        if step % 3 == 2:
            return
        with autograd.record():
            rows = mx.nd.array(DATA[share(step, rank, 3)])
            loss = self.layers[rank % 2](rows).sum()
        loss.backward()


def test_a_layer_that_only_some_ranks_use(world) -> None:
    """The ranks stay equal, and a rank without the layer contributes zeros."""
    optimizer = ("sgd", {"learning_rate": 0.01, "momentum": 0.9})
    alone, plain, net, trainer = both(world, Branches, optimizer)
    for step in range(9):
        total: dict[str, Any] = {}
        for rank in range(world.size):
            alone.backward_of_one(rank, step)
            for name, param in alone.collect_params().items():
                if param.data()._fresh_grad:
                    total[name] = total.get(name, 0) + param.grad().asnumpy()
                    param.data()._fresh_grad = False
        for name, gradient in total.items():
            param = alone.collect_params()[name]
            param.grad()[:] = gradient
            param.data()._fresh_grad = True
        plain.step(world.size, ignore_stale_grad=True)
        net.backward_of_one(world.rank, step)
        trainer.step(1, ignore_stale_grad=True)
    close(net, alone)
    with pytest.raises(UserWarning, match="has not been updated"):
        trainer.step(1)


def test_gradients_that_were_written_by_hand(world) -> None:
    *_, net, trainer = both(world, dense, SGD)
    net[0].bias.grad()[:] = world.rank + 1
    trainer.allreduce_grads()
    expected = np.full(16, (world.size + 1) / 2, "f4")
    np.testing.assert_array_equal(net[0].bias.grad().asnumpy(), expected)


def test_states_are_saved_and_loaded(world, tmp_path: Path) -> None:
    alone, plain, net, trainer = both(world, dense, ("adam", {"learning_rate": 0.01}))
    for step in range(20):
        plain.step(backward(alone, share(step)))
        if step == 10:
            file = str(tmp_path / f"states.{world.rank}")
            trainer.save_states(file)
            params = net.collect_params()
            trainer = hvd.DistributedTrainer(params, "adam", {"learning_rate": 9.0})
            trainer.load_states(file)
            assert trainer.learning_rate == 0.01
        trainer.step(backward(net, share(step, world.rank, world.size)))
    close(net, alone)


def test_a_plain_trainer_with_a_distributed_optimizer(world, tmp_path: Path) -> None:
    alone, plain, net, _ = both(world, dense, SGD)
    optimizer = hvd.DistributedOptimizer(mx.optimizer.create(SGD[0], **SGD[1]))
    trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore=None)
    for step in range(STEPS):
        plain.step(backward(alone, share(step)))
        trainer.step(backward(net, share(step, world.rank, world.size)))
        if step == 10:
            trainer.save_states(str(tmp_path / "states"))
            trainer.load_states(str(tmp_path / "states"))
            assert type(trainer.optimizer) is hvd.DistributedOptimizer
    close(net, alone)


@pytest.mark.ranks(2)
def test_nets_that_differ_are_an_error_after_which_training_goes_on(world) -> None:
    net = nn.HybridSequential()
    net.add(nn.Dense(3 + world.rank, in_units=12), nn.Dense(3, in_units=3 + world.rank))
    net.initialize()
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", num_groups=4)
    backward(net, share(0))
    with pytest.raises(Mismatch, match=r"'gradient\.\d'.*f32"):
        trainer.step(BATCH)
    *_, net, trainer = both(world, dense, SGD)
    trainer.step(backward(net, share(0)))


def test_a_learning_rate_schedule(world) -> None:
    def optimizer() -> tuple[str, dict[str, Any]]:
        schedule = mx.lr_scheduler.FactorScheduler(step=5, factor=0.5, base_lr=0.1)
        return "sgd", {"lr_scheduler": schedule}

    alone, plain, net, trainer = both(world, dense, optimizer())
    plain = gluon.Trainer(alone.collect_params(), *optimizer(), kvstore=None)
    for step in range(STEPS):
        plain.step(backward(alone, share(step)))
        trainer.step(backward(net, share(step, world.rank, world.size)))
    assert trainer.learning_rate < 0.001
    close(net, alone)


# -- Module ----------------------------------------------------------------------------


def trained_module(optimizer: Any, seed: int, rank: int = 0, size: int = 1) -> Any:
    """Fits a Module on the rows of a rank. Returns its parameters."""
    mx.random.seed(seed)
    out = mx.sym.Variable("data")
    for name, units in ("a", 16), ("b", 3):
        out = mx.sym.FullyConnected(out, num_hidden=units, name=name)
        out = mx.sym.Activation(out, act_type="tanh") if units > 3 else out
    parts = [share(step, rank, size) for step in range(4)]
    rows = [np.concatenate([x[part] for part in parts]) for x in (DATA, LABELS)]
    batches = mx.io.NDArrayIter(*rows, BATCH // size)
    module = mx.mod.Module(mx.sym.SoftmaxOutput(out, name="softmax"))
    module.bind(batches.provide_data, batches.provide_label)
    module.init_params(mx.init.Xavier())
    arguments, others = module.get_params()
    if size > 1:
        hvd.broadcast_parameters(arguments)
    module.set_params(arguments, others)
    with warnings.catch_warnings():
        # A wrong rescale_grad is a warning, too.
        warnings.filterwarnings("ignore", ".*already initialized")
        module.fit(batches, optimizer=optimizer, num_epoch=13)
    return {name: value.asnumpy() for name, value in module.get_params()[0].items()}


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_module_equals_one_process(world, name: str) -> None:
    def optimizer(batch: int) -> Any:
        made = mx.optimizer.create(name, learning_rate=0.01, rescale_grad=1 / batch)
        made.set_lr_mult({"a_weight": 0.1})  # found by the names that Module sets
        return made

    expected = trained_module(optimizer(BATCH), 3)
    mine = hvd.DistributedOptimizer(optimizer(BATCH // world.size), num_groups=2)
    found = trained_module(mine, 3 + world.rank, world.rank, world.size)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-5)


def test_a_distributed_optimizer_is_one_for_readers_and_writers(world) -> None:
    plain = mx.optimizer.create("sgd", learning_rate=0.1)
    optimizer = hvd.DistributedOptimizer(plain, gradient_predivide_factor=2.0)
    optimizer.rescale_grad = 0.5
    optimizer.set_learning_rate(0.2)
    assert (plain.rescale_grad, plain.lr, optimizer.lr) == (0.5, 0.2, 0.2)
    for each in optimizer, copy.deepcopy(optimizer):
        weight, gradient = mx.nd.zeros(2), mx.nd.ones(2) * world.rank
        each.update(0, weight, gradient, each.create_state(0, weight))
        mean = np.full(2, (world.size - 1) / 2)
        np.testing.assert_allclose(weight.asnumpy(), -0.1 * mean, rtol=1e-6)


@pytest.mark.ranks(3)
def test_an_optimizer_of_a_process_set(world) -> None:
    pair = hvd.add_process_set([0, 2])
    optimizer = hvd.DistributedOptimizer(mx.optimizer.Test(), process_set=pair)
    weight, gradient = mx.nd.zeros(2), mx.nd.ones(2) * world.rank
    optimizer.update(0, weight, gradient, optimizer.create_state(0, weight))
    assert weight.asnumpy().tolist() == [1.0, 1.0]  # rank 1: its own; 0 and 2: the mean
    hvd.remove_process_set(pair)


# -- parameters ------------------------------------------------------------------------


@pytest.mark.parametrize("root", [0, -1])
def test_only_the_root_loads_a_file(world, tmp_path: Path, root: int) -> None:
    root = root % world.size
    net, saved = dense(deferred=True), initialized(dense, 5)
    if world.rank == root:
        saved.save_parameters(str(tmp_path / "net.params"))
        net.load_parameters(str(tmp_path / "net.params"))
    else:
        net.initialize()
    hvd.broadcast_parameters(net.collect_params(), root_rank=root)
    close(net, saved, 0)


def test_a_parameter_is_broadcast_once_when_its_shape_is_known(world) -> None:
    net = initialized(lambda: dense(deferred=True), world.rank)
    for prefix in "net.", "again.":
        hvd.broadcast_parameters(net.collect_params(), prefix=prefix)
    net(mx.nd.ones((2, 12)))
    [first, *others] = hvd.allgather_object(weights(net))
    for other in others:
        assert all(map(np.array_equal, first, other))
    if world.rank == 0:  # alone: no other rank takes part
        net[0].weight.initialize(force_reinit=True)


@pytest.mark.ranks(2)
def test_parameters_that_differ_are_named(world) -> None:
    broadcast = hvd.broadcast_parameters
    some = {"a": mx.nd.ones(2), f"only on {world.rank}": mx.nd.ones(1)}
    with pytest.raises(ValueError, match="rank 1 and rank 0 .*'only on 0', 'only on 1"):
        broadcast(some)
    with pytest.raises(Mismatch, match=r"'a'"):
        broadcast({"a": mx.nd.ones(2 + world.rank)})
    param = gluon.Parameter("p", shape=(0, 3), allow_deferred_init=True)
    if world.rank == 1:
        param.shape = (2, 3)
    param.initialize()
    with pytest.raises(ValueError, match="rank 1 knows the shapes of .'p'. and rank 0"):
        broadcast({"p": param})


@pytest.mark.ranks(1)
def test_wrong_arguments_of_a_broadcast() -> None:
    net = dense()
    with pytest.raises(ValueError, match="collect_params.* got a HybridSequential"):
        hvd.broadcast_parameters(net)
    with pytest.raises(ValueError, match="root_rank is 1, expected a rank"):
        hvd.broadcast_parameters(net.collect_params(), root_rank=1)


@pytest.mark.ranks(2)
def test_parameters_without_values_are_refused() -> None:
    with pytest.raises(RuntimeError, match="has not been initialized"):
        hvd.broadcast_parameters(dense().collect_params())


# -- arguments -------------------------------------------------------------------------


@pytest.mark.ranks(1)
def test_wrong_arguments_of_a_trainer() -> None:
    net = initialized(dense, 0)
    params = net.collect_params()

    def trainer(params: Any = params, optimizer: Any = "sgd", **options: Any) -> Any:
        return hvd.DistributedTrainer(params, optimizer, **options)

    with pytest.raises(ValueError, match="leave out kvstore .'device'."):
        trainer(kvstore="device")
    with pytest.raises(ValueError, match="update_on_kvstore .True."):
        trainer(update_on_kvstore=True)
    assert trainer(kvstore=None, update_on_kvstore=False)
    with pytest.raises(TypeError, match="collect_params.* got a Trainer"):
        trainer(gluon.Trainer(params, "sgd"))
    with pytest.raises(ValueError, match="gradient_predivide_factor must be > 0"):
        trainer(gradient_predivide_factor=0)
    with pytest.raises(ValueError, match="num_groups must be 0 or more, not -1"):
        trainer(num_groups=-1)
    with pytest.raises(TypeError, match="compression"):
        trainer(compression="fp16")
    with pytest.warns(UserWarning, match="have unwrapped it for you"):
        found = trainer(optimizer=hvd.DistributedOptimizer(mx.optimizer.SGD()))
    assert type(found.optimizer) is mx.optimizer.SGD


@pytest.mark.ranks(1)
def test_parameters_that_cannot_be_reduced_are_named() -> None:
    embedding = nn.Embedding(4, 2, sparse_grad=True)
    embedding.initialize()
    params = embedding.collect_params()
    with pytest.raises(ValueError, match="embedding.*_weight .*sparse_grad=False"):
        hvd.DistributedTrainer(params, "sgd")
    net = dense()
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    with pytest.raises(ValueError, match=r"is on .*initialize it with ctx=mx.cpu\(\)"):
        hvd.DistributedTrainer(net.collect_params(), "sgd")


@pytest.mark.ranks(1)
def test_an_optimizer_must_be_a_plain_one() -> None:
    for wrong in "sgd", hvd.DistributedOptimizer(mx.optimizer.SGD()):
        with pytest.raises(TypeError, match="expected a plain optimizer"):
            hvd.DistributedOptimizer(wrong)
