"""Refuses imports of frameworks in a rank, and provides an allreduce without them.

A rank that imports jax starts a second or two later. Tests of launcher, coordinator and
links need no framework. After the import of this module, the import of a framework
fails, and its stack shows the import statement. `allreduce` uses the jit lane, like a
compiled program: calls are made in program order on the calling thread. For named
operations use `ringjax.eager`.
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
            raise AssertionError(f"{fullname} is imported, but this test needs none")
        return None


assert not sys.modules.keys() & set(FRAMEWORKS), "a framework has been imported already"
sys.meta_path.insert(0, _Refusal())
# With visible devices, ringjax.init() would ask jax for this rank's device.
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def allreduce(
    x: Any,
    op: str = "Sum",
    *,
    name: str = "",
    process_set: runtime.ProcessSet = runtime.global_process_set,
) -> Any:
    """Makes an allreduce as a compiled program does. Raises ringjax's error classes.

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
