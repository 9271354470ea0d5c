"""Tests of DistributedOptimizer in one process: arguments, names, groups, shared state.

tests/ranks/torch/test_torch_optimizer.py tests the reduction of gradients.
"""

from __future__ import annotations

import copy
import gc
import math
import pickle  # noqa: TID251
import warnings

import pytest
import torch

from ringjax.ops import Adasum, Average, Max, Sum
from ringjax.runtime import global_process_set
from ringjax.torch.optimizer import DistributedOptimizer
from ringjax.world.process_set import ProcessSet


def build(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


def sgd(model: torch.nn.Module, **options) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def train(model: torch.nn.Module, optimizer, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + step)).square().sum().backward()
        optimizer.step()


def assert_equal(first: torch.nn.Module, second: torch.nn.Module) -> None:
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def names(optimizer) -> list[str]:
    name_of = optimizer._reducer.name_of
    return [name_of[p] for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"named_parameters": [torch.ones(1)]}, "sequence of tuples"),
        ({"named_parameters": ["ab"]}, "sequence of tuples"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
        ({"backward_passes_per_step": -1}, "backward_passes_per_step must be > 0"),
        ({"gradient_predivide_factor": 2.0, "op": Sum}, "not supported with op"),
        ({"backward_passes_per_step": True}, "backward_passes_per_step must be > 0"),
        ({"gradient_predivide_factor": 0.0}, "must be > 0"),
        ({"gradient_predivide_factor": math.nan}, "must be > 0"),
        ({"op": Max}, "op must be Average, Sum or Adasum"),
        ({"groups": -1}, "non-negative integer"),
        ({"groups": 0}, "non-negative integer"),
        ({"groups": "all"}, "non-negative integer"),
        ({"groups": [["0.weight"]]}, "consist of torch.Tensor"),
    ],
)
def test_bad_arguments(options, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DistributedOptimizer(sgd(build()), **options)


def test_names_must_be_unique_and_complete() -> None:
    model, other = build(), build()
    pairs = list(model.named_parameters())
    with pytest.raises(ValueError, match=r"duplicates: 0\.bias, 0\.weight, 1\.bias"):
        both = [*pairs, *other.named_parameters()]
        DistributedOptimizer(sgd(model), named_parameters=both)
    with pytest.raises(ValueError, match=r"not named: \[3\] \(number 1 of group 0\)"):
        DistributedOptimizer(sgd(model), named_parameters=pairs[:1] + pairs[2:])
    # Names of parameters that the optimizer does not have are allowed.
    more = [*pairs, ("other", torch.nn.Parameter(torch.ones(1)))]
    optimizer = DistributedOptimizer(sgd(model), named_parameters=iter(more))
    assert names(optimizer) == [name for name, _ in pairs]


def test_parameters_without_names_are_numbered() -> None:
    model = build()
    optimizer = torch.optim.SGD([{"params": m.parameters()} for m in model], lr=0.1)
    distributed = DistributedOptimizer(optimizer)
    assert names(distributed) == [
        f"allreduce.noname.{i}.{j}" for i in (0, 1) for j in (0, 1)
    ]
    later = torch.nn.Parameter(torch.ones(1))
    distributed.add_param_group({"params": [later], "lr": 0.5})
    assert names(distributed)[-1] == "allreduce.noname.2.0"
    assert distributed.param_groups[-1]["momentum"] == 0


def test_a_parameter_is_in_one_group_only() -> None:
    model = build()
    first = model[0].weight
    with pytest.raises(ValueError, match="only appear once"):
        DistributedOptimizer(sgd(model), groups=[[first], [model[0].bias, first]])


def groups(model: torch.nn.Module, wanted) -> list[list[str]]:
    optimizer = DistributedOptimizer(
        sgd(model), model.named_parameters(), groups=wanted
    )
    name_of = optimizer._reducer.name_of
    return [[name_of[p] for p in unit] for unit in optimizer._reducer.groups()]


def test_groups() -> None:
    model = build()
    (w0, b0), (w1, b1) = (tuple(m.parameters()) for m in model)
    assert groups(model, None) == groups(model, []) == groups(model, 4) == []
    assert groups(model, 1) == [["0.weight", "0.bias", "1.weight", "1.bias"]]
    assert groups(model, 3) == [["0.weight", "0.bias"]]
    assert groups(model, 99) == []
    assert groups(model, [[b1, w0], (b0,)]) == [["1.bias", "0.weight"]]
    w0.requires_grad_(False)
    assert groups(model, [[w0, b0, w1]]) == [["0.bias", "1.weight"]]
    assert groups(model, 2) == [["0.bias", "1.weight"]]


def test_num_groups_is_the_former_name_of_groups() -> None:
    with pytest.warns(DeprecationWarning, match="num_groups"):
        optimizer = DistributedOptimizer(sgd(build()), num_groups=1)
    assert len(optimizer._reducer.groups()[0]) == 4
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="groups"):
        DistributedOptimizer(sgd(build()), num_groups=-1)


def test_it_shares_class_and_state_with_the_original() -> None:
    model = build()
    plain = sgd(model, nesterov=True)
    train(model, plain)
    optimizer = DistributedOptimizer(plain, model.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD" and repr(optimizer) == repr(plain)
    assert optimizer.defaults == plain.defaults
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.state is plain.state
    assert optimizer.param_groups[0]["nesterov"] and len(optimizer.state) == 4
    with pytest.raises(TypeError, match="already"):
        DistributedOptimizer(optimizer)


def test_schedulers_of_the_original_optimizer_work() -> None:
    model = build()
    plain = sgd(model)
    torch.optim.lr_scheduler.LambdaLR(plain, lambda epoch: 0.5)
    optimizer = DistributedOptimizer(plain)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.step.__func__ is type(optimizer).step
    after = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.25)
    assert optimizer.param_groups[0]["lr"] == 0.025
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer._reducer.is_alone = lambda: True
        optimizer.step()
        after.step()


@pytest.mark.parametrize("op", [Average, Adasum])
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["deepcopy", "pickle"],
)
def test_copies_have_hooks_on_their_own_parameters(op, copied) -> None:
    model, steps = build(), []
    unit = [model[0].weight, model[1].bias]
    optimizer = DistributedOptimizer(
        torch.optim.Adam(model.parameters()), groups=[unit], op=op,
        backward_passes_per_step=2,
    )  # fmt: skip
    optimizer._reducer.is_alone = lambda: True
    train(model, optimizer)
    other_model, other = copied((model, optimizer))
    assert isinstance(other, torch.optim.Adam) and type(other) is not type(optimizer)
    settings = other._reducer.options
    assert settings.process_set is global_process_set
    assert (settings.op, settings.backward_passes_per_step) == (op, 2)
    assert names(other) == names(optimizer)
    assert other._reducer.groups() == [(other_model[0].weight, other_model[1].bias)]
    assert other.param_groups[0]["params"][0] is other_model[0].weight
    other._reducer.is_alone = lambda: True
    other.register_step_post_hook(lambda *_: steps.append(1))
    for pair in ((model, optimizer), (other_model, other)):
        train(*pair)
    assert_equal(model, other_model)
    assert len(steps) == 2  # step hooks run once for each step
    seen = []
    other._reducer.on_gradient_ready = seen.append
    other_model(torch.ones(1, 4)).sum().backward()
    assert len(seen) == 4
    model(torch.ones(1, 4)).sum().backward()
    assert len(seen) == 4


def test_attributes_of_horovods_optimizer_exist() -> None:
    model = build()
    named = dict(model.named_parameters())
    optimizer = DistributedOptimizer(sgd(model), named.items(), op=Sum)
    assert optimizer._parameter_names == {p: name for name, p in named.items()}
    assert optimizer.op == Sum and optimizer.process_set is global_process_set
    optimizer.set_backward_passes_per_step(2)
    assert optimizer.backward_passes_per_step == 2


def test_copies_keep_the_process_set() -> None:
    optimizer = DistributedOptimizer(sgd(build()), process_set=ProcessSet([0, 2]))
    assert copy.deepcopy(optimizer)._reducer.options.process_set.ranks == [0, 2]


def test_hooks_are_removed_with_the_optimizer() -> None:
    model = build()
    optimizer = DistributedOptimizer(sgd(model))
    assert len(model[0].weight._post_accumulate_grad_hooks) == 1
    del optimizer
    gc.collect()
    assert not model[0].weight._post_accumulate_grad_hooks


def test_backward_works_before_init() -> None:
    model = build()
    optimizer = DistributedOptimizer(sgd(model))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.zero_grad()
    assert model[0].weight.grad is None
