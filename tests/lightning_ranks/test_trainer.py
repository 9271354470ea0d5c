"""Lightning's Trainer on several ranks: precision, metrics, checkpoints and errors.

test_training.py tests the steps themselves.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from support.lightning_modules import (
    Adversarial,
    Regression,
    alone_trainer,
    assert_equal,
    dataset,
    loader,
    ringjax_trainer,
    share,
)
from torchmetrics import CatMetric, MeanMetric

import ringjax.torch as hvd
from ringjax.errors import RingjaxError
from ringjax.lightning import RingjaxStrategy

pytestmark = [
    pytest.mark.launch("lightning"),
    pytest.mark.timeout(240),
    # Lightning advises on workers of data loaders and the like.
    pytest.mark.filterwarnings("ignore"),
]
SEVERAL = pytest.mark.ranks(2, 3)


def _folder(path: Path) -> Path:
    """Returns the folder of rank 0, where all ranks read checkpoints."""
    return Path(hvd.broadcast_object(str(path)))


class Poisoned(Regression):
    """Has infinite gradients on rank 1 in step 2, which no rank may make."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        return loss * float("inf") if index == 2 and hvd.rank() == 1 else loss


@SEVERAL
def test_infinities_on_one_rank_skip_the_step_on_all(world, tmp_path) -> None:
    module = Poisoned(optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    steps: list[torch.Tensor] = []

    class Note(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            steps.append(module.head.weight.detach().clone())

    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer = ringjax_trainer(
        tmp_path,
        plugins=plugin,
        max_epochs=1,
        gradient_clip_val=1.0,
        callbacks=[Note()],
    )
    module.log = lambda *_, **__: None
    trainer.fit(module, share(4 * world.size * 5, 4))
    assert torch.equal(steps[1], steps[2])
    assert not torch.equal(steps[2], steps[3])
    assert scaler.get_scale() == 2.0**9
    weights = hvd.allgather(module.head.weight.detach())
    assert all(torch.equal(w, weights[0]) for w in weights)


@SEVERAL
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_ranks_stay_equal_in_other_precisions(world, tmp_path, precision) -> None:
    class Plain(Regression):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.loss(batch)

    module = Plain().float()
    trainer = ringjax_trainer(
        tmp_path, precision=precision, max_steps=10, accumulate_grad_batches=2
    )
    trainer.fit(module, share(40 * world.size, 4, torch.float32))
    assert trainer.global_step == 10
    for p in module.parameters():
        values = hvd.allgather(p.detach().double().reshape(1, -1))
        assert all(torch.equal(row, values[0]) for row in values)


@SEVERAL
def test_a_resumed_run_equals_one_without_a_break(world, tmp_path) -> None:
    folder = _folder(tmp_path)
    rows = 4 * world.size * 6
    whole, first, second = Regression(), Regression(), Regression(seed=9)
    ringjax_trainer(folder, max_epochs=4).fit(whole, share(rows, 4))
    saving = ModelCheckpoint(folder / "saved", save_last=True, monitor="train")
    trainer = ringjax_trainer(
        folder, max_epochs=2, callbacks=[saving], enable_checkpointing=True
    )
    trainer.fit(first, share(rows, 4))
    assert saving.best_model_path
    paths = hvd.allgather_object((saving.best_model_path, saving.last_model_path))
    assert len(set(paths)) == 1
    trainer = ringjax_trainer(folder, max_epochs=4)
    trainer.fit(second, share(rows, 4), ckpt_path=saving.last_model_path)
    assert_equal(second, whole)
    plain = Regression(seed=1)  # a checkpoint is Lightning's, for any strategy
    state = torch.load(saving.last_model_path, weights_only=True)["state_dict"]
    plain.load_state_dict(state)
    assert_equal(plain, first)


@SEVERAL
def test_early_stopping_stops_all_ranks_at_once(world, tmp_path) -> None:
    class Worse(Regression):
        """Its own loss only grows on the last rank."""

        def validation_step(self, batch: Any, index: int) -> None:
            own = float(self.current_epoch if hvd.rank() == hvd.size() - 1 else 1)
            self.log("own", own, rank_zero_only=False)
            super().validation_step(batch, index)

    stop = EarlyStopping("own", patience=1)
    trainer = ringjax_trainer(tmp_path, max_epochs=20, callbacks=[stop])
    trainer.fit(Worse(), share(8 * world.size, 4), share(8 * world.size, 4))
    epochs = hvd.allgather_object(trainer.current_epoch)
    assert len(set(epochs)) == 1 and epochs[0] < 20


class Measured(Regression):
    """Logs metrics of TorchMetrics and the ranks' own values."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.all = MeanMetric(), CatMetric()

    def validation_step(self, batch: Any, index: int) -> None:
        super().validation_step(batch, index)
        self.mean.update(batch[1])
        self.all.update(batch[1].flatten())
        self.log("mean", self.mean)
        for op in ("sum", "min", "max"):
            self.log(op, float(hvd.rank() + 1), reduce_fx=op, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.values = self.all.compute()
        self.all.reset()


@SEVERAL
def test_metrics_are_those_of_all_ranks(world, tmp_path) -> None:
    rows = 8 * world.size
    module = Measured()
    trainer = ringjax_trainer(tmp_path)
    (found,) = trainer.validate(module, share(rows, 4), verbose=False)
    reference = Regression()
    (alone,) = alone_trainer(tmp_path).validate(
        reference, loader(rows, 4), verbose=False
    )
    expected = dataset(rows).tensors[1]
    assert found["val"] == pytest.approx(alone["val"])
    assert found["mean"] == pytest.approx(float(expected.mean()))
    assert (found["min"], found["max"]) == (1.0, world.size)
    assert found["sum"] == 2 * sum(range(1, world.size + 1))
    assert torch.equal(
        module.values.sort()[0].double(), expected.float().double().flatten().sort()[0]
    )
    copy.deepcopy(module.mean).compute()  # a copy reduces over the same ranks
    (tested,) = trainer.test(module, share(rows, 4), verbose=False)
    assert tested["test"] == pytest.approx(alone["val"])


@SEVERAL
def test_gathering_is_differentiable_as_with_ddp(world, tmp_path) -> None:
    class Gathering(Regression):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            own = torch.full((2,), float(hvd.rank()), requires_grad=True)
            gathered = self.all_gather(own, sync_grads=True)
            assert gathered.shape == (world.size, 2)
            (gathered * (hvd.rank() + 1)).sum().backward()
            # The sum over the ranks of their gradients of this rank's row.
            assert own.grad.tolist() == [sum(range(1, world.size + 1))] * 2
            plain = self.all_gather({"a": torch.tensor(hvd.rank()), "b": 1.5})
            assert plain["a"].tolist() == list(range(world.size))
            assert not plain["b"].requires_grad
            with pytest.raises(TypeError, match="pass a ringjax.ProcessSet"):
                self.all_gather(own, group="world")
            with pytest.raises(ValueError, match="reduce_op='median' is none of mean"):
                self.trainer.strategy.reduce(own, reduce_op="median")
            assert self.trainer.strategy.reduce("text") == "text"
            mean = self.trainer.strategy.reduce(torch.tensor(hvd.rank()))
            assert float(mean) == (world.size - 1) / 2
            return super().training_step(batch, index)

    trainer = ringjax_trainer(tmp_path, max_steps=1)
    trainer.fit(Gathering(), share(4 * world.size, 4))
    assert trainer.strategy.broadcast({"rank": hvd.rank()}, src=1) == {"rank": 1}


@SEVERAL
def test_samplers_are_put_in_for_each_stage(world, tmp_path) -> None:
    lightning.seed_everything(7)
    seen: list[torch.Tensor] = []

    class Seeing(Regression):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            seen.append(batch[1].flatten())
            return super().training_step(batch, index)

    rows = 4 * world.size * 2
    trainer = ringjax_trainer(tmp_path, max_epochs=1)
    trainer.fit(Seeing(), torch.utils.data.DataLoader(dataset(rows), 4, shuffle=True))
    every = hvd.allgather(torch.cat(seen)).sort()[0]
    assert torch.equal(every, dataset(rows).tensors[1].flatten().sort()[0])
    module = Regression()
    parts = ringjax_trainer(tmp_path).predict(module, loader(rows - 1, 4))
    counts = hvd.allgather_object(sum(map(len, parts)))
    assert sum(counts) == rows - 1  # no sample is predicted twice


class Normalized(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(self.body, torch.nn.BatchNorm1d(8).double())


@SEVERAL
def test_batch_norm_over_all_ranks_equals_one_process(world, tmp_path) -> None:
    module, alone = Normalized(), Normalized()
    rows = 4 * world.size * 5
    trainer = ringjax_trainer(tmp_path, sync_batchnorm=True, max_epochs=4)
    trainer.fit(module, share(rows, 4))
    alone_trainer(tmp_path, max_epochs=4).fit(alone, loader(rows, 4 * world.size))
    assert_equal(module, alone)
    layer = module.body[1]
    assert type(layer) is torch.nn.BatchNorm1d
    torch.testing.assert_close(layer.running_var, alone.body[1].running_var)


@SEVERAL
def test_running_statistics_are_equal_after_training(world, tmp_path) -> None:
    module = Normalized()
    trainer = ringjax_trainer(tmp_path, max_epochs=2)
    trainer.fit(module, share(20 * world.size, 4), share(8 * world.size, 4))
    means = hvd.allgather(module.body[1].running_mean[None])
    assert all(torch.equal(row, means[0]) for row in means)


class Unfreezing(Regression):
    """Its body is frozen in the first epoch."""

    def on_train_epoch_start(self) -> None:
        self.body.requires_grad_(self.current_epoch > 0)


@SEVERAL
def test_layers_may_be_unfrozen_and_a_trainer_used_twice(world, tmp_path) -> None:
    module, alone = Unfreezing(), Unfreezing()
    rows = 4 * world.size * 5
    trainer = ringjax_trainer(tmp_path, max_epochs=3)
    reference = alone_trainer(tmp_path, max_epochs=3)
    for _ in range(2):
        trainer.fit(module, share(rows, 4))
        reference.fit(alone, loader(rows, 4 * world.size))
        assert_equal(module, alone)
        trainer.fit_loop.max_epochs = reference.fit_loop.max_epochs = 5
        assert not module.head.weight._post_accumulate_grad_hooks


@SEVERAL
def test_ranks_begin_with_the_module_of_rank_0(world, tmp_path) -> None:
    module, first = Regression(seed=world.rank), Regression(seed=0)
    rows = 4 * world.size * 5
    ringjax_trainer(tmp_path, max_epochs=1).fit(module, share(rows, 4))
    alone_trainer(tmp_path, max_epochs=1).fit(first, loader(rows, 4 * world.size))
    assert_equal(module, first)


@SEVERAL
def test_a_step_that_differs_between_ranks_is_an_error(world, tmp_path) -> None:
    class Skipping(Adversarial):
        """Manual optimization, in which rank 1 leaves a step out."""

        def training_step(self, batch: Any, index: int) -> None:
            first, _ = self.optimizers()
            self.manual_backward(self.generator(batch[0]).square().mean())
            if hvd.rank() != 1 or index:
                first.step()
            first.zero_grad()

    with pytest.raises(RingjaxError, match="some ranks have made a step"):
        ringjax_trainer(tmp_path, max_steps=9).fit(
            Skipping(), share(40 * world.size, 4)
        )


@pytest.mark.ranks(2, isolated=True)
def test_ranks_in_different_epochs_do_not_mix_gradients(world, tmp_path) -> None:
    class Uneven(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(dataset(8 + 4 * hvd.rank()))

    batches = torch.utils.data.DataLoader(Uneven(), 4)
    message = "has not submitted|epoch 0, 1"
    with hvd.collective_timeout(3), pytest.raises(RingjaxError, match=message):
        ringjax_trainer(tmp_path, max_epochs=3).fit(Regression(), batches)


@SEVERAL
def test_what_cannot_work_is_refused_by_name(world, tmp_path) -> None:
    wanted = world.size + 2
    message = rf"run `ringrun -np {wanted} python train.py`"
    with pytest.raises(ValueError, match=message):
        ringjax_trainer(tmp_path, devices=wanted)
    with pytest.raises(ValueError, match="num_nodes=7 ask for 7 processes"):
        ringjax_trainer(tmp_path, devices=1, num_nodes=7)
    for right in ({"devices": world.size}, {"devices": 1}, {}):
        assert ringjax_trainer(tmp_path, **right).world_size == world.size
    with pytest.raises(ValueError, match=r"Trainer\(accumulate_grad_batches=2\)"):
        options = {"backward_passes_per_step": 2}
        trainer = ringjax_trainer(tmp_path, options=options, max_steps=1)
        trainer.fit(Regression(), share(8 * world.size, 4))
    with pytest.raises(ValueError, match="backward_passes_per_step=0"):
        RingjaxStrategy(backward_passes_per_step=0)
    uneven = loader(8 if world.rank else 12, 4)
    with pytest.raises(ValueError, match=r"limit_train_batches=2"):
        trainer = ringjax_trainer(tmp_path, max_steps=9, use_distributed_sampler=False)
        trainer.fit(Regression(), uneven)

    class Other(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.extra = torch.nn.Linear(2, 2 + (hvd.rank() == 1))

    class Lazy(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.lazy = torch.nn.LazyLinear(2)

    with pytest.raises(ValueError, match="'lazy.weight' has no shape yet"):
        ringjax_trainer(tmp_path, max_steps=1).fit(Lazy(), share(8, 4))
    here = r"'extra.bias' is \(\[3\]" if world.rank == 1 else "all is equal"
    with pytest.raises(ValueError, match=f"different modules.*here {here}"):
        ringjax_trainer(tmp_path, max_steps=1).fit(Other(), share(8, 4))


@SEVERAL
def test_windows_that_the_module_closes_by_hand(world, tmp_path) -> None:
    """A declared window is reduced once, and changed gradients in it are an error."""
    options = {"backward_passes_per_step": 2}

    class Window(Adversarial):
        def training_step(self, batch: Any, index: int) -> None:
            first, _ = self.optimizers()
            self.manual_backward(self.generator(batch[0]).square().mean())
            if index % 2 or self.every == 9:
                if self.every == 9:
                    self.generator.weight.grad.mul_(2)
                first.step()
                first.zero_grad()

    class Blocked(Window):
        """Blocks the first pass of a window itself, without the option."""

        def training_step(self, batch: Any, index: int) -> None:
            if index % 2:
                return super().training_step(batch, index)
            with self.trainer.strategy.block_backward_sync():
                return super().training_step(batch, index)

    rows = 4 * world.size * 6
    blocked, plain = Blocked(), Window()
    ringjax_trainer(tmp_path, max_epochs=2).fit(blocked, share(rows, 4))
    alone_trainer(tmp_path, max_epochs=2).fit(plain, loader(rows, 4 * world.size))
    assert_equal(blocked, plain)
    module, alone = Window(), Window()
    rows = 4 * world.size * 5
    ringjax_trainer(tmp_path, options=options, max_epochs=2).fit(module, share(rows, 4))
    alone_trainer(tmp_path, max_epochs=2).fit(alone, loader(rows, 4 * world.size))
    assert_equal(module, alone)
    with pytest.raises(RuntimeError, match="'generator.weight' was changed before"):
        trainer = ringjax_trainer(tmp_path, options=options, max_epochs=1)
        trainer.fit(Window(every=9), share(rows, 4))


@pytest.mark.ranks(3)
def test_a_process_set_trains_a_module_of_its_own(world, tmp_path) -> None:
    pair = hvd.add_process_set([0, 2])
    if world.rank != 1:
        module, alone = Regression(), Regression()
        data = dataset(40)
        sampler = torch.utils.data.DistributedSampler(
            data, 2, pair.rank(), shuffle=False
        )
        trainer = ringjax_trainer(tmp_path, options={"process_set": pair}, max_epochs=3)
        assert (trainer.world_size, trainer.global_rank) == (2, world.rank // 2)
        trainer.fit(module, torch.utils.data.DataLoader(data, 4, sampler=sampler))
        alone_trainer(tmp_path, max_epochs=3).fit(alone, loader(40, 8))
        assert_equal(module, alone)
    hvd.remove_process_set(pair)


@SEVERAL
def test_fp16_gradients_and_the_registered_name(world, tmp_path) -> None:
    trainer = ringjax_trainer(tmp_path, options={"compression": hvd.Compression.fp16})
    assert trainer.strategy._gradients.options.compression is hvd.Compression.fp16
    module, alone = Regression(), Regression()
    rows = 4 * world.size * 5
    trainer = ringjax_trainer(
        tmp_path, options={"compression": hvd.Compression.fp16}, max_epochs=1
    )
    trainer.fit(module, share(rows, 4))
    alone_trainer(tmp_path, max_epochs=1).fit(alone, loader(rows, 4 * world.size))
    assert_equal(module, alone, atol=1e-2)
    named = lightning.Trainer(strategy="ringjax", accelerator="cpu", logger=False)
    assert isinstance(named.strategy, RingjaxStrategy)
