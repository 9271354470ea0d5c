"""Short names for JAX's types, for annotations.

Aval: shape and dtype of a value, as JAX traces it.
Context: the state of a lowering: module, avals, tokens.
Traced: an array or a tracer, an operand or result of a primitive.
IrValue: a value of MLIR.
Params: the parameters of a primitive, by name.
Tangent: a traced derivative, or JAX's symbolic zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
from jax.extend.core import Primitive as Primitive
from jax.interpreters import ad, mlir

Aval = jax.core.ShapedArray
Context = mlir.LoweringRuleContext
IrValue: TypeAlias = "mlir.ir.Value[Any]"
Traced = jax.Array
Params = dict[str, Any]
Tangent = jax.Array | ad.Zero

# ``(batched operands, their batch dimensions, **params) -> (results, dimensions)``
Batched = tuple[Sequence[Traced], Sequence[int | None]]
# ``(operands, tangents, **params) -> (results, their tangents)``
Jvp = tuple[Sequence[Traced], Sequence[Tangent]]
Rule = Callable[..., Any]

# The structure of a tree, in annotations with jaxtyping's `PyTree`.
Tree = TypeVar("Tree")
