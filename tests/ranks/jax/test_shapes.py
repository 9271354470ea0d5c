"""Arguments and results of the public collectives have the annotated shapes.

ringjax does not import jaxtyping at run time, so these tests check its annotations. A
control with wrong shapes must fail.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.typing import ArrayLike

import ringjax

pytestmark = [
    pytest.mark.ranks(1, 3),
    pytest.mark.launch("collectives"),
    pytest.mark.usefixtures("world"),
]
# The names in the annotations, which ringjax imports for type checkers only.
NAMES = {
    **{name: getattr(jaxtyping, name) for name in ("PyTree", "Shaped")},
    "Array": jax.Array,
    "ArrayLike": ArrayLike,
    "Tree": "Tree",
}
TREES = [np.ones((6, 2), np.float32), [jnp.ones(3, jnp.int32), {"a": jnp.ones((3, 1))}]]


def call(function: Callable[..., Any], tensor: Any, *arguments: Any) -> Any:
    """Calls a collective and checks its tensor and its result by its annotations."""
    first = next(iter(inspect.signature(function).parameters))
    # typing.get_type_hints would take the names of dimensions for types.
    given, returned = (
        eval(function.__annotations__[name], NAMES) for name in (first, "return")
    )
    with jaxtyping.jaxtyped("context"):  # binds names of dimensions
        assert isinstance(tensor, given), (tensor, given)
        result = function(tensor, *arguments)
        assert isinstance(result, returned), (result, returned)
    return result


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("prefix", ["", "grouped_"])
@pytest.mark.parametrize(
    "name", ["allreduce", "broadcast", "allgather", "alltoall", "reducescatter"]
)
def test_tensors_and_results_have_the_annotated_shapes(
    name: str, prefix: str, tree: Any
) -> None:
    arguments = [0] if name == "broadcast" else []
    call(getattr(ringjax, prefix + name), tree, *arguments)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda tensor: ringjax.allgather(tensor)[..., None],
        lambda tensor: np.asarray(ringjax.allgather(tensor)),
    ],
)
def test_control_wrong_shapes_and_types_are_found(wrong: Callable[..., Any]) -> None:
    def gather(tensor: Any) -> Any:
        return wrong(tensor)

    gather.__annotations__ = dict(ringjax.allgather.__annotations__)
    with pytest.raises(AssertionError):
        call(gather, np.ones((6, 2)))
