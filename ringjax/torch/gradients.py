"""Gradients on their way: hooks submit them while backward runs, `collect` waits.

The state of one step of a DistributedOptimizer. Not here: what the user calls and when
(optimizer.py), names and groups (parameters.py), how a named tensor is reduced
(reductions.py and the eager lane).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringjax import runtime
from ringjax.eager import alike, lane
from ringjax.errors import RingjaxError
from ringjax.ops import Adasum, Average, ReduceOp
from ringjax.torch import mpi_ops
from ringjax.torch.functions import broadcast_object
from ringjax.torch.parameters import Unit, names_of, units_of
from ringjax.tuning.tuning import Tuning
from ringjax.world.process_set import ProcessSet

# The first bucket of a step is no larger, so that communication begins early.
_FIRST_BUCKET = 1 << 20

_TOO_OFTEN = (
    "Gradients were computed more than backward_passes_per_step times before call to "
    "step(): {name!r}, more than {passes}. Increase backward_passes_per_step to "
    "accumulate gradients locally."
)


@dataclass
class Settings:
    """The arguments of `DistributedOptimizer` that say how gradients travel."""

    compression: Any
    backward_passes_per_step: int
    op: ReduceOp
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet


class _Flight(NamedTuple):
    """A submission: how to wait for it, and what became of its gradients."""

    wait: Callable[[], Any]
    sent: list[tuple[Tensor, Tensor, Any]]  # parameter, gradient, of the compression


class Gradients:
    """The gradients of an optimizer's parameters.

    Attributes:
        settings: how they travel.
        name_of: their names.
        begun: whether backward has run since the last `collect` or `forget`.

    Raises:
        ValueError: a bad argument, see `parameters`.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        groups: Sequence[Sequence[Tensor]] | int | None,
        settings: Settings,
    ) -> None:
        self.settings = settings
        self.name_of = names_of(param_groups, named_parameters)
        self._lock = threading.RLock()  # hooks run in the threads of backward
        self._passes_left: dict[Tensor, int] = {}
        self._sparse_dims: dict[Tensor, int] = {}
        self._removers: list[Any] = []
        self._tuning: Tuning | None = None
        self._ended = 0.0  # the last step, by `time.monotonic`
        self._first_name = ""  # of the parameters, in the order of the alphabet
        weakref.finalize(self, _remove, self._removers)
        self.forget()
        units = units_of(param_groups, groups, self.name_of, self._agreed)
        self._unit_of = {p: unit for unit in units for p in unit}
        self.adopt(param_groups)

    @property
    def parameters(self) -> list[Tensor]:
        """Those whose gradients travel."""
        return list(self._passes_left)

    def groups(self) -> list[Unit]:
        """The parameters that are submitted as one, if they are several."""
        return [unit for unit in dict.fromkeys(self._unit_of.values()) if unit[1:]]

    def alone(self) -> bool:
        """Whether this rank has nobody to reduce gradients with."""
        return mpi_ops.size() == 1 or not self.settings.process_set.included()

    def adopt(self, param_groups: list[dict[str, Any]]) -> None:
        """Attends to parameters that are new, or require gradients only now."""
        for i, group in enumerate(param_groups):
            for j, p in enumerate(group["params"]):
                if p in self._passes_left or not p.requires_grad:
                    continue
                self.name_of.setdefault(p, f"allreduce.noname.{i}.{j}")
                self._unit_of.setdefault(p, (p,))
                self._passes_left[p] = self.settings.backward_passes_per_step
                name = self.name_of[p]
                self._first_name = min(self._first_name or name, name)
                hook = _hook(weakref.ref(self))
                self._removers.append(p.register_post_accumulate_grad_hook(hook))

    def forget(self) -> None:
        """Begins a step. What is under way ends by itself, and nobody waits for it."""
        with self._lock:
            self._flights: dict[Unit, _Flight] = {}
            self._bucket: list[Unit] = []
            self._bucket_bytes = 0
            self.begun = False
            passes = self.settings.backward_passes_per_step
            self._passes_left = dict.fromkeys(self._passes_left, passes)

    def collect(self) -> None:
        """Waits until all gradients are reduced; submits those that no hook has.

        Raises:
            RingjaxError: the first failure, after all have ended.
        """
        failure: RingjaxError | None = None
        with self._lock:
            try:
                launched = self._flights.keys() | set(self._bucket)
                units = dict.fromkeys(self._unit_of[p] for p in self._passes_left)
                self._bucket += [unit for unit in units if unit not in launched]
                self._send_bucket()
                for flight in self._flights.values():
                    try:
                        self._receive(flight)
                    except RingjaxError as error:
                        failure = failure or error
            finally:
                self.forget()
        if failure is not None:
            raise failure
        if runtime.config().autotune and not self.alone():
            self._tune()

    def _tune(self) -> None:
        """At the end of a step: how long it took, and what the next one is to try."""
        now = time.monotonic()
        if self._tuning is None:
            bytes_of = [self.name_of[p] + str(p.nbytes) for p in self._passes_left]
            name = f"the optimizer of {self._first_name}"
            self._tuning = Tuning(
                name, ["torch", *sorted(bytes_of)], None, self.settings.process_set
            )
        else:
            self._tuning.took(now - self._ended)
        self._ended = now

    def check_parameters(self) -> None:
        """In some steps, looks whether all ranks have the same; a warning if not."""
        if not self._passes_left or not mpi_ops.is_initialized() or self.alone():
            return

        def memory() -> Iterator[tuple[str, int, int]]:
            # By name: the ranks may have them in other orders.
            for p in sorted(self._passes_left, key=self.name_of.__getitem__):
                here = p.detach().cpu().contiguous()  # the parameter itself, mostly
                yield self.name_of[p], here.data_ptr(), here.nbytes

        alike.check(
            f"the optimizer of {self._first_name}", memory, self.settings.process_set
        )

    def _agreed(self, names: list[str]) -> list[str]:
        """The order of the names on the first rank that takes part."""
        if not mpi_ops.is_initialized() or self.alone():
            return names
        ranks = self.settings.process_set
        name = "DistributedOptimizer.groups"
        order: list[str] = broadcast_object(names, ranks.ranks[0], name, ranks)
        return order

    def on_gradient(self, p: Tensor) -> None:
        """Backward has added to the gradient of `p`.

        Raises:
            AssertionError: more often than it was to.
        """
        with self._lock:
            if not self.begun and (not mpi_ops.is_initialized() or self.alone()):
                return
            left = self._passes_left[p] - 1
            if left < 0:
                passes = self.settings.backward_passes_per_step
                text = _TOO_OFTEN.format(name=self.name_of[p], passes=passes)
                raise AssertionError(text)
            assert p.grad is not None and not p.grad.requires_grad
            self.begun = True
            self._passes_left[p] = left
            unit = self._unit_of[p]
            if self.settings.op != Adasum and not any(
                self._passes_left[member] for member in unit
            ):
                self._launch(unit)

    def _launch(self, unit: Unit) -> None:
        """Puts the gradients of a unit into the bucket, and sends it when it is full.

        Submissions have names, so the buckets of the ranks need not be alike.
        """
        self._bucket.append(unit)
        self._bucket_bytes += sum(p.nbytes for p in unit)
        how = self._tuning.setting if self._tuning else runtime.config()
        room = how.bucket_bytes
        if self._bucket_bytes >= (room if self._flights else min(room, _FIRST_BUCKET)):
            self._send_bucket()

    def _send_bucket(self) -> None:
        bucket, self._bucket, self._bucket_bytes = self._bucket, [], 0
        if not bucket:
            return
        try:
            with lane.together(self.settings.process_set):
                for unit in bucket:
                    self._flights[unit] = self._try_to_send(unit)
        except RingjaxError as error:
            self._flights.update(dict.fromkeys(bucket, _failed(error)))

    def _try_to_send(self, unit: Unit) -> _Flight:
        try:
            return self._send(unit)
        except RingjaxError as error:
            return _failed(error)

    def _send(self, unit: Unit) -> _Flight:
        how = self.settings
        options: dict[str, Any] = {"name": self.name_of[unit[0]], "op": how.op}
        options["process_set"] = how.process_set
        gradients = [self._gradient(p) for p in unit]
        if gradients[0].is_sparse and len(unit) == 1 and not how.sparse_as_dense:
            handle = mpi_ops.sparse_allreduce_async(gradients[0], **options)
            return _Flight(lambda: [handle()], [(unit[0], gradients[0], None)])
        sent, packed = [], []
        for p, gradient in zip(unit, gradients, strict=True):
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            tensor, context = how.compression.compress(dense)
            packed.append(tensor)
            sent.append((p, gradient, context))
        if how.op == Average:  # the core divides by the size after the sum
            options["prescale_factor"] = 1.0 / how.gradient_predivide_factor
            options["postscale_factor"] = how.gradient_predivide_factor
        if len(unit) == 1:
            one = mpi_ops.allreduce_async_(packed[0], **options)
            return _Flight(lambda: [mpi_ops.synchronize(one)], sent)
        group = mpi_ops.grouped_allreduce_async_(packed, **options)
        return _Flight(lambda: mpi_ops.synchronize(group), sent)

    def _gradient(self, p: Tensor) -> Tensor:
        """The gradient; zeros if this rank has none, since other ranks may have one."""
        if p.grad is not None:
            if p.grad.is_sparse:
                self._sparse_dims[p] = p.grad.sparse_dim()
            return p.grad
        if (dims := self._sparse_dims.get(p)) is None:
            zeros = torch.zeros_like(p)
        else:
            indices = torch.empty((dims, 0), dtype=torch.int64, device=p.device)
            entries = indices, p.new_empty((0, *p.shape[dims:]))
            zeros = torch.sparse_coo_tensor(*entries, p.shape, check_invariants=False)
        if p.requires_grad:  # a frozen one takes part only for the others' sake
            p.grad = zeros
        return zeros

    def _receive(self, flight: _Flight) -> None:
        outputs = flight.wait()
        for (p, gradient, context), output in zip(flight.sent, outputs, strict=True):
            if p.grad is None:
                continue
            output = self.settings.compression.decompress(output, context)
            if not gradient.is_sparse:
                if output is not p.grad:
                    p.grad.copy_(output)
            elif output.is_sparse:
                p.grad = output
            else:
                p.grad = output.to_sparse(gradient.sparse_dim())


def _hook(owner: weakref.ref[Gradients]) -> Callable[[Tensor], None]:
    """A hook that does not keep the optimizer alive; parameters may outlive it."""

    def hook(p: Tensor) -> None:
        if (gradients := owner()) is not None:
            gradients.on_gradient(p)

    return hook


def _remove(removers: list[Any]) -> None:
    for remover in removers:
        remover.remove()


def _failed(error: RingjaxError) -> _Flight:
    """What `collect` raises, after all others have ended."""
    return _Flight(partial(_fail, error), [])


def _fail(error: RingjaxError) -> Any:
    raise error
