"""exact_allreduce and ExactGradients: the same bits from any number of ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.stacked import raises

import ringjax.torch as hvd
from ringjax.errors import InvalidArgument, Mismatch

RANKS = pytest.mark.ranks(1, 2, 3, 5)
pytestmark = [pytest.mark.ranks(3), pytest.mark.launch("torch")]

PIECES = 7
SHAPES = [(), (0,), (5,), (300, 4)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """PyTorch's kernels split their sums by the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def alone(world) -> Iterator[hvd.ProcessSet]:
    """A process set of this rank, in which one rank has all pieces."""
    sets = [hvd.add_process_set([rank]) for rank in range(world.size)]
    yield sets[world.rank]
    for each in sets:
        hvd.remove_process_set(each)


def piece_of(number: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Returns the tensors of a piece, whose elements differ in magnitude."""
    generator = torch.Generator().manual_seed(number)
    spread = torch.randint(-9, 4, (300, 4), generator=generator)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES]
    found[-1] = found[-1] * torch.exp2(spread.float())
    return [tensor.to(dtype) for tensor in found]


def own(world, pieces: int = PIECES) -> range:
    return range(world.rank, pieces, world.size)


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mean, other in zip(found, expected, strict=True):
        assert mean.dtype == other.dtype == torch.float32 and mean.shape == other.shape
        assert torch.equal(mean, other)


def means_of(pieces: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Returns the means, of sums that are correctly rounded to float64."""
    found = []
    for leaves in zip(*pieces, strict=True):
        rows = zip(*(leaf.double().flatten().tolist() for leaf in leaves), strict=True)
        means = [math.fsum(row) / len(pieces) for row in rows]
        found.append(torch.tensor(means).view(leaves[0].shape))
    return found


@RANKS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_mean_does_not_depend_on_ranks_or_order(world, alone, dtype) -> None:
    pieces = [piece_of(number, dtype) for number in range(PIECES)]
    given = {number: pieces[number] for number in own(world)}
    means = hvd.exact_allreduce(given, PIECES, like=pieces[0])
    same(means, hvd.exact_allreduce(dict(enumerate(pieces)), PIECES, process_set=alone))
    backwards = {number: pieces[number] for number in reversed(range(PIECES))}
    same(means, hvd.exact_allreduce(backwards, PIECES, process_set=alone))
    same(means, means_of(pieces))
    for i, mean in enumerate(means):  # the tensors do not depend on each other
        single = {number: [piece[i]] for number, piece in given.items()}
        same([mean], hvd.exact_allreduce(single, PIECES, like=[pieces[0][i]]))


@RANKS
def test_cancellation_extremes_and_values_that_are_not_finite(world) -> None:
    tiny = float(np.finfo(np.float32).tiny)
    columns = {
        "cancels": [2.0**40, 1.0, -(2.0**40)],
        "greatest": [3.0e38] * 3,
        "denormal": [tiny / 4] * 3,
        "normal": [tiny * 3, 0.0, 0.0],
        "zeros": [0.0, -0.0, 0.0],
        "nan": [1.0, math.nan, 1.0],
        "infinite": [1.0, 1.0, -math.inf],
    }
    tensors = [[torch.tensor([v[i], 1.0]) for v in columns.values()] for i in range(3)]
    given = {piece: tensors[piece] for piece in own(world, 3)}
    means = hvd.exact_allreduce(given, 3, like=tensors[0], name="extremes")
    found = dict(zip(columns, (mean.tolist() for mean in means), strict=True))
    assert found["cancels"] == [float(np.float32(1 / 3)), 1.0]
    assert found["greatest"] == [float(np.float32(3.0e38)), 0.0]
    assert found["denormal"] == [0.0, 1.0] == found["zeros"]
    # The unit follows from the 1 beside it, which is 2**126 times larger.
    assert found["normal"] == [0.0, 1.0]
    assert np.isnan([found["nan"], found["infinite"]]).all()
    huge = torch.tensor([1e300, 1.0], dtype=torch.float64)
    found = hvd.exact_allreduce({p: [huge] for p in own(world, 3)}, 3, like=[huge])
    assert found[0].isnan().all()  # is infinite as float32


def test_tensors_that_are_not_contiguous(world) -> None:
    tensor = torch.arange(12.0).view(3, 4).T
    given = {piece: [piece * tensor] for piece in own(world, 3)}
    assert torch.equal(hvd.exact_allreduce(given, 3)[0], tensor)
    negated = {piece: [torch._neg_view(piece * tensor)] for piece in own(world, 3)}
    assert torch.equal(hvd.exact_allreduce(negated, 3)[0], -tensor)


@pytest.mark.ranks(2)
def test_pieces_that_are_missing_or_given_twice_are_named(world) -> None:
    one = [torch.ones(2)]
    given = [{0: one, 1: one}, {1: one, 3: one}][world.rank]
    with raises(Mismatch, "pieces [2] were given by no rank and pieces [1] were given"):
        hvd.exact_allreduce(given, 4)
    with raises(Mismatch, "(rank 0: [0, 1], rank 1: [1, 3]); give rank r the pieces"):
        hvd.exact_allreduce(given, 4, name="losses")
    same(hvd.exact_allreduce({world.rank: one}, 2), one)  # the job goes on


@pytest.mark.ranks(2)
def test_ranks_whose_tensors_differ_are_named(world) -> None:
    one, more = torch.ones(2), torch.ones(2 + world.rank)
    count, shape = 1 + world.rank, [(3, 2), (2, 3)][world.rank]
    for tensors, pieces, text in (
        (
            [one, more],
            2,
            "[2], and rank 1 has tensor 1 of shape [3]",
        ),
        (
            [one] * count,
            2,
            "no further tensor, and rank 1 has tensor 1",
        ),
        ([torch.ones(2, 3).view(*shape)], 2, "0 has tensor 0 of shape [3, 2], and"),
        (
            [one],
            1 + count,
            "rank 0 has 2 pieces, and rank 1 has 3",
        ),
    ):
        with raises(Mismatch, text):
            hvd.exact_allreduce({world.rank: tensors}, pieces, name="losses")
    model = torch.nn.Linear(3, count)
    with raises(Mismatch, "rank 0 has the gradient of 'weight' of shape [1, 3], and"):
        for _ in hvd.ExactGradients(model, 2).pieces():
            model(torch.ones(3)).sum().backward()
    same(hvd.exact_allreduce({world.rank: [one]}, 2), [one])  # the job goes on


@pytest.mark.ranks(1)
def test_arguments_that_are_refused(world) -> None:
    one = torch.ones(2)
    for pieces in (0, -1, True, 70_000, "4"):
        with raises(ValueError, "expected 1 … 65,536"):
            hvd.exact_allreduce({}, pieces)
    for number in (4, -1, True, "0"):
        with raises(ValueError, "expected ints from 0 to 3"):
            hvd.exact_allreduce({number: [one]}, 4)
    with raises(ValueError, "this rank has no piece, so it needs `like`"):
        hvd.exact_allreduce({}, 4)
    with raises(ValueError, "piece 1 has 2 tensors, expected 1"):
        hvd.exact_allreduce({0: [one], 1: [one, one]}, 2)
    with raises(ValueError, "tensor 0 of piece 1 has the shape [3], expected [2]"):
        hvd.exact_allreduce({0: [one], 1: [torch.ones(3)]}, 2)
    sparse = torch.sparse_coo_tensor([[1]], [2.0], (3,), check_invariants=True)
    for wrong, text in (
        (sparse, "sparse tensors have no exact sums; pass tensor.to_dense()"),
        (
            torch.ones(2, dtype=torch.int64),
            "has dtype torch.int64, shape [2], layout",
        ),
        (torch.ones(2, dtype=torch.complex64), "expected float32, bfloat16"),
        (
            torch.ones(2, device="meta"),
            "device meta: exact sums are computed on",
        ),
        ([1.0], "tensor 0 of piece 0 is a list, expected a torch.Tensor"),
    ):
        with raises(TypeError, text):
            hvd.exact_allreduce({0: [wrong]}, 1, name="wrong")
    with raises(TypeError, "piece 0 has None"):
        hvd.exact_allreduce({0: [None]}, 1)


# -- ExactGradients --------------------------------------------------------------------


class Net(torch.nn.Module):
    """A convolution, a bfloat16 layer, and a parameter that few pieces use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.hidden = torch.nn.Linear(64, 16, dtype=torch.bfloat16)
        self.out = torch.nn.Linear(16, 3)
        self.rare = torch.nn.Parameter(torch.ones(3))
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        x = torch.nn.functional.dropout(torch.tanh(self.hidden(x.bfloat16())), 0.2)
        y = self.out(x.float())
        return y * self.rare if rare else y


def backward(model: Net, step: int, piece: int) -> None:
    torch.manual_seed(100 * step + piece)
    images, labels = torch.randn(4, 1, 6, 6), torch.randint(0, 3, (4,))
    images = images * (2.0**14 if step == 3 else 1)  # exponents that rise at once
    logits = model(images, rare=piece == 3)
    torch.nn.functional.cross_entropy(logits, labels).backward()


def digest(model: Net, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    for entry in optimizer.state.values():
        for tensor in entry.values():
            found.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trained_alone(alone: hvd.ProcessSet, steps: int) -> str:
    """Trains on one rank by exact_allreduce, without ExactGradients."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    running = [model.norm.running_mean, model.norm.running_var]
    for step in range(steps):
        given, before = {}, [buffer.clone() for buffer in running]
        for piece in reversed(range(PIECES)):
            optimizer.zero_grad()
            for buffer, value in zip(running, before, strict=True):
                buffer.copy_(value)
            backward(model, step, piece)
            grads = [
                torch.zeros_like(p) if p.grad is None else p.grad
                for p in model.parameters()
            ]
            pairs = zip(running, before, strict=True)
            changes = [buffer.double() - value.double() for buffer, value in pairs]
            given[piece] = [*grads, *changes]
        *means, mean, var = hvd.exact_allreduce(given, PIECES, process_set=alone)
        for (name, p), grad in zip(model.named_parameters(), means, strict=True):
            p.grad = None if name in ("unused", "frozen") else grad.to(p.dtype)
        running[0].copy_(before[0].double() + mean)
        running[1].copy_(before[1].double() + var)
        model.norm.num_batches_tracked.fill_(step + 1)
        optimizer.step()
    return digest(model, optimizer)


@RANKS
def test_a_model_has_the_bits_of_one_rank(world, alone) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    exact = hvd.ExactGradients(model, PIECES)
    for step in range(6):
        numbers = []
        for piece in exact.pieces():
            numbers.append(piece)
            backward(model, step, piece)
        assert numbers == list(own(world))
        assert model.unused.grad is None and model.frozen.grad is None
        assert model.hidden.weight.grad.dtype == torch.bfloat16
        optimizer.step()
    assert digest(model, optimizer) == trained_alone(alone, 6)


class Weight(torch.nn.Module):
    """A weight, and two buffers that a call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(2, dtype=torch.float64))

    def forward(self, scale: float) -> torch.Tensor:
        self.calls += 1
        self.last += scale
        return self.w.sum() * scale


def test_more_ranks_than_pieces(world) -> None:
    model = Weight()
    exact = hvd.ExactGradients(model, pieces=2)
    for piece in exact.pieces():
        model(1 + piece).backward()
    assert model.w.grad.tolist() == model.last.tolist() == [1.5, 1.5]
    assert model.calls == 1


@pytest.mark.ranks(2)
def test_a_loop_that_was_left_can_be_repeated(world) -> None:
    model = Weight()
    exact = hvd.ExactGradients(model, pieces=4)
    for _ in exact.pieces():
        model(99).backward()
        break
    assert model.calls == 0
    for step in range(2):
        for _ in exact.pieces():
            model(1).backward()
        assert model.w.grad.tolist() == [1.0, 1.0]
        assert model.last.tolist() == [1.0 + step] * 2 and model.calls == 1 + step


@pytest.mark.ranks(2)
def test_buffers_may_change_between_steps(world) -> None:
    model = Weight()
    exact = hvd.ExactGradients(model, pieces=4)
    for _ in range(3):
        model.last.fill_(5)
        for piece in exact.pieces():
            model(piece).backward()
        assert model.last.tolist() == [6.5, 6.5]


@pytest.mark.ranks(2)
def test_ranks_that_would_compute_other_bits_are_named(world) -> None:
    model = Weight()
    exact = hvd.ExactGradients(model, pieces=2)
    torch.set_num_threads(1 + world.rank)
    kind = InvalidArgument if world.rank else Mismatch
    with pytest.raises(kind, match="rank 0 has .* 1 threads, and rank 1 has .* 2 th"):
        for _ in exact.pieces():
            model(1).backward()
    torch.set_num_threads(1)
    for _ in exact.pieces():
        model(1).backward()
    assert model.w.grad.tolist() == [1.0, 1.0] and model.calls == 1


@pytest.mark.ranks(1, 2)
def test_a_distributed_optimizer_is_refused(world) -> None:
    model = Weight()
    exact = hvd.ExactGradients(model, pieces=2)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    distributed = hvd.DistributedOptimizer(plain, model.named_parameters())
    with raises(ValueError, "the gradient of 'w' is reduced by a DistributedOptimizer"):
        list(exact.pieces())
    assert model.w.grad is None and distributed is not plain


@pytest.mark.ranks(1)
def test_several_threads_are_warned_of(world, capfd) -> None:
    model = Weight()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        exact = hvd.ExactGradients(model, pieces=1)
        for _ in range(2):
            for _ in exact.pieces():
                model(1).backward()
        found = capfd.readouterr().err
        assert found.count("PyTorch has 2 threads, and its results") == threads - 1


@pytest.mark.ranks(1)
def test_models_and_loops_that_are_refused(world) -> None:
    model = Weight()
    exact = hvd.ExactGradients(model, pieces=2)
    with raises(RuntimeError, "piece 0 has no gradients; call backward()"):
        for _ in exact.pieces():
            model(1)
    with raises(RuntimeError, "buffer 'last' was replaced in piece 1"):
        for piece in exact.pieces():
            model(1).backward()
            if piece == 1:
                model.last = torch.ones(2)
    model, table = Weight(), torch.nn.Embedding(3, 2, sparse=True)
    exact = hvd.ExactGradients(model, pieces=2)
    with raises(RuntimeError, "buffer 'calls' of dtype torch.int64 was changed differ"):
        for piece in exact.pieces():
            model(1).backward()
            model.calls += piece
    exact = hvd.ExactGradients(table, pieces=1)
    with raises(TypeError, "the gradient of 'weight' of piece 0 has dtype torch.fl"):
        for _ in exact.pieces():
            table(torch.tensor([1])).sum().backward()
    with raises(TypeError, "parameter 'w' has dtype torch.float32, shape [2]"):
        hvd.ExactGradients(model.to("meta"), pieces=1)
    with raises(TypeError, "`model` is a list, expected a torch.nn.Module"):
        hvd.ExactGradients([model.w], pieces=1)
    with raises(TypeError, "module '1' is a SyncBatchNorm"):
        norm = torch.nn.Sequential(torch.nn.Linear(1, 2), hvd.SyncBatchNorm(2))
        hvd.ExactGradients(norm, pieces=1)
    with raises(ValueError, "`pieces` is 0"):
        hvd.ExactGradients(table, pieces=0)
