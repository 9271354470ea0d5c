"""TorchBackend: reduces buckets of gradients by grouped operations of ringjax.torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import keras
import torch
from torch import Tensor

import ringjax.torch as hvd
from ringjax import runtime
from ringjax.compression import WireDtype
from ringjax.eager import parameter_check
from ringjax.keras.backends.base_backend import Backend, ReductionOptions
from ringjax.keras.keras_types import Variable
from ringjax.world.process_set import ProcessSet
from ringjax.xla import buckets


class _TorchBackend(Backend):
    """Reduces all gradients together, after the backward pass."""

    name = "torch"
    compression = hvd.Compression

    # torch.compile cannot trace collectives, so two methods are excluded from the step
    # that Keras compiles.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def reduce(
        self,
        gradients: Sequence[Tensor],
        indices: Sequence[int],
        variables: Sequence[Variable],
        groups: Sequence[Sequence[int]],
        options: ReductionOptions,
    ) -> list[Tensor]:
        """Submits all groups and buckets, then waits for all of them."""
        parameter_check.check(
            options.name,
            lambda: _memory(variables),
            options.process_set,
            whose=parameter_check.identity_key(variables),
            first=parameter_check.AFTER_FIRST_STEP,
        )
        compression = options.compression
        if isinstance(compression, WireDtype):
            compression = getattr(hvd.Compression, compression.name)
        packed = [compression.compress(gradient) for gradient in gradients]
        prescale, postscale = options.factors
        submitted = []
        for unit in _units([tensor for tensor, _ in packed], groups):
            handle = hvd.grouped_allreduce_async(
                [packed[i][0] for i in unit],
                name=f"{options.name}.{indices[unit[0]]}",
                op=options.op,
                prescale_factor=prescale,
                postscale_factor=postscale,
                process_set=options.process_set,
            )
            submitted.append((unit, handle))
        out = list(gradients)
        for unit, handle in submitted:
            for i, reduced in zip(unit, hvd.synchronize(handle), strict=True):
                out[i] = compression.decompress(reduced, packed[i][1])
        return out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def all_true(self, flag: Tensor, process_set: ProcessSet) -> Tensor:
        votes = flag.float()
        return hvd.allreduce(votes, op=hvd.Min, process_set=process_set) > 0

    def cond(
        self,
        condition: Tensor,
        true_fn: Callable[[], None],
        false_fn: Callable[[], None],
        variables: Sequence[Variable],
    ) -> None:
        """Calls one of the two functions; PyTorch traces nothing here."""
        if bool(condition):
            true_fn()
        else:
            false_fn()


def _memory(variables: Sequence[Variable]) -> Iterator[tuple[str, int, int]]:
    for variable in variables:
        if isinstance(variable, keras.Variable):
            # On the CPU this does not copy a contiguous tensor.
            on_host = variable.value.detach().cpu().contiguous()
            yield variable.path, on_host.data_ptr(), on_host.nbytes


def _units(
    tensors: Sequence[Tensor], groups: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Returns the indices of each operation's tensors: groups first, then buckets."""
    grouped = {i for group in groups for i in group}
    rest = [i for i in range(len(tensors)) if i not in grouped]
    units = [list(group) for group in groups if group]
    if rest:
        sizes = [((tensors[i].nbytes,), "uint8") for i in rest]
        bucket_bytes = runtime.config().bucket_bytes or 1
        units += [[rest[k] for k in cut] for cut in buckets.plan(sizes, bucket_bytes)]
    return units


BACKEND = _TorchBackend()
