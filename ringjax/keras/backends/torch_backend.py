"""Keras on PyTorch: buckets of gradients as grouped operations of `ringjax.torch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import torch

import ringjax.torch as hvd
from ringjax import runtime
from ringjax.compression import WireDtype
from ringjax.eager import parameter_check
from ringjax.keras.backends.base_backend import Backend, ReductionOptions
from ringjax.world.process_set import ProcessSet
from ringjax.xla import buckets


class TorchBackend(Backend):
    """Reductions of tensors, all at once when the backward pass has ended."""

    name = "torch"
    compression = hvd.Compression

    # Where Keras compiles the step.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def reduce(
        self,
        gradients: Sequence[Any],
        places: Sequence[int],
        variables: Sequence[Any],
        groups: Sequence[Sequence[int]],
        how: ReductionOptions,
    ) -> list[Any]:
        """See the base class."""
        parameter_check.check(
            how.name,
            lambda: _memory(variables),
            how.process_set,
            whose=parameter_check.identity_key(variables),
            first=parameter_check.AFTER_FIRST_STEP,
        )
        compression = how.compression
        if isinstance(compression, WireDtype):
            compression = getattr(hvd.Compression, compression.name)
        both = [compression.compress(gradient) for gradient in gradients]
        prescale, postscale = how.factors
        waiting = []
        for unit in _units([tensor for tensor, _ in both], groups):
            handle = hvd.grouped_allreduce_async(
                [both[i][0] for i in unit],
                name=f"{how.name}.{places[unit[0]]}",
                op=how.op,
                prescale_factor=prescale,
                postscale_factor=postscale,
                process_set=how.process_set,
            )
            waiting.append((unit, handle))
        out = list(gradients)
        for unit, handle in waiting:
            for i, reduced in zip(unit, hvd.synchronize(handle), strict=True):
                out[i] = compression.decompress(reduced, both[i][1])
        return out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def all_true(self, flag: Any, process_set: ProcessSet) -> Any:
        """See the base class."""
        votes = flag.float()
        return hvd.allreduce(votes, op=hvd.Min, process_set=process_set) > 0

    def cond(
        self,
        condition: Any,
        yes: Callable[[], None],
        no: Callable[[], None],
        variables: Sequence[Any],
    ) -> None:
        """See the base class; nothing is traced here."""
        if bool(condition):
            yes()
        else:
            no()


def _memory(variables: Sequence[Any]) -> Iterator[tuple[str, int, int]]:
    for variable in variables:
        if not isinstance(variable, keras.Variable):
            continue
        here = variable.value.detach().cpu().contiguous()  # the value itself, mostly
        yield variable.path, here.data_ptr(), here.nbytes


def _units(tensors: Sequence[Any], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """What is one operation: the program's groups, and buckets of all others."""
    grouped = {i for group in groups for i in group}
    free = [i for i in range(len(tensors)) if i not in grouped]
    units = [list(group) for group in groups if group]
    if free:
        sizes = [((tensors[i].nbytes,), "uint8") for i in free]
        room = runtime.config().bucket_bytes or 1
        units += [[free[k] for k in cut] for cut in buckets.plan(sizes, room)]
    return units


BACKEND = TorchBackend()
