"""The gradients and networks that the GPU benchmarks use: shapes, parameters, losses.

ResNet-50 in plain jax, so that nothing but jax must be installed, and a deep stack of
dense layers that compiles quickly. Nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness.shapes import Shapes, resnet50, transformer
from benchmarks.harness.shapes import count as count

if TYPE_CHECKING:
    import jax

Loss = Callable[[Any, Any], Any]


SETS: dict[str, Shapes] = {
    "ResNet-50": resnet50(),
    "transformer": transformer(),
    "one tensor": [(count(resnet50()),)],
}


# -- ResNet-50 -------------------------------------------------------------------------


def resnet_parameters(seed: int = 0) -> list[jax.Array]:
    """Returns float32 parameters in the order of `resnet50()`: kernel, scale, bias."""
    import jax
    import jax.numpy as jnp

    keys = iter(jax.random.split(jax.random.key(seed), 200))
    out = []
    for place, shape in enumerate(resnet50()):
        if len(shape) > 1:
            fan_in = math.prod(shape[:-1])
            out.append(jax.random.normal(next(keys), shape) * (2 / fan_in) ** 0.5)
        else:  # scales are 1; all biases are 0
            out.append(jnp.full(shape, 1.0 if place % 3 == 1 else 0.0))
    out[-1] = jnp.zeros(out[-1].shape)
    return out


def resnet_loss(parameters: Sequence[Any], batch: Any) -> Any:
    """Returns the cross entropy, computed in bfloat16 with batch normalisation."""
    import jax
    import jax.numpy as jnp

    images, labels = batch
    place = iter(range(0, len(parameters), 3))

    def conv(x: Any, stride: int, active: bool = True) -> Any:
        i = next(place)
        kernel, scale, bias = parameters[i : i + 3]
        x = jax.lax.conv_general_dilated(
            x,
            kernel.astype(x.dtype),
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        wide = x.astype(jnp.float32)
        mean = wide.mean((0, 1, 2))
        variance = (wide * wide).mean((0, 1, 2)) - mean * mean
        factor = scale * jax.lax.rsqrt(jnp.maximum(variance, 0.0) + 1e-5)
        x = (wide * factor + (bias - mean * factor)).astype(x.dtype)
        return jax.nn.relu(x) if active else x

    x = conv(images.astype(jnp.bfloat16), 2)
    window = ((1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    x = jax.lax.reduce_window(x, -np.inf, jax.lax.max, *window)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            stride = 2 if stage and block == 0 else 1
            y = conv(x, 1)
            y = conv(y, stride)
            y = conv(y, 1, active=False)
            x = jax.nn.relu(y + (conv(x, stride, active=False) if block == 0 else x))
    features = x.mean((1, 2)).astype(jnp.float32)
    logits = features @ parameters[-2] + parameters[-1]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    return -chosen.mean()


def resnet_batch(batch: int, pixels: int = 224) -> Any:
    import jax

    one, two = jax.random.split(jax.random.key(1))
    images = jax.random.normal(one, (batch, pixels, pixels, 3))
    return images, jax.random.randint(two, (batch,), 0, 1000)


# -- a deep stack of dense layers ------------------------------------------------------


def mlp_parameters(layers: int, width: int) -> list[jax.Array]:
    """Returns float32 matrices. A matrix larger than a bucket is its own message."""
    import jax

    keys = jax.random.split(jax.random.key(0), layers)
    return [jax.random.normal(key, (width, width)) * width**-0.5 for key in keys]


def mlp_loss(parameters: Sequence[Any], batch: Any) -> Any:
    """Returns the mean square of the last layer, computed in bfloat16."""
    import jax.numpy as jnp

    x = batch.astype(jnp.bfloat16)
    for matrix in parameters:
        x = jnp.tanh(x @ matrix.astype(jnp.bfloat16))
    return jnp.mean(x.astype(jnp.float32) ** 2)


def build(
    model: str, batch: int, layers: int, width: int
) -> tuple[list[jax.Array], Any, Loss]:
    """Returns parameters, a batch and the loss of "resnet50" or "mlp"."""
    import jax

    if model == "resnet50":
        return resnet_parameters(), resnet_batch(batch), resnet_loss
    x = jax.random.normal(jax.random.key(1), (batch, width))
    return mlp_parameters(layers, width), x, mlp_loss
