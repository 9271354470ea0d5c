"""The shapes of the gradients of known networks, from their architectures.

Used on CPUs (allreduce.py) and on a GPU (gpu/models.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Shapes = list[tuple[int, ...]]
# The network `dense`: number of layers, width, and rows of a batch.
LAYERS, WIDTH, BATCH = 82, 128, 32


def resnet50() -> Shapes:
    """Returns the 161 gradients of ResNet-50: 25.6 million numbers."""
    kernels, width = [(7, 7, 3, 64)], 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 << stage
        for block in range(blocks):
            kernels += [(1, 1, width, inner), (3, 3, inner, inner)]
            kernels += [(1, 1, inner, 4 * inner)]
            if block == 0:
                kernels.append((1, 1, width, 4 * inner))
            width = 4 * inner
    shapes: Shapes = []
    for kernel in kernels:
        # Each kernel has a scale and a bias.
        shapes += [kernel, kernel[-1:], kernel[-1:]]
    return [*shapes, (width, 1000), (1000,)]


def vgg16() -> Shapes:
    """Returns the 32 gradients of VGG-16: 138 million numbers, 103 million in one."""
    shapes: Shapes = []
    width = 3
    for blocks, channels in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(blocks):
            shapes += [(3, 3, width, channels), (channels,)]
            width = channels
    inputs = 7 * 7 * width
    for outputs in (4096, 4096, 1000):
        shapes += [(inputs, outputs), (outputs,)]
        inputs = outputs
    return shapes


def transformer(layers: int = 100, width: int = 1024) -> Shapes:
    """Returns 1,204 gradients of a GPT-2 with 100 layers: 1.31 billion numbers."""
    block: Shapes = [(width,), (width,)]  # scale and bias of the first norm
    block += [(width, 3 * width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,)]
    block += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50257, width), (1024, width), *(block * layers), (width,), (width,)]


def narrow_transformer() -> Shapes:
    """Returns 1,204 tensors that are 128 wide: 26.4 million numbers, like ResNet-50."""
    return transformer(width=128)


def even(tensors: int, numbers: int) -> Shapes:
    """Returns tensors with `numbers` numbers in all, and nearly equal sizes."""
    each, more = divmod(numbers, tensors)
    return [(each + (place < more),) for place in range(tensors)]


def count(shapes: Sequence[Sequence[int]]) -> int:
    """Returns how many numbers tensors of these shapes hold."""
    return sum(math.prod(shape) for shape in shapes)


# The sets that --sets may name, each with a title and its shapes.
SETS: dict[str, tuple[str, Callable[[], Shapes]]] = {
    "resnet50": ("ResNet-50", resnet50),
    "vgg16": ("VGG-16", vgg16),
    "transformer": ("a transformer", narrow_transformer),
}
