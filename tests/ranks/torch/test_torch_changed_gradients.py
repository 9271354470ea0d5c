"""Changes of gradients between `backward` and `step`, as in programs for DDP.

Also parameters that not all ranks use, losses that pass through another network, and
the texts of errors.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support.parameter_warnings import check_every
from support.torch_pairs import batch, build, close, loss_of, mean_loss, pair

import ringjax.torch as hvd

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.launch("torch")]
# Three ranks run all code that two ranks run. One test of each file runs on two, too.
RANKS = pytest.mark.ranks(1, 3)
SEVERAL = pytest.mark.ranks(2, 3)

GRADIENT_CHANGES = {
    "clip_norm": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.05),
    "clip_value": lambda ps: torch.nn.utils.clip_grad_value_(ps, 0.01),
    "divided": lambda ps: [p.grad.div_(4) for p in ps],
    "noise": lambda ps: [p.grad.add_(0.5) for p in ps],
    "replaced": lambda ps: [setattr(p, "grad", p.grad.abs()) for p in ps],
    "dropped": lambda ps: setattr(ps[0], "grad", None),
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("change", GRADIENT_CHANGES)
@pytest.mark.parametrize("options", ["plain", "fp16", "groups", "unused", "one by one"])
def test_gradients_may_be_changed_after_backward(
    world, change: str, options: str, monkeypatch
) -> None:
    more: dict[str, Any] = {
        "fp16": {"compression": hvd.Compression.fp16},
        "groups": {"groups": 2},
    }.get(options, {})
    if options == "one by one":  # every gradient is sent as soon as it is ready
        monkeypatch.setattr("ringjax.torch.reducer._FIRST_BUCKET", world.rank)
    model, optimizer, reference, plain = pair(**more)
    if options == "unused":
        unused = torch.nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [unused]})
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        GRADIENT_CHANGES[change](list(model.parameters()))
        optimizer.step()
        plain.zero_grad()
        mean_loss(reference, world, step).backward()
        GRADIENT_CHANGES[change](list(reference.parameters()))
        plain.step()
    tolerance = 1e-2 if options == "fp16" else 1e-5
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@SEVERAL
@pytest.mark.parametrize("change", ["clip_norm", "replaced", "dropped", "unscale"])
def test_a_change_while_gradients_are_reduced_is_an_error(world, change: str) -> None:
    model, optimizer, _, _ = pair()
    extra = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra]})
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = loss_of(model, world.rank, 0)
    if world.rank == 1:  # only the loss of rank 1 uses the extra parameter
        loss = loss + extra.sum()
    scaler.scale(loss).backward()
    if world.rank != 1:
        optimizer.step()
    elif change == "unscale":
        with pytest.raises(RuntimeError, match=r"noname.1.0.*optimizer.synchronize"):
            scaler.unscale_(optimizer)
        optimizer.step()
    else:
        GRADIENT_CHANGES[change]([extra])
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match=r"noname.1.0.*optimizer.synchronize"):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters())), "parameters changed"
    for succeeds in (change == "unscale", True):
        optimizer.zero_grad()
        loss_of(model, world.rank, 1).backward()
        if succeeds:
            optimizer.step()
        else:  # rank 1 has made one step less than the others
            with pytest.raises(hvd.HorovodInternalError, match="have left it out"):
                optimizer.step()


@SEVERAL
@pytest.mark.parametrize("change", ["clip_norm", "unscale"])
def test_a_change_of_a_group_that_lacks_gradients_is_an_error(
    world, change: str, monkeypatch
) -> None:
    check_every(monkeypatch, 0)
    model = build()
    unused = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([*model.parameters(), unused], lr=0.1), groups=1
    )
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, world.rank, 0)).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"before it was reduced.*groups="):
        if change == "unscale":
            scaler.unscale_(optimizer)
        GRADIENT_CHANGES[change](list(model.parameters()))
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters())), "parameters changed"
    optimizer.step()
    assert unused.grad is None


@SEVERAL
def test_each_rank_may_use_its_own_parameters_and_synchronize(world) -> None:
    model, optimizer, _, _ = pair()
    heads = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(world.size))
    optimizer.add_param_group({"params": heads.parameters()})
    model[2].requires_grad_(False)
    for step in range(2):
        optimizer.zero_grad()
        heads[world.rank](model(batch(world.rank, step))).square().mean().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_([*model.parameters(), *heads.parameters()], 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        same = hvd.allgather_object([p.tolist() for p in heads.parameters()])
        assert same.count(same[0]) == world.size


@RANKS
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_parameter_that_no_rank_uses_is_unchanged(world, kind: str) -> None:
    make = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    }[kind]
    torch.manual_seed(1)
    model = torch.nn.ModuleList(torch.nn.Linear(4, 2) for _ in range(3))
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters()
    )
    plain = make(reference.parameters())
    for step in range(5):
        head = step % 2
        optimizer.zero_grad()
        loss_of(model[head], world.rank, step).backward()
        optimizer.step()
        plain.zero_grad()
        mean_loss(reference[head], world, step).backward()
        plain.step()
        assert model[2].weight.grad is None
    close(model, reference)


@RANKS
@pytest.mark.parametrize("zero", ["optimizer", "module"])
def test_another_networks_loss_passes_through(world, zero: str) -> None:
    """Trains a generator through its discriminator, as a GAN does."""

    def train(g_optimizer, generator, discriminator, d_optimizer, average) -> None:
        def g_loss(rank: int, step: int):
            return discriminator(generator(batch(rank, step))).mean()

        def d_loss(rank: int, step: int):
            return discriminator(batch(rank, step)).square().mean()

        for step in range(3):
            g_optimizer.zero_grad()
            average(g_loss, step).backward()
            g_optimizer.step()
            (d_optimizer if zero == "optimizer" else discriminator).zero_grad()
            average(d_loss, step).backward()
            d_optimizer.step()

    def networks() -> list[torch.nn.Module]:
        torch.manual_seed(4)
        return [torch.nn.Linear(4, 4), build()]

    generator, discriminator = networks()
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1),
            [(f"{i}.{name}", p) for name, p in net.named_parameters()],
        )
        for i, net in enumerate((generator, discriminator))
    ]
    train(
        *(optimizers[0], generator, discriminator, optimizers[1]),
        lambda loss, step: loss(world.rank, step),
    )
    references = networks()
    plain = [torch.optim.SGD(net.parameters(), lr=0.1) for net in references]
    train(
        *(plain[0], *references, plain[1]),
        lambda loss, step: (
            sum(loss(rank, step) for rank in range(world.size)) / world.size
        ),
    )
    close(generator, references[0])
    close(discriminator, references[1])


@RANKS
def test_a_batch_that_failed_on_one_rank_is_dropped_on_all(world) -> None:
    model, optimizer, reference, plain = pair()
    for step in range(4):
        failed = torch.zeros(1)
        loss = loss_of(model, world.rank, step)
        if step == 1 and world.rank == world.size - 1:
            handle = model[0].bias.register_hook(lambda _: 1 / 0)
        try:
            loss.backward()
        except ZeroDivisionError:
            handle.remove()
            failed.fill_(1)
        optimizer.synchronize()
        if hvd.allreduce(failed, name="failed", op=hvd.Sum) > 0:
            optimizer.zero_grad()
            assert step == 1
            continue
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        mean_loss(reference, world, step).backward()
        plain.step()
        assert step != 1
    close(model, reference)


@SEVERAL
def test_programming_errors_have_specific_messages(world) -> None:
    model, optimizer, _, _ = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch itself warns about create_graph
        with pytest.raises(RuntimeError, match=r"create_graph=True.*autograd.grad"):
            loss_of(model, world.rank, 0).backward(create_graph=True)
    optimizer.zero_grad()
    twin = build()
    second = hvd.DistributedOptimizer(
        torch.optim.SGD(twin.parameters(), lr=0.1), twin.named_parameters()
    )
    loss_of(model, world.rank, 0).backward()
    with pytest.raises(ValueError, match=r"two optimizers .*'0.bias'.*different names"):
        loss_of(twin, world.rank, 0).backward()
    optimizer.step()
    loss_of(twin, world.rank, 1).backward()  # allowed after the step of `optimizer`
    second.step()


@SEVERAL
def test_a_rank_without_more_data_calls_join(world) -> None:
    model, optimizer, _, _ = pair()
    steps = 2 + world.rank
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    assert hvd.join() == world.size - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=world.size - 1)
    same = hvd.allgather(model[0].weight[None].detach())
    assert all(torch.equal(same[0], other) for other in same)
