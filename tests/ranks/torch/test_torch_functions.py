"""ringjax.torch: broadcasts of parameters, optimizer states and objects."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from support.stacked import raises

import ringjax.torch as hvd

# Three ranks run all code of this layer. Tests that need other numbers have a marker.
pytestmark = [pytest.mark.ranks(3), pytest.mark.launch("torch")]

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=0.1),
    "plain SGD": lambda p, lr: torch.optim.SGD(p, lr),
    "Adam": lambda p, lr: torch.optim.Adam(p, lr, betas=(0.8, 0.9 + lr / 100)),
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr),
    "RMSprop": lambda p, lr: torch.optim.RMSprop(p, lr, centered=True),
    "Adagrad": lambda p, lr: torch.optim.Adagrad(p, lr),
    "Rprop": lambda p, lr: torch.optim.Rprop(p, lr),
    "NAdam": lambda p, lr: torch.optim.NAdam(p, lr),
}

Point = collections.namedtuple("Point", "x y")


class Pickled:
    """A class of the program. Its objects can only be sent by pickle."""

    def __init__(self, value: int) -> None:
        self.value = value


def model_of(rank: int) -> torch.nn.Module:
    torch.manual_seed(rank)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )


def same_on_all_ranks(value: Any) -> bool:
    everyone = hvd.allgather_object(value)
    return all(str(other) == str(everyone[0]) for other in everyone)


def flat(state: Any) -> Any:
    """Returns a state dict with lists in place of tensors."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {key: flat(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [flat(value) for value in state]
    return state


@pytest.mark.parametrize("kind", ["state_dict", "named", "generator", "list", "items"])
def test_broadcast_parameters(world, kind: str) -> None:
    for root in range(world.size):
        model, wanted = model_of(world.rank), model_of(root).state_dict()
        params = {
            "state_dict": model.state_dict(),
            "named": list(model.named_parameters()),
            "generator": model.named_parameters(),
            "list": list(model.parameters()),
            "items": dict(model.named_parameters()),
        }[kind]
        hvd.broadcast_parameters(params, root_rank=root)
        for name, value in model.named_parameters():
            assert torch.equal(value, wanted[name])


def test_broadcast_parameters_needs_parameters(world) -> None:
    for wrong in (None, 3, "weights", torch.ones(2)):
        with raises(ValueError, "invalid params of type"):
            hvd.broadcast_parameters(wrong, root_rank=0)
    with raises(TypeError, "broadcast 'a'", "expected a torch.Tensor, got a str"):
        hvd.broadcast_parameters({"a": "b"}, root_rank=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fresh", ["nobody", "others", "everybody"])
def test_broadcast_optimizer_state(world, name: str, fresh: str) -> None:
    root = world.size - 1
    model = model_of(0)
    # The learning rate differs between ranks.
    optimizer = OPTIMIZERS[name](model.parameters(), 0.1 + 0.05 * world.rank)
    is_fresh = {"nobody": False, "others": world.rank != root, "everybody": True}
    if not is_fresh[fresh]:
        for step in range(2):
            optimizer.zero_grad()
            x = torch.full((4, 3), step + world.rank + 1.0)
            (model(x) * torch.arange(8.0).view(4, 2)).sum().backward()
            optimizer.step()
    before = flat(model.state_dict())
    mine = flat(optimizer.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    after = optimizer.state_dict()
    assert flat(model.state_dict()) == before
    assert after["param_groups"][0]["lr"] == 0.1 + 0.05 * root
    assert same_on_all_ranks(flat(after))
    if world.rank == root and fresh != "everybody":
        assert flat(after) == mine
    optimizer.step()  # fails if options have wrong types


def test_state_of_a_distributed_optimizer(world) -> None:
    model = model_of(world.rank)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.1 * (world.rank + 1)),
        named_parameters=model.named_parameters(),
    )
    before = flat(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert flat(model.state_dict()) == before
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert same_on_all_ranks(flat(optimizer.state_dict()))


def trained(model: torch.nn.Module, optimizer: Any, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 3), step + 1.0)).square().sum().backward()
        optimizer.step()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["Adam", "NAdam", "SGD"])
def test_broadcast_does_not_step_a_new_optimizer(world, name: str) -> None:
    model, alone = model_of(0), model_of(0)
    plain = OPTIMIZERS[name](alone.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[name](model.parameters(), 0.1), model.named_parameters()
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert not optimizer.state
    trained(model, optimizer)
    trained(alone, plain)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_the_state_of_the_root_replaces_all_others(world) -> None:
    model, root = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3)), 1
    optimizer = torch.optim.Adam(
        model.parameters(), lr=0.1, amsgrad=world.rank == root, weight_decay=0.1
    )
    used = model[1:] if world.rank == root else model[: world.rank]
    if len(used):
        sum(layer.weight.sum() for layer in used).backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root)
    state = optimizer.state_dict()
    assert sorted(state["state"]) == [2, 4], "the weights of the layers 1 and 2"
    assert state["param_groups"][0]["amsgrad"]
    assert set(state["state"][2]) >= {"step", "exp_avg", "max_exp_avg_sq"}
    assert same_on_all_ranks(flat(state))


def test_a_scheduler_continues_from_the_state_of_the_root(world) -> None:
    model = model_of(0)
    plain = torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    if world.rank == 0:
        saved = torch.optim.SGD(model_of(0).parameters(), lr=0.4, momentum=0.5)
        torch.optim.lr_scheduler.StepLR(saved, 2)
        optimizer.load_state_dict(saved.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["initial_lr"]) == (0.4, 0.5, 0.4)
    if world.rank:  # the scheduler of the plain optimizer sets the rate of both
        plain.param_groups[0]["lr"] = 0.2
        assert group["lr"] == 0.2


def test_state_keeps_its_dtype(world) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    if world.rank == 0:
        optimizer.state[parameter]["master"] = torch.full((3,), 1.001)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(optimizer.state[parameter]["master"], torch.full((3,), 1.001))


@pytest.mark.parametrize("differs", ["class", "shapes"])
def test_optimizers_that_differ_are_refused_on_all_ranks(world, differs: str) -> None:
    odd = world.rank == 2
    parameter = torch.nn.Parameter(torch.ones(3 if differs == "shapes" and odd else 2))
    kind = torch.optim.Adam if differs == "class" and odd else torch.optim.SGD
    theirs, here = {
        "class": ("the class SGD", "the class Adam"),
        "shapes": ("the shape (2,) for parameter 0 of", "the shape (3,) for parameter"),
    }[differs]
    with raises(ValueError, f"of rank 0 has {theirs}", f"that of rank 2 has {here}"):
        hvd.broadcast_optimizer_state(kind([parameter], lr=0.1), root_rank=0)


def test_sparse_embeddings(world) -> None:
    model = torch.nn.Embedding(5, 2, sparse=True)
    adam = torch.optim.SparseAdam(list(model.parameters()), lr=0.1 * (world.rank + 1))
    hvd.broadcast_optimizer_state(adam, root_rank=0, model=model)
    assert adam.param_groups[0]["lr"] == 0.1
    with raises(ValueError, "LBFGS"):
        lbfgs = torch.optim.LBFGS(model.parameters())
        hvd.broadcast_optimizer_state(lbfgs, root_rank=0)


def test_objects(world) -> None:
    """jax/test_sync.py and unit/test_objects.py have more tests of objects."""
    plain = {"hello": 123, "rank": world.rank}
    got = hvd.broadcast_object(plain, root_rank=1, name="object")
    assert got == {**plain, "rank": 1}
    assert (got is plain) == (world.rank == 1)
    pickled = hvd.broadcast_object(Pickled(world.rank))
    assert (type(pickled), pickled.value) == (Pickled, 0)
    # The other ranks have no argument of that type.
    assert hvd.broadcast_object(Point(1, 2) if world.rank == 0 else None) == (1, 2)
    state = hvd.broadcast_object(model_of(world.rank).state_dict(), 0)
    wanted = model_of(0).state_dict()
    assert all(torch.equal(state[k], wanted[k]) for k in wanted)
    objects = hvd.allgather_object(Pickled(world.rank), name="objects")
    assert [o.value for o in objects] == list(range(world.size))
    pair = hvd.add_process_set([1, 2])
    if pair.included():
        assert hvd.broadcast_object([world.rank], 2, process_set=pair) == [2]
    hvd.remove_process_set(pair)
