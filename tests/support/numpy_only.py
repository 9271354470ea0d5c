"""For programs of ranks that need no framework: it refuses them, and has their calls.

A rank that imports jax starts a second or two later, and what a launcher, a coordinator
or a link does is the same without. Whoever imports this cannot import a framework any
more, so the stack shows who does it by mistake. `allreduce` goes where a compiled
program's goes: calls in the order of the program, on the thread that makes them. Named
operations are `ringjax.eager`.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np

from ringjax import _native, errors, runtime

FRAMEWORKS = ("jax", "tensorflow", "torch")


class _Refusal(importlib.abc.MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname in FRAMEWORKS:
            raise AssertionError(f"{fullname} is imported, and this story needs none")
        return None


assert not sys.modules.keys() & set(FRAMEWORKS), "a framework has been imported already"
sys.meta_path.insert(0, _Refusal())
# ringjax.init() would ask jax which of them is this rank's.
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def allreduce(
    x: Any,
    op: str = "Sum",
    *,
    name: str = "",
    process_set: runtime.ProcessSet = runtime.global_process_set,
) -> Any:
    """An allreduce as a compiled program calls it; errors have classes of ringjax.

    Args:
        op: a key of `_native.REDUCE_OPS`.
    """
    x = np.asarray(x, order="C")
    out = np.empty_like(x)
    which = _native.COLLECTIVES["allreduce"], _native.REDUCE_OPS[op]
    native = runtime.communicator(process_set)
    try:
        native.execute(*which, [x], [out], name=name)
    except _native.StatusError as error:
        raise errors.from_status(error) from error
    return out
