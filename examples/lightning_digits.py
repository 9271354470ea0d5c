"""A small convolutional network reads handwritten digits with Lightning's Trainer.

    python lightning_digits.py                    one rank
    ringrun -np 2 python lightning_digits.py      two ranks, the same global batch

The data and the network are those of `torch_digits.py`. In every step the ranks share
one global batch, so the number of ranks changes the speed and not the result. Only the
strategy is ringjax's. Needs ``pip install "ringjax[lightning,examples]"``.

To go further: ``--precision bf16-mixed``, ``--accumulate 2``, ``--compression bf16``,
and `torch_digits.py` for the loop without Lightning.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings

import lightning
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ringjax.torch as hvd
from ringjax.lightning import RingjaxStrategy

TEST_IMAGES = 360


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=48, help="images of all ranks")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--accumulate", type=int, default=1, metavar="BATCHES")
    parser.add_argument(
        "--compression", choices=("none", "fp16", "bf16"), default="none"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load(seed: int, batch: int) -> list[TensorDataset]:
    """Loads full batches of training data, and test data; equal on all ranks."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images = torch.tensor(digits.images[order, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target[order])
    last = len(labels) - TEST_IMAGES
    full = last - last % batch
    parts = (slice(full), slice(last, None))
    return [TensorDataset(images[part], labels[part]) for part in parts]


class Digits(lightning.LightningModule):
    """Two convolutions and two dense layers, with Adam and a cosine schedule."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.started = time.perf_counter()
        self.network = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def measure(self, batch: list[torch.Tensor], stage: str) -> torch.Tensor:
        """Logs loss and accuracy as means over all ranks; returns the loss."""
        images, labels = batch
        logits = self.network(images)
        loss = functional.cross_entropy(logits, labels)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        values = {f"{stage} loss": loss, f"{stage} accuracy": accuracy}
        self.log_dict(values, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Returns the loss of this rank's part of a batch."""
        return self.measure(batch, "train")

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """Measures this rank's part of the test images."""
        self.measure(batch, "test")

    def on_train_epoch_end(self) -> None:
        """Prints the metrics, on rank 0."""
        metrics = self.trainer.callback_metrics
        if self.trainer.is_global_zero:
            print(
                f"epoch {self.current_epoch + 1:2}: loss {metrics['train loss']:.4f}  "
                f"train {metrics['train accuracy']:6.2%}  "
                f"test {metrics['test accuracy']:6.2%}  "
                f"after {time.perf_counter() - self.started:.1f} s",
                flush=True,
            )

    def configure_optimizers(self):
        """Returns Adam, and a schedule over all steps."""
        optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate)
        steps = max(self.trainer.estimated_stepping_batches, 1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    compression = getattr(hvd.Compression, arguments.compression)
    trainer = lightning.Trainer(
        strategy=RingjaxStrategy(compression=compression),
        max_epochs=arguments.epochs,
        precision=arguments.precision,
        accumulate_grad_batches=arguments.accumulate,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    # The ranks of a host share its cores.
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))
    lightning.seed_everything(arguments.seed, verbose=False)
    share = max(arguments.batch // trainer.world_size, 1)
    data, test = load(arguments.seed, share * trainer.world_size)
    module = Digits(arguments.learning_rate)
    if trainer.is_global_zero:
        count = sum(p.numel() for p in module.parameters())
        size = trainer.world_size
        print(f"{size} rank(s), {share * size} images a step, {count:,} parameters")
    # Lightning gives each rank its part of a shuffled epoch, and of the test.
    batches = DataLoader(data, share, shuffle=True)
    trainer.fit(module, batches, DataLoader(test, TEST_IMAGES))
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["test accuracy"])
        print(f"result: {accuracy:.2%} of {TEST_IMAGES} unseen digits read correctly")
        print("to go further: python lightning_digits.py --help, torch_digits.py")


if __name__ == "__main__":
    main()
