"""Elastic training in PyTorch without lost ranks: failures, resets and states.

tests/unit/test_elastic.py tests the loop itself, with simulated errors.
"""

from __future__ import annotations

import copy

import pytest
import torch

import ringjax.torch as hvd
from ringjax import elastic
from ringjax.errors import Mismatch

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.launch("torch")]
# Three ranks run all code that two ranks run; one test runs on two, too.
RANKS = pytest.mark.ranks(1, 3)


def build(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    # BatchNorm has buffers, which are not parameters.
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


def same_everywhere(*tensors: torch.Tensor) -> bool:
    rows = [hvd.allgather(t.detach().reshape(1, -1)) for t in tensors]
    return all(torch.equal(row, first) for r in rows for first in r[:1] for row in r)


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return list(model.state_dict().values())


class Trained:
    """A model that differs between ranks, with its optimizer and its elastic state."""

    def __init__(self, world, **extra) -> None:
        self.world = world
        self.model = build(seed=world.rank)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(self.model.parameters(), lr=0.01 * (1 + world.rank)),
            self.model.named_parameters(),
        )
        self.state = hvd.elastic.TorchState(
            self.model, self.optimizer, step=10 * world.rank, log=[], **extra
        )

    def batch(self, rank: int):
        generator = torch.Generator().manual_seed(100 * self.state.step + rank)
        return torch.randn(4, 3, generator=generator)

    def one_step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch(self.world.rank)).square().mean().backward()
        self.optimizer.step()
        self.state.log.append(self.state.step)
        self.state.step += 1


@RANKS
def test_sync_sends_the_state_of_rank_0(world) -> None:
    trained = Trained(world)
    state, expected = trained.state, values(build(seed=0))
    assert state.model is trained.model and state.optimizer is trained.optimizer
    state.sync()
    for one, other in zip(values(trained.model), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert state.step == 0
    assert trained.optimizer.param_groups[0]["lr"] == 0.01
    trained.one_step()
    assert same_everywhere(*trained.model.parameters())
    moments = [entry["exp_avg"] for entry in trained.optimizer.state.values()]
    assert len(moments) == 4 and same_everywhere(*moments)


@RANKS
def test_restore_returns_to_the_last_commit_every_time(world) -> None:
    trained = Trained(world)
    state, scheduler = trained.state, None
    state.sync()
    for _ in range(2):
        trained.one_step()
    state.commit()
    kept = copy.deepcopy((trained.model.state_dict(), trained.optimizer.state_dict()))
    for _ in range(2):
        for _ in range(2):
            trained.one_step()
        assert state.step == 4 and state.log == [0, 1, 2, 3]
        state.restore()
        assert state.step == 2 and state.log == [0, 1] and scheduler is None
        now = (trained.model.state_dict(), trained.optimizer.state_dict())
        torch.testing.assert_close(now, kept, rtol=0, atol=0)


@RANKS
def test_schedulers_are_restored_and_sent(world) -> None:
    model = build(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 + world.rank)
    state = hvd.elastic.TorchState(optimizer=optimizer, scheduler=scheduler)
    state.sync()
    assert scheduler.step_size == 2 and state.scheduler is scheduler
    optimizer.step()
    for _ in range(2):
        scheduler.step()
    state.commit()
    scheduler.step()
    state.restore()
    assert scheduler.last_epoch == 2 and optimizer.param_groups[0]["lr"] == 0.1


@RANKS
def test_a_model_of_the_state_can_be_replaced(world) -> None:
    state = hvd.elastic.TorchState(model=build(seed=0), other=build(seed=1))
    state.model = build(seed=2 + world.rank)
    state.sync()
    expected = values(build(seed=2))
    torch.testing.assert_close(values(state.model), expected)
    with torch.no_grad():
        state.model[0].weight.zero_()
    state.restore()
    torch.testing.assert_close(values(state.model), expected)


@RANKS
def test_users_can_register_handlers(world) -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = world.rank

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    registry = hvd.elastic.get_handler_registry()
    from ringjax.torch.elastic.state import StateHandler

    hvd.elastic.set_handler_registry([(Counter, StateHandler), *registry])
    try:
        counter = Counter()
        state = hvd.elastic.TorchState(counter=counter)
        state.sync()
        assert counter.count == 0
        counter.count = 5
        state.restore()
        assert counter.count == 0
    finally:
        hvd.elastic.set_handler_registry(registry)


@RANKS
def test_a_failure_in_backward_leaves_the_optimizer_usable(world) -> None:
    trained = Trained(world)
    attempts = []

    @hvd.elastic.run
    def train(state) -> None:
        attempts.append(state.step)
        trained.optimizer.zero_grad()
        trained.model(trained.batch(world.rank)).square().mean().backward()
        if len(attempts) == 1:
            raise hvd.HorovodInternalError("between backward and step")
        trained.optimizer.step()

    train(trained.state)
    assert attempts == [0, 0]
    assert same_everywhere(*trained.model.parameters())


@RANKS
def test_every_sample_is_used_once(world) -> None:
    data = list(range(23))
    sampler = hvd.elastic.ElasticSampler(data, seed=4)
    state = hvd.elastic.TorchState(sampler=sampler, done=[], fails=1)

    @hvd.elastic.run
    def train(state) -> None:
        loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
        for number, samples in enumerate(loader):
            everyone = hvd.allgather(samples, name="samples")
            sampler.record_batch(number, 2)
            state.done += everyone.tolist()
            if number % 2 == 1:
                state.commit()
            elif number == 2 and state.fails:
                state.restore()
                state.fails -= 1  # committed, so the restore in `run` keeps it
                state.commit()
                raise hvd.HorovodInternalError("simulated")

    train(state)
    assert state.fails == 0
    assert set(state.done) == set(data)
    assert len(state.done) - len(data) < world.size  # padding of the last step
    assert sampler.processed_num >= len(data)
    sampler.set_epoch(1)
    state.commit()
    assert len(sampler) == -(-len(data) // world.size)


@RANKS
def test_a_mismatch_restores_the_last_commit(world) -> None:
    if world.size > 1:
        with pytest.raises(Mismatch):
            hvd.allreduce(torch.ones(1 + world.rank), name="x")
    assert issubclass(Mismatch, hvd.HorovodInternalError)
    elastic.reset()
    assert hvd.size() == world.size and hvd.rank() == world.rank
    assert (
        hvd.allreduce(torch.ones(2), name="x", op=hvd.Sum).tolist() == [world.size] * 2
    )
