"""The usage of DistributedOptimizer: steps, clipping, closures, and errors.

These tests are about the allowed orders of calls, and about the errors on all ranks
after a mistake on one rank. test_torch_optimizer.py tests the gradients.
"""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
from support.torch_pairs import build, close, loss_of, mean_loss, pair

import ringjax.torch as hvd
from ringjax.errors import Mismatch

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.launch("torch")]
# Three ranks run all code that two ranks run. One test of each file runs on two, too.
RANKS = pytest.mark.ranks(1, 3)
SEVERAL = pytest.mark.ranks(2, 3)


@pytest.mark.ranks(1, 2, 3)
def test_clipping_between_synchronize_and_step(world) -> None:
    model, optimizer, reference, plain = pair()
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with warnings.catch_warnings(), optimizer.skip_synchronize():
            warnings.simplefilter("error")
            optimizer.step()
        plain.zero_grad()
        mean_loss(reference, world, step).backward()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        torch.testing.assert_close(norm, expected)
        plain.step()
    close(model, reference)


@RANKS
def test_step_after_synchronize_warns(world) -> None:
    model, optimizer, _, _ = pair()
    loss_of(model, world.rank, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=r"without optimizer.skip_synchronize\(\)"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@RANKS
def test_gradients_are_reduced_at_every_call_of_a_closure(world) -> None:
    class Twice(torch.optim.SGD):
        """An optimizer that calls the closure twice in each step."""

        def step(self, closure):
            with torch.enable_grad():
                closure()
            super().step()
            with torch.enable_grad():
                loss = closure()
            super().step()
            return loss

    model, optimizer, reference, plain = pair(lambda p: Twice(p, lr=0.1))
    for step in range(3):

        def distributed_closure(step: int = step):
            optimizer.zero_grad()
            loss = loss_of(model, world.rank, step)
            loss.backward()
            return loss

        def plain_closure(step: int = step):
            plain.zero_grad()
            loss = mean_loss(reference, world, step)
            loss.backward()
            return loss

        if step == 2:  # gradients from before the closure have no effect
            loss_of(model, world.rank, 9).backward()
        losses = optimizer.step(distributed_closure), plain.step(plain_closure)
        assert losses[0].shape == losses[1].shape == ()
    close(model, reference)


@RANKS
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("reduced", [False, True])
def test_lbfgs_uses_the_loss_of_all_ranks(world, search, reduced: bool) -> None:
    model, optimizer, reference, plain = pair(
        lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=5, line_search_fn=search)
    )

    def distributed_closure():
        optimizer.zero_grad()
        loss = loss_of(model, world.rank, 0)
        loss.backward()
        return hvd.allreduce(loss.detach(), name="loss") if reduced else loss

    def plain_closure():
        plain.zero_grad()
        loss = mean_loss(reference, world, 0)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(distributed_closure)
        plain.step(plain_closure)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@RANKS
def test_a_closure_without_backward(world) -> None:
    model, optimizer, reference, plain = pair(op=hvd.Sum)
    loss_of(model, world.rank, 0).backward()
    assert optimizer.step(lambda: 7.0) == 7.0
    (world.size * mean_loss(reference, world, 0)).backward()
    plain.step()
    close(model, reference)


@SEVERAL
def test_zero_grad_is_refused_until_the_last_backward(world) -> None:
    model, optimizer, _, _ = pair(backward_passes_per_step=2)
    loss_of(model, world.rank, 0).backward()
    with pytest.raises(AssertionError, match=r"optimizer.zero_grad\(\) was called"):
        optimizer.zero_grad()
    loss_of(model, world.rank, 0).backward()
    optimizer.zero_grad(set_to_none=False)  # no gradient is in flight now
    assert not model[0].weight.grad.any()
    optimizer.step()


@SEVERAL
def test_too_many_calls_of_backward(world) -> None:
    model, optimizer, _, _ = pair(backward_passes_per_step=2)
    for _ in range(2):
        loss_of(model, world.rank, 0).backward()
    with pytest.raises(
        AssertionError, match="more than backward_passes_per_step times"
    ):
        loss_of(model, world.rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, world.rank, 0).backward()
    optimizer.step()  # is allowed before backward_passes_per_step is reached


@RANKS
def test_a_scaler_of_mixed_precision(world) -> None:
    model, optimizer, reference, plain = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    other = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, world.rank, step))
        if step == 2 and world.rank == world.size - 1:
            loss = loss * torch.inf  # one infinite rank makes the average infinite
        loss.backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        plain.zero_grad()
        other.scale(mean_loss(reference, world, step)).backward()
        if step == 2:
            reference[0].weight.grad[0, 0] = torch.inf
        other.unscale_(plain)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        other.step(plain)
        other.update()
        assert scaler.get_scale() == other.get_scale()
    if world.size == 1:
        close(model, reference)


@RANKS
def test_schedulers_and_edits_of_options(world) -> None:
    model, optimizer, reference, plain = pair()
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, plain)
    ]
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        optimizer.step()
        plain.zero_grad()
        mean_loss(reference, world, step).backward()
        plain.step()
        for scheduler in schedulers:
            scheduler.step()
        for one in (optimizer, plain):
            one.param_groups[0]["momentum"] = 0.5
    close(model, reference)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4


@RANKS
def test_state_is_saved_loaded_and_sent(world) -> None:
    model, optimizer, reference, plain = pair(lambda p: torch.optim.Adam(p, lr=0.01))
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        optimizer.step()
        plain.zero_grad()
        mean_loss(reference, world, step).backward()
        plain.step()
    # Only rank 0 loads the saved state. The other ranks begin with other values.
    again = build(seed=world.rank + 50)
    other = hvd.DistributedOptimizer(
        torch.optim.Adam(again.parameters(), lr=0.5), again.named_parameters()
    )
    if world.rank == 0:
        again.load_state_dict(model.state_dict())
        other.load_state_dict(optimizer.state_dict())
    hvd.broadcast_parameters(again.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(other, root_rank=0)
    assert other.param_groups[0]["lr"] == 0.01
    for step in range(2, 4):
        other.zero_grad()
        loss_of(again, world.rank, step).backward()
        other.step()
        plain.zero_grad()
        mean_loss(reference, world, step).backward()
        plain.step()
    for one, two in zip(again.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@SEVERAL
def test_a_mismatch_fails_on_all_ranks_and_training_continues(world) -> None:
    model, optimizer, reference, plain = pair()
    extra = torch.nn.Parameter(torch.ones(2 + world.rank))
    broken = hvd.DistributedOptimizer(
        torch.optim.SGD([*model.parameters(), extra], lr=0.1),
        [*((f"broken.{n}", p) for n, p in model.named_parameters()), ("extra", extra)],
    )
    for reduce in (broken.synchronize, broken.step):
        extra.grad = torch.ones_like(extra)
        with pytest.raises(Mismatch, match=r"shapes.*'extra'"):
            reduce()
    del broken
    optimizer.zero_grad()
    loss_of(model, world.rank, 0).backward()
    optimizer.step()
    plain.zero_grad()
    mean_loss(reference, world, 0).backward()
    plain.step()
    close(model, reference)


@RANKS
def test_two_optimizers_of_one_loss(world) -> None:
    models = torch.nn.ModuleList([build(1), build(2)])
    reference = copy.deepcopy(models)
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(m.parameters(), lr=0.1),
            [(f"{i}.{name}", p) for name, p in m.named_parameters()],
        )
        for i, m in enumerate(models)
    ]
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(loss_of(m, world.rank, step) for m in models).backward()
        for optimizer in optimizers:
            optimizer.step()
        plain.zero_grad()
        sum(mean_loss(m, world, step) for m in reference).backward()
        plain.step()
    close(models, reference)


@RANKS
def test_backward_in_several_threads(world) -> None:
    models = torch.nn.ModuleList(build(seed) for seed in range(4))
    reference = copy.deepcopy(models)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(models.parameters(), lr=0.1), models.named_parameters()
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        losses = [loss_of(m, world.rank, step) for m in models]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        optimizer.step()
        plain.zero_grad()
        sum(mean_loss(m, world, step) for m in reference).backward()
        plain.step()
    close(models, reference)


@RANKS
def test_process_sets(world) -> None:
    chosen = hvd.add_process_set([rank for rank in range(world.size) if rank != 1])
    model, optimizer, reference, plain = pair(process_set=chosen)
    members = chosen.ranks if chosen.included() else [world.rank]
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        if not chosen.included():
            optimizer.zero_grad()  # no gradient is in flight
            loss_of(model, world.rank, step).backward()
        optimizer.step()
        plain.zero_grad()
        for rank in members:
            (loss_of(reference, rank, step) / len(members)).backward()
        plain.step()
    close(model, reference)
    assert hvd.remove_process_set(chosen) == (world.size > 1)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_adasum_combines_local_parameter_changes(world, kind: str) -> None:
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    }[kind]
    model, optimizer, _, _ = pair(make, op=hvd.Adasum)
    copies = [build() for _ in range(world.size)]
    plains = [make(m.parameters()) for m in copies]
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        optimizer.step()
        starts = [p.detach().clone() for p in copies[0].parameters()]
        for rank, (m, plain) in enumerate(zip(copies, plains, strict=True)):
            plain.zero_grad()
            loss_of(m, rank, step).backward()
            plain.step()
        rows = zip(*(m.parameters() for m in copies), strict=True)
        for start, row in zip(starts, rows, strict=True):
            delta = adasum([(p.detach() - start).double() for p in row])
            for p in row:
                p.data.copy_(start + delta)
    for one, other in zip(model.parameters(), copies[0].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def adasum(deltas):
    """Combines parameter changes in pairs, as in the paper about Adasum."""
    if len(deltas) == 1:
        return deltas[0]
    half = [combined(deltas[i], deltas[i + 1]) for i in range(0, len(deltas), 2)]
    return adasum(half)


def combined(a, b):
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    first = 1 - dot / (2 * aa) if aa else 1.0
    second = 1 - dot / (2 * bb) if bb else 1.0
    return first * a + second * b


@pytest.mark.ranks(2)
def test_limits_of_adasum(world) -> None:
    model, optimizer, _, _ = pair(op=hvd.Adasum, backward_passes_per_step=2)
    loss_of(model, world.rank, 0).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    loss_of(model, world.rank, 0).backward()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        loss_of(model, world.rank, 0).backward()
    optimizer.synchronize()
    with pytest.raises(AssertionError, match="not supported when using Adasum"):
        optimizer.skip_synchronize()
    assert optimizer.step(lambda: 3.0) == 3.0
    optimizer.zero_grad()
    same = hvd.allgather(model[0].weight[None].detach())
    assert torch.equal(same[0], same[1])


@SEVERAL
def test_a_copied_optimizer_continues_training(world) -> None:
    model, optimizer, reference, plain = pair()
    models, optimizers = [model], [optimizer]
    for step in range(3):
        model, optimizer = copy.deepcopy((models[-1], optimizers[-1]))
        models.append(model)
        optimizers.append(optimizer)
        optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        optimizer.step()
        plain.zero_grad()
        mean_loss(reference, world, step).backward()
        plain.step()
        close(model, reference)
    close(models[0], build())
