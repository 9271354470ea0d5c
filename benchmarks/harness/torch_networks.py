"""Real networks in PyTorch, and a training step on random data.

The inputs are so small that a step takes about 0.3 s of one CPU. The callers in peers/
decide how gradients travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness.shapes import BATCH, LAYERS, WIDTH

Optimizer = torch.optim.Optimizer
# A function that wraps a network and its optimizer for training with other ranks.
Wrap = Callable[[nn.Module, Optimizer], tuple[Callable[[Tensor], Tensor], Optimizer]]
Network = tuple[nn.Module, Tensor, Tensor]  # network, inputs, labels


class Bottleneck(nn.Module):
    """A block of ResNet-50: three convolutions, and a shortcut."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.path = nn.Sequential(
            *(nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner)),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False),
            *(nn.BatchNorm2d(inner), nn.ReLU(inplace=True)),
            *(nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.around: nn.Module = nn.Identity()
        if inputs != outputs:
            fit = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.around = nn.Sequential(fit, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.path(x) + self.around(x))


def resnet50() -> Network:
    """Returns ResNet-50: 161 tensors, 25.6 million numbers, 8 images of 32 x 32."""
    layers: list[nn.Module] = [
        *(nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64)),
        *(nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)),
    ]
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            layers.append(Bottleneck(inputs, 64 << stage, stride))
            inputs = 4 * 64 << stage
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)]
    return (
        nn.Sequential(*layers),
        torch.randn(8, 3, 32, 32),
        torch.randint(1000, (8,)),
    )


class Transformer(nn.Module):
    """A GPT with 12 tensors in each layer, and 4 other tensors."""

    def __init__(self, layers: int, width: int, letters: int, length: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Embedding(length, width)
        block = (width, 4, 4 * width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(*block, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.out = nn.Linear(width, letters)
        self.mask = nn.Transformer.generate_square_subsequent_mask(length)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.letters(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.out(x).flatten(0, 1)


def transformer() -> Network:
    """Returns 16 layers of width 256 and 2 texts: 196 tensors, 12.8 million numbers."""
    network = Transformer(layers=16, width=256, letters=256, length=64)
    tokens = torch.randint(256, (2, 65))
    return network, tokens[:, :-1], tokens[:, 1:].flatten()


def dense() -> Network:
    """Returns dense layers: 164 tensors, 1.4 million numbers, as in peers/keras.py."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    inputs, labels = torch.randn(BATCH, WIDTH), torch.randint(WIDTH, (BATCH,))
    return nn.Sequential(*layers), inputs, labels


NETWORKS: dict[str, Callable[[], Network]] = {
    "resnet50": resnet50,
    "transformer": transformer,
    "dense": dense,
}


def training(name: str, wrap: Wrap | None) -> Callable[[], Any]:
    """Returns a training step: clears gradients, runs forward and backward, updates.

    Args:
      name: a key of NETWORKS.
      wrap: makes the ranks train together; None if each rank trains alone.
    """
    torch.manual_seed(0)
    network, inputs, labels = NETWORKS[name]()
    optimizer: Optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    forward: Callable[[Tensor], Tensor] = network
    if wrap is not None:
        forward, optimizer = wrap(network, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(forward(inputs), labels).backward()
        optimizer.step()

    return step


def shapes(name: str) -> list[tuple[int, ...]]:
    with torch.device("meta"):
        network, _, _ = NETWORKS[name]()
    return [tuple(p.shape) for p in network.parameters()]
