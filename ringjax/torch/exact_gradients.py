"""ExactGradients: the gradients of a model as exact means over fixed pieces.

The pieces of a step are those of `ringjax.pieces`, for PyTorch's own training loop.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ringjax import runtime, stderr
from ringjax.elastic.place import Place, current_place
from ringjax.torch.exact import check_pieces, wrong_pieces
from ringjax.torch.exact_buffers import Buffers
from ringjax.torch.exact_pieces import (
    Piece,
    PieceLayout,
    Total,
    add_pieces,
    check_tensor,
)
from ringjax.torch.reducer import is_reduced
from ringjax.torch.sync_batch_norm import SyncBatchNorm

_OP = "ringjax.torch.ExactGradients"


class ExactGradients:
    """Sets the gradients of a step to their exact mean over the pieces of the batch.

    The gradients are the same bits on any number of ranks, because a step always has
    the same pieces, whichever rank computes them, and because exact sums do not depend
    on the order. Use a plain optimizer, no `DistributedOptimizer`.

    The bits depend on the kernels of PyTorch, too: use one version of PyTorch, one kind
    of CPU, and `torch.set_num_threads(1)` on all ranks, and draw random numbers from a
    seed of step and piece. Each piece starts with the buffers of the step before, such
    as the running averages of BatchNorm, and the step ends with the exact mean of what
    the pieces have made of them.

    Args:
        model: a module with the same parameters and buffers on all ranks. They are
            float32, bfloat16, float16 or float64, and on the CPU. A mean has the
            precision of float32, also for float64.
        pieces: the number of pieces of a step on all ranks together, 1 … 65,536. It is
            part of the result: another number gives other bits.

    Raises:
        TypeError, ValueError: an argument is wrong; the text names the parameter.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> torch.set_num_threads(1)
        >>> model = torch.nn.Linear(2, 1)
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> exact = hvd.ExactGradients(model, pieces=4)
        >>> for number in range(3):
        ...     for piece in exact.pieces():
        ...         x = torch.full((8, 2), number + piece / 4)
        ...         model(x).square().mean().backward()
        ...     optimizer.step()
    """

    def __init__(self, model: torch.nn.Module, pieces: int) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"{_OP}: `model` is a {type(model).__name__}, expected a "
                "torch.nn.Module; put several into a torch.nn.ModuleList"
            )
        check_pieces(_OP, pieces)
        for name, parameter in model.named_parameters():
            check_tensor(f"{_OP}: parameter {name!r}", parameter)
        for name, module in model.named_modules():
            if isinstance(module, SyncBatchNorm | torch.nn.SyncBatchNorm):
                raise TypeError(
                    f"{_OP}: module {name!r} is a SyncBatchNorm, whose results depend "
                    "on the ranks; use BatchNorm"
                )
        self._model, self._pieces, self._buffers = model, pieces, Buffers(model)
        # The places that share the pieces, equal on all ranks. A place whose rank is
        # lost stays out until all ranks agree on a new plan.
        self._plan: object = None
        self._present: list[int] = []

    def pieces(self) -> Iterator[int]:
        """Yields the numbers of the pieces that this rank computes in this step.

        The body of the loop calls `backward()` once or more for the loss of the piece,
        which is a mean over the piece. After the last piece, the gradient of each
        parameter is the mean over the pieces of all ranks; it stays None if no piece
        has used the parameter. Earlier gradients are dropped. All ranks call it
        together, and none leaves the loop by `break`: the gradients would be None.

        If an elastic job loses a rank, the other ranks get the pieces of that rank in
        the same loop. The gradients of this rank's pieces stay in memory until the
        loop ends.

        Raises:
            ValueError: a `DistributedOptimizer` has the parameters.
            RuntimeError: a piece has no gradients, or buffers have no mean.
            TypeError: a gradient is sparse.
            HorovodInternalError: a rank is lost, the ranks' parameters differ in their
                shapes, or ranks compute by different versions, CPUs or numbers of
                threads; then `InvalidArgument` ends those that differ from rank 0.
        """
        place = current_place(_OP)
        if self._plan is None:
            _warn_of_threads()
        if place.plan is not self._plan:
            self._plan, self._present = place.plan, list(range(place.count))
        named = [
            (f"the gradient of {name!r}", parameter)
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        ]
        parameters = [parameter for _, parameter in named]
        for name, parameter in named:
            if is_reduced(parameter):
                raise ValueError(
                    f"{_OP}: {name} is reduced by a DistributedOptimizer, too, in an "
                    "order that changes its bits; use the plain optimizer"
                )
        leaves = [*named, *self._buffers.begin()]
        names, shapes = [name for name, _ in leaves], [x.shape for _, x in leaves]
        layout = PieceLayout(_OP, names, shapes, _kernels())
        try:
            means = yield from self._complete(layout, parameters, place)
        except BaseException:
            self._buffers.restore()
            raise
        _set(parameters, means[: len(parameters)])
        self._buffers.finish(means[len(parameters) :])

    def _complete(
        self, layout: PieceLayout, parameters: Sequence[Tensor], place: Place
    ) -> Generator[int, None, Piece]:
        """Yields pieces until all ranks together have all; returns the means."""
        held: dict[int, Piece] = {}
        todo = self._share(range(self._pieces), place)
        while True:
            for piece in todo:
                _set(parameters, [None] * len(parameters))
                self._buffers.restore()
                yield piece
                gradients = _take(piece, parameters)
                held[piece] = [*gradients, *self._buffers.take(piece)]
                layout.check(piece, held[piece])
            total, present = self._add(layout, held, place)
            done = total.control
            if (done == 1).all():
                return total.means
            if (done > 1).any() or present == self._present:
                raise wrong_pieces(_OP, done, list(held))
            self._present = present
            todo = self._share(np.flatnonzero(done == 0).tolist(), place)

    def _add(
        self, layout: PieceLayout, held: dict[int, Piece], place: Place
    ) -> tuple[Total, list[int]]:
        """Returns the total over all ranks, and the places whose ranks are present."""
        control = np.zeros(self._pieces + place.count, np.int32)
        control[list(held)] = 1
        control[self._pieces + place.index] = 1
        total = add_pieces(layout, held, self._pieces, control)
        done, present = np.split(total.control, [self._pieces])
        return total._replace(control=done), np.flatnonzero(present).tolist()

    def _share(self, pieces: Sequence[int], place: Place) -> Sequence[int]:
        """Returns this rank's share of pieces, which are dealt in turn."""
        return pieces[self._present.index(place.index) :: len(self._present)]


def _take(number: int, parameters: Sequence[Tensor]) -> Piece:
    """Returns the gradients of a piece, and takes them away from the parameters."""
    gradients = [p.grad if p.grad is None else p.grad.detach() for p in parameters]
    if all(gradient is None for gradient in gradients):
        raise RuntimeError(
            f"{_OP}: piece {number} has no gradients; call backward() for each piece "
            "of the loop, and do not call zero_grad() after it"
        )
    _set(parameters, [None] * len(parameters))
    return gradients


def _set(parameters: Sequence[Tensor], gradients: Piece) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        to = None if gradient is None else gradient.to(parameter.dtype)
        parameter.grad = to


def _kernels() -> str:
    """Describes what decides the bits of PyTorch's kernels on a CPU."""
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return f"PyTorch {torch.__version__}, {capability}, {threads} threads"


def _warn_of_threads() -> None:
    if (threads := torch.get_num_threads()) > 1 and runtime.rank() == 0:
        stderr.line(
            f"[ringjax 0/{runtime.size()}] warning: {_OP}: PyTorch has {threads} "
            "threads, and its results depend on this number; for the same bits on all "
            "hosts, call torch.set_num_threads(1) on all ranks"
        )
