"""Names for the objects of Keras in annotations, because Keras has no types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

# A tensor of the backend, a traced tensor included, or a sparse gradient.
Tensor: TypeAlias = Any
# A function that changes tensors, such as a reduction of gradients.
TensorChange: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
# A `keras.Variable`, or a variable of the backend.
Variable: TypeAlias = Any
Optimizer: TypeAlias = Any
Model: TypeAlias = Any
Layer: TypeAlias = Any
# The metrics that Keras passes to a callback.
Logs: TypeAlias = dict[str, Any] | None
# A compressor of the backend, a `WireDtype`, or a class of the program.
Compressor: TypeAlias = Any
