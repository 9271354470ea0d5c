"""Parameters of a DistributedOptimizer that differ between ranks: a warning."""

from __future__ import annotations

import copy

import pytest
import torch
from support.parameter_warnings import check_every

import ringjax.torch as hvd

pytestmark = [
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.launch("torch"),
]
DIFFER = "warning: the ranks' parameters differ at step"


@pytest.fixture(autouse=True)
def _look(world, monkeypatch) -> None:
    check_every(monkeypatch, 3)


class Training:
    def __init__(self, capfd, **options) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        plain = torch.optim.SGD(self.model.parameters(), lr=0.1)
        named = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(plain, named, **options)
        self._capfd = capfd
        hvd.join()  # the steps are counted from here on

    def run(self, steps: int) -> list[str]:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 3)).square().sum().backward()
            self.optimizer.step()
        hvd.barrier()
        lines = self._capfd.readouterr().err.splitlines()
        return [line for line in lines if DIFFER in line]

    def change(self, number: int, by: float) -> None:
        with torch.no_grad():
            list(self.model.parameters())[number].view(-1)[-1] += by


def check(world, lines: list[str], step: int, rest: str) -> None:
    if world.rank > 0 or world.size == 1:
        assert lines == []
    else:
        assert (
            len(lines) == 1 and f"{DIFFER} {step} of the optimizer: {rest}" in lines[0]
        )


def test_who_forgets_the_broadcast_is_told(world, capfd) -> None:
    training = Training(capfd)
    last = world.size - 1
    training.change(2, float(world.rank == last))
    check(
        world, training.run(7), 0, f"'1.weight' of rank {last} is not that of rank 0;"
    )
    hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
    assert training.run(5) == []


def test_drift_is_noticed(world, capfd) -> None:
    training = Training(capfd, op=hvd.Sum)
    assert training.run(2) == []
    training.change(3, float(world.rank == 1))
    check(world, training.run(3), 3, "'1.bias' of rank 1 is not that of rank 0;")
    hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
    assert training.run(3) == []


@pytest.mark.ranks(2)
def test_adasum_looks_too(world, capfd) -> None:
    training = Training(capfd, op=hvd.Adasum)
    training.change(0, float(world.rank))
    check(world, training.run(1), 0, "'0.weight' of rank 1 is not that of rank 0;")


def test_ranks_with_fewer_steps_join_and_count_anew(world, capfd) -> None:
    training = Training(capfd)
    for _ in range(2):
        assert training.run(0) == []
        for _ in range(2 + 2 * world.rank):
            training.optimizer.zero_grad()
            training.model(torch.ones(2, 3)).square().sum().backward()
            training.optimizer.step()
        hvd.join()
        # After a join, the rank with the most steps has the newest parameters.
        hvd.broadcast_parameters(training.model.state_dict(), world.size - 1)
        hvd.barrier()
        assert DIFFER not in capfd.readouterr().err
    assert training.run(4) == []


def test_two_optimizers_and_a_copy_count_each_for_itself(world, capfd) -> None:
    one, two = Training(capfd), Training(capfd)
    two.model = copy.deepcopy(two.model)
    assert one.run(2) == [] and two.run(4) == [] and one.run(2) == []


def test_a_process_set_is_compared_within_itself(world, capfd) -> None:
    members = hvd.add_process_set([0, world.size - 1] if world.size > 1 else [0])
    training = Training(capfd, process_set=members)
    training.change(0, 0.0 if members.included() else 1.0)
    assert training.run(1) == []
    hvd.remove_process_set(members)


@pytest.mark.ranks(2, 3)
def test_a_step_that_one_rank_leaves_out_is_an_error(world, capfd) -> None:
    training = Training(capfd)

    def backward() -> None:
        training.optimizer.zero_grad()
        training.model(torch.ones(2, 3)).square().sum().backward()

    for everybody in (True, False):
        training.run(1)
        backward()
        if everybody or world.rank == 1:  # rank 1 alone, as after an error there
            training.optimizer.synchronize()
        else:
            training.optimizer.step()
        backward()
        if everybody:  # all ranks have left the step out
            training.optimizer.step()
        else:
            with pytest.raises(hvd.HorovodInternalError, match="have left it out"):
                training.optimizer.step()
    hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
    assert training.run(2) == []
