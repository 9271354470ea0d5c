"""The buffers of a model, such as the running averages of BatchNorm, in exact steps.

Each piece of a step starts with the buffers of the step before, and the step ends with
the mean of what the pieces have made of them. So the order of the pieces, and the rank
that computes a piece, do not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringjax.torch.exact_pieces import Piece


class Buffers:
    """The buffers of `model`, and their values before a step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._named: dict[str, Tensor] = {}
        self._before: list[Tensor] = []

    def begin(self) -> list[tuple[str, Tensor]]:
        """Keeps the present values for a step. Returns the buffers and their names."""
        self._named = dict(self._model.named_buffers())
        self._before = [buffer.detach().clone() for buffer in self._named.values()]
        return [(f"buffer {name!r}", buffer) for name, buffer in self._named.items()]

    def restore(self) -> None:
        """Sets the buffers to the values from before the step."""
        self._set(self._before)

    def take(self, number: int) -> Piece:
        """Returns by how much piece `number` has changed each buffer; None for not.

        Raises:
            RuntimeError: a buffer was replaced by another tensor.
        """
        now = dict(self._model.named_buffers())
        for name, buffer in self._named.items():
            if now.get(name) is not buffer:
                raise RuntimeError(
                    f"buffer {name!r} was replaced in piece {number}; change it in "
                    "place, as BatchNorm does"
                )
        pairs = zip(self._named.values(), self._before, strict=True)
        return [_change(buffer, before) for buffer, before in pairs]

    def finish(self, means: Piece) -> None:
        """Changes the buffers by the means of what `take` has returned.

        Raises:
            RuntimeError: the pieces have changed a buffer of integers differently.
        """
        pairs = zip(self._named, self._before, means, strict=True)
        self._set([_after(name, before, mean) for name, before, mean in pairs])

    def _set(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._named.values(), values, strict=True):
                value = value.to(buffer.dtype)
                if not torch.equal(buffer, value):  # one may be an expanded constant
                    buffer.copy_(value)


def _change(buffer: Tensor, before: Tensor) -> Tensor | None:
    # The kernels of BatchNorm do not raise the version counter of a tensor, so values
    # are compared.
    if torch.equal(buffer, before):
        return None
    if buffer.is_complex():
        return buffer  # the sums refuse it, and name it
    wide = torch.float64 if buffer.is_floating_point() else torch.int64
    return (buffer.detach().to(wide) - before.to(wide)).double()


def _after(name: str, before: Tensor, mean: Tensor | None) -> Tensor:
    if mean is None:
        return before
    if before.is_floating_point():
        return before.double() + mean
    if not torch.equal(mean, mean.round()):
        raise RuntimeError(
            f"buffer {name!r} of dtype {before.dtype} was changed differently by "
            "different pieces, and has no exact mean; make it a buffer of floats, or "
            "change it outside of the pieces"
        )
    return before.to(torch.int64) + mean.to(torch.int64)
