"""The parameter check of DistributedOptimizer warns if parameters differ."""

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
def _check_every_third_step(world, monkeypatch) -> None:
    check_every(monkeypatch, 3)


class Training:
    def __init__(self, capfd, **options) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        plain = torch.optim.SGD(self.model.parameters(), lr=0.1)
        named = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(plain, named, **options)
        self._capfd = capfd
        hvd.join()  # restarts the count of steps

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


def test_a_forgotten_broadcast_is_reported(world, capfd) -> None:
    training = Training(capfd)
    last = world.size - 1
    training.change(2, float(world.rank == last))
    check(
        world, training.run(7), 0, f"'1.weight' of rank {last} is not that of rank 0;"
    )
    hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
    assert training.run(5) == []


def test_drift_is_reported(world, capfd) -> None:
    training = Training(capfd, op=hvd.Sum)
    assert training.run(2) == []
    training.change(3, float(world.rank == 1))
    check(world, training.run(3), 3, "'1.bias' of rank 1 is not that of rank 0;")
    hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
    assert training.run(3) == []


@pytest.mark.ranks(2)
def test_adasum_checks_parameters_too(world, capfd) -> None:
    training = Training(capfd, op=hvd.Adasum)
    training.change(0, float(world.rank))
    check(world, training.run(1), 0, "'0.weight' of rank 1 is not that of rank 0;")


def test_ranks_that_join_early_restart_their_step_count(world, capfd) -> None:
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


def test_optimizers_count_their_steps_separately(world, capfd) -> None:
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

    for all_ranks in (True, False):
        training.run(1)
        backward()
        if all_ranks or world.rank == 1:  # only rank 1, as after an error on rank 1
            training.optimizer.synchronize()
        else:
            training.optimizer.step()
        backward()
        if all_ranks:
            training.optimizer.step()
        else:
            with pytest.raises(hvd.HorovodInternalError, match="have left it out"):
                training.optimizer.step()
    hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
    assert training.run(2) == []
