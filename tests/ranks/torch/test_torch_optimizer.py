"""DistributedOptimizer on several ranks trains like one process with all data.

Every rank also trains a reference, an equal model with a plain optimizer, on the
batches of all ranks. test_torch_training.py tests the usage and the errors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import ringjax.torch as hvd

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.launch("torch")]
# Three ranks run all code that two ranks run. One test of each file runs on two, too.
RANKS = pytest.mark.ranks(1, 3)


class Net(torch.nn.Module):
    """A model that uses the bias `last` twice, and the layer `spare` only on demand."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(4, 6)
        self.middle = torch.nn.Linear(6, 6)
        self.last = torch.nn.Linear(6, 2)
        self.spare = torch.nn.Linear(6, 6)

    def forward(self, x, spare: bool = False):
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.spare(x) if spare else self.middle(x))
        return self.last(x) + 0.5 * self.last.bias


def batch(rank: int, step: int, rows: int = 3):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 4, generator=generator)


def loss_of(model, x, **kwargs):
    return model(x, **kwargs).square().mean()


def close(model, reference, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


class ModelPair:
    """A distributed model, and a reference that has the data of all ranks."""

    def __init__(self, world, make, model=None, **options) -> None:
        self.world, self.step = world, 0
        self.model = Net() if model is None else model
        self.reference = copy.deepcopy(self.model)
        self.optimizer = hvd.DistributedOptimizer(
            make(self.model.parameters()), self.model.named_parameters(), **options
        )
        self.plain = make(self.reference.parameters())

    def train(
        self,
        steps: int = 4,
        loss: Callable = lambda model, rank, step: loss_of(model, batch(rank, step)),
        factor: float = 1.0,
    ) -> None:
        """Makes steps with the loss of this rank and, in the reference, of all ranks.

        `factor` multiplies the loss of the reference if the reduction is no average.
        """
        size = self.world.size
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss(self.model, self.world.rank, self.step).backward()
            self.optimizer.step()
            self.plain.zero_grad()
            for rank in range(size):
                (loss(self.reference, rank, self.step) * factor / size).backward()
            self.plain.step()
            self.step += 1


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


OPTIMIZERS = {
    "sgd": sgd,
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_equals_that_of_one_process_with_all_data(world, kind: str) -> None:
    pair = ModelPair(world, OPTIMIZERS[kind])
    pair.train()
    # Adam divides by the root of a tiny square, which amplifies rounding errors.
    close(pair.model, pair.reference, rtol=1e-4, atol=1e-5)


@RANKS
@pytest.mark.parametrize("factor", [1.0, 0.25, 3.0])
def test_predivide_factor_changes_nothing(world, factor: float) -> None:
    pair = ModelPair(world, sgd, gradient_predivide_factor=factor)
    pair.train()
    close(pair.model, pair.reference)


@RANKS
def test_sum(world) -> None:
    pair = ModelPair(world, sgd, op=hvd.Sum)
    pair.train(factor=world.size)
    close(pair.model, pair.reference)


@RANKS
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_compression(world, name: str) -> None:
    compression = getattr(hvd.Compression, name)
    pair = ModelPair(world, sgd, compression=compression)
    pair.train()
    close(pair.model, pair.reference, rtol=0.05, atol=0.01)
    if world.size > 1:
        # Each gradient is rounded to 16 bits before the sum.
        pair.optimizer.zero_grad()
        loss_of(pair.model, batch(world.rank, 9)).backward()
        weight, expected = pair.model.last.weight, 0
        for rank in range(world.size):
            loss = loss_of(copy.deepcopy(pair.model), batch(rank, 9))
            (grad,) = torch.autograd.grad(loss_of(pair.model, batch(rank, 9)), [weight])
            expected = expected + compression.compress(grad)[0].double()
            assert loss.isfinite()
        pair.optimizer.synchronize()
        half = compression.compress(weight.grad)[0]
        assert torch.equal(half.to(weight.dtype), weight.grad)
        torch.testing.assert_close(
            weight.grad.double(), expected / world.size, rtol=0.02, atol=1e-4
        )


@RANKS
@pytest.mark.parametrize("own_compression", [False, True])
def test_a_custom_compression(world, own_compression: bool) -> None:
    class Halved:
        @staticmethod
        def compress(tensor):
            return tensor * 0.5, 2.0

        @staticmethod
        def decompress(tensor, context):
            return tensor * context

    options = {"compression": Halved} if own_compression else {}
    pair = ModelPair(world, sgd, **options)
    pair.train()
    close(pair.model, pair.reference)


@RANKS
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_backward_passes_add_up_locally(world, passes: int) -> None:
    pair = ModelPair(world, sgd, backward_passes_per_step=passes)

    def train() -> None:
        for _ in range(3):
            pair.optimizer.zero_grad()
            pair.plain.zero_grad()
            for _ in range(passes):
                pair.step += 1
                loss_of(pair.model, batch(world.rank, pair.step)).backward()
                for rank in range(world.size):
                    loss = loss_of(pair.reference, batch(rank, pair.step))
                    (loss / world.size).backward()
            pair.optimizer.step()
            pair.plain.step()
        close(pair.model, pair.reference)

    train()
    passes += 1
    pair.optimizer.set_backward_passes_per_step(passes)
    train()


@RANKS
@pytest.mark.parametrize("wanted", [1, 3, 20, "lists", "num_groups"])
def test_groups(world, wanted) -> None:
    model = Net()
    if wanted == "lists":
        lists = [[model.last.weight, model.first.bias], [model.spare.weight]]
        pair = ModelPair(world, sgd, model, groups=lists)
    elif wanted == "num_groups":
        with pytest.warns(DeprecationWarning):
            pair = ModelPair(world, sgd, model, num_groups=2)
    else:
        pair = ModelPair(world, sgd, model, groups=wanted)
    pair.train()
    close(pair.model, pair.reference)


@RANKS
@pytest.mark.parametrize("wanted", [None, 2])
def test_ranks_may_use_different_layers(world, wanted) -> None:
    def loss(model, rank, step):
        return loss_of(model, batch(rank, step), spare=(rank + step) % 2 == 0)

    pair = ModelPair(world, sgd, groups=wanted)
    pair.train(6, loss)
    close(pair.model, pair.reference)


@RANKS
def test_ranks_may_have_different_buckets(world, monkeypatch) -> None:
    pair = ModelPair(world, sgd)
    # The first bucket has one gradient, all gradients or some, depending on the rank.
    size = [0, 1 << 20, 200][world.rank]
    monkeypatch.setattr("ringjax.torch.reducer._FIRST_BUCKET", size)
    pair.train(6)
    close(pair.model, pair.reference)


@RANKS
def test_ranks_may_have_their_parameters_in_other_orders(world) -> None:
    model = Net()
    pairs = list(model.named_parameters())
    pairs = pairs[world.rank :] + pairs[: world.rank]
    optimizer = hvd.DistributedOptimizer(sgd([p for _, p in pairs]), pairs, groups=3)
    reference = Net()
    plain = sgd(reference.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(world.rank, step), spare=True).backward()
        optimizer.step()
        plain.zero_grad()
        for rank in range(world.size):
            loss = loss_of(reference, batch(rank, step), spare=True)
            (loss / world.size).backward()
        plain.step()
    close(model, reference)


@RANKS
def test_frozen_parameters(world) -> None:
    model = Net()
    model.first.requires_grad_(False)
    pair = ModelPair(world, sgd, model)
    pair.train(2)
    assert model.first.weight.grad is None
    for net in (pair.model, pair.reference):  # the optimizers exist already
        net.first.requires_grad_(True)
        net.middle.requires_grad_(False)
        net.middle.zero_grad()
    before = model.middle.weight.clone()
    pair.train(3)
    close(pair.model, pair.reference)
    assert torch.equal(model.middle.weight, before)
    assert model.middle.weight.grad is None
    for net in (pair.model, pair.reference):
        net.middle.requires_grad_(True)
    pair.train(3)
    close(pair.model, pair.reference)
    assert not torch.equal(model.middle.weight, before)


@RANKS
def test_parameters_that_are_added_later(world) -> None:
    pair = ModelPair(world, sgd)
    pair.train(2)
    torch.manual_seed(5)
    extra = torch.nn.Linear(4, 2)
    extras = (extra, copy.deepcopy(extra))
    pair.optimizer.add_param_group({"params": extras[0].parameters(), "lr": 0.02})
    pair.plain.add_param_group({"params": extras[1].parameters(), "lr": 0.02})

    def loss(model, rank, step):
        more = extras[0 if model is pair.model else 1]
        x = batch(rank, step)
        return (model(x) + more(x)).square().mean()

    pair.train(3, loss)
    close(pair.model, pair.reference)
    close(*extras)
    assert not torch.equal(extra.weight, torch.nn.Linear(4, 2).weight)


@RANKS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(world, dtype) -> None:
    pair = ModelPair(world, sgd, Net().to(dtype))
    pair.train(3, lambda model, rank, step: loss_of(model, batch(rank, step).to(dtype)))
    exact = dtype == torch.float64
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if exact else {"rtol": 0.1, "atol": 0.1}
    close(pair.model, pair.reference, **tolerance)


@RANKS
def test_gradients_that_are_not_contiguous(world) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 2)
    ).to(memory_format=torch.channels_last)

    def loss(model, rank, step):
        x = torch.randn(
            2, 3, 4, 4, generator=torch.Generator().manual_seed(rank + step)
        )
        return model(x.to(memory_format=torch.channels_last)).square().mean()

    pair = ModelPair(world, sgd, model)
    pair.train(3, loss)
    close(pair.model, pair.reference)


@RANKS
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("groups", [None, 1])
def test_sparse_gradients(world, dense: bool, groups) -> None:
    torch.manual_seed(2)
    model = torch.nn.Embedding(10, 3, sparse=True)

    def loss(model, rank, step):
        x = torch.tensor([[1, 2 + rank, 4], [4, 3, 9 - step % 2]])
        return model(x).square().sum()

    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    pair = ModelPair(world, make, model, sparse_as_dense=dense, groups=groups)
    pair.train(4, loss)
    close(pair.model, pair.reference)
    assert pair.model.weight.grad.is_sparse


@RANKS
@pytest.mark.parametrize("dense", [False, True])
def test_sparse_gradients_missing_on_one_rank(world, dense: bool) -> None:
    torch.manual_seed(2)
    model = torch.nn.ModuleList(
        [torch.nn.Embedding(7, 3, sparse=True), torch.nn.Embedding(7, 3, sparse=True)]
    )

    def loss(model, rank, step):
        # All ranks use both tables in the first step, and later one of the tables.
        tables = model if step == 0 else [model[(rank + step) % 2]]
        x = torch.tensor([[1, 2, 5 - rank]])
        return sum((i + 1) * t(x).square().sum() for i, t in enumerate(tables))

    def make(parameters):
        return torch.optim.SparseAdam(list(parameters), lr=0.1)

    pair = ModelPair(world, make, model, sparse_as_dense=dense)
    if world.size == 1:
        pair.train(1, loss)
    else:
        pair.train(4, loss)
    close(pair.model, pair.reference)
