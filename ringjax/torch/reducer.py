"""Gradients on their way: hooks submit them while backward runs.

At the end of a backward pass the ranks tell each other which gradients they have sent
(readiness.py), and wait for those that all ranks have sent: what a program then does to
`.grad`, it does to the reduced gradient. `collect` sends and waits for the rest.

The state of one step of a DistributedOptimizer. Not here: what the user calls and when
(optimizer.py), names and groups (parameters.py), how a named tensor is reduced
(reductions.py and the eager lane).
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringjax import runtime
from ringjax.eager import lane, parameter_check
from ringjax.errors import Mismatch, RingjaxError
from ringjax.ops import Adasum
from ringjax.torch import error_texts, mpi_ops
from ringjax.torch.functions import broadcast_object
from ringjax.torch.in_flight import (
    AllreduceOptions,
    InFlightGradient,
    InFlightReduction,
    failed_reduction,
    submit_gradients,
)
from ringjax.torch.parameters import Unit, parameter_names, parameter_units
from ringjax.torch.readiness import Readiness, submit_round
from ringjax.tuning.tuning import Tuning

# The first bucket of a step is no larger, so that communication begins early.
_FIRST_BUCKET = 1 << 20

# The optimizers between a backward pass and their step, and all of them.
_in_step: weakref.WeakSet[Reducer] = weakref.WeakSet()
_all: weakref.WeakSet[Reducer] = weakref.WeakSet()
runtime.on_init(_in_step.clear)


def _forget_steps() -> None:
    """Forgets the steps: all ranks go back to a commit, or another rank joins them."""
    for gradients in list(_all):
        gradients.stepped = None


runtime.on_init(_forget_steps)
runtime.on_fresh_start(_forget_steps)


class Reducer:
    """The gradients of an optimizer's parameters.

    Attributes:
        options: how they travel.
        name_of: their names.
        begun: whether backward has run since the last `collect` or `forget`.
        all_reduced: whether all gradients are reduced on all ranks.
        stepped: whether a step was made since the last `collect`; None: there was none.

    Raises:
        ValueError: a bad argument, see `parameters`.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        groups: Sequence[Sequence[Tensor]] | int | None,
        options: AllreduceOptions,
    ) -> None:
        self.options = options
        self.name_of = parameter_names(param_groups, named_parameters)
        self._lock = threading.RLock()  # hooks run in the threads of backward
        self._passes_left: dict[Tensor, int] = {}
        self._sparse_dims: dict[Tensor, int] = {}
        self._removers: list[Any] = []
        self._tuning: Tuning | None = None
        self._ended = 0.0  # the last step, by `time.monotonic`
        self.stepped: bool | None = None
        _all.add(self)
        self._first_name = ""  # of the parameters, in the order of the alphabet
        self._order: list[Tensor] = []  # of all of them, likewise; when it is needed
        weakref.finalize(self, _remove, self._removers)
        self.reset()
        units = parameter_units(
            param_groups, groups, self.name_of, self._broadcast_names
        )
        self._unit_of = {p: unit for unit in units for p in unit}
        self.add_parameters(param_groups)

    @property
    def parameters(self) -> list[Tensor]:
        """Those whose gradients travel."""
        return list(self._passes_left)

    @property
    def title(self) -> str:
        """The name of the optimizer in warnings and operations, alike on all ranks."""
        return f"the optimizer of {self._first_name}"

    def groups(self) -> list[Unit]:
        """The parameters that are submitted as one, if they are several."""
        return [unit for unit in dict.fromkeys(self._unit_of.values()) if unit[1:]]

    def is_alone(self) -> bool:
        """Whether this rank has nobody to reduce gradients with."""
        return mpi_ops.size() == 1 or not self.options.process_set.included()

    def add_parameters(self, param_groups: list[dict[str, Any]]) -> None:
        """Attends to parameters that are new, or require gradients only now."""
        for i, group in enumerate(param_groups):
            for j, p in enumerate(group["params"]):
                if p in self._passes_left or not p.requires_grad:
                    continue
                self.name_of.setdefault(p, f"allreduce.noname.{i}.{j}")
                self._unit_of.setdefault(p, (p,))
                self._passes_left[p] = self.options.backward_passes_per_step
                self.all_reduced = False
                self._order = []
                name = self.name_of[p]
                self._first_name = min(self._first_name or name, name)
                hook = _hook(weakref.ref(self))
                self._removers.append(p.register_post_accumulate_grad_hook(hook))

    def reset(self) -> None:
        """Begins a step. What is under way ends by itself, and nobody waits for it."""
        with self._lock:
            self._in_flight: dict[Unit, InFlightReduction] = {}
            self._bucket: list[Unit] = []
            self._bucket_bytes = 0
            self._launched: set[Unit] = set()  # in the bucket, under way or reduced
            self._reduced: dict[Tensor, weakref.ref[Tensor]] = {}
            self._present_anywhere: set[Tensor] = (
                set()
            )  # some rank has a gradient of it
            self._unsent: list[
                InFlightGradient
            ] = []  # not sent, since their groups lack others
            self._failure: RingjaxError | None = None
            self._rounds = self._backwards = 0
            self._tasks: set[int] = set()  # backward passes that run
            self.begun = self.all_reduced = False
            passes = self.options.backward_passes_per_step
            self._passes_left = dict.fromkeys(self._passes_left, passes)
            _in_step.discard(self)

    def synchronize(self, param_groups: list[dict[str, Any]]) -> None:
        """Waits until all gradients are reduced; submits those that no hook has.

        A parameter that has no gradient on any rank keeps none.

        Raises:
            RingjaxError: the first failure, after all have ended.
            RuntimeError: a gradient was changed while it was under way.
        """
        with self._lock:
            try:
                flights = list(self._in_flight.values())
                sent = [each for flight in flights for each in flight.sent]
                unreduced = [*sent, *self._unsent]
                changed = [each.parameter for each in unreduced if each.is_changed()]
                self.add_parameters(param_groups)
                if self._failure is None:
                    self._record_failure(self._finish)
                for flight in self._in_flight.values():
                    self._record_failure(
                        partial(flight.receive, self.options.compression)
                    )
                failure = self._failure
                self.stepped = None if failure else False
            finally:
                self.reset()
        if failure is not None:
            raise failure
        if changed:
            raise RuntimeError(
                error_texts.GRADIENT_CHANGED.format(name=self.name_of[changed[0]])
            )
        if runtime.config().autotune and not self.is_alone():
            self._tune()

    def _finish(self) -> None:
        """Sends what some rank has sent, and this rank has not."""
        answer = None
        while not self.all_reduced and not (answer and answer.final):
            order, answer = self._submit_round(final=True)()
            self._finish_common(order, answer)
        if answer is not None:
            pairs = zip(order, answer.anywhere, strict=True)
            self._present_anywhere = {p for p, found in pairs if found}
            units = dict.fromkeys(self._unit_of[p] for p in order)
            self._bucket = [
                unit
                for unit in units
                if unit not in self._launched
                and not self._present_anywhere.isdisjoint(unit)
            ]
            self._send_bucket()

    def _record_failure(self, action: Callable[[], Any]) -> Any:
        """Returns what `action` does; None after a failure, which `collect` raises."""
        try:
            return action()
        except RingjaxError as error:
            self._failure = self._failure or error
            return None

    def _submit_round(
        self, final: bool
    ) -> Callable[[], tuple[list[Tensor], Readiness]]:
        """Sends the bucket, and submits a round of which the answer is returned later.

        Every rank submits as many rounds as all others, whose passes may be fewer: a
        rank about to step goes on until all are, or until all gradients are reduced.
        """
        self._rounds += 1
        order = self._ordered_parameters()
        sent = present = [True] * len(order)  # as usual
        if not self._has_launched_all():
            sent = [self._unit_of[p] in self._launched for p in order]
            pairs = zip(sent, order, strict=True)
            present = [has or p.grad is not None for has, p in pairs]
        name = f"gradients of {self.title}, {self._rounds}"
        with lane.submission_group(self.options.process_set):
            self._send_bucket()
            ranks = self.options.process_set
            answer = submit_round(name, sent, present, final, self.stepped, ranks)
        return lambda: (order, answer())

    def _ordered_parameters(self) -> list[Tensor]:
        """The parameters by name: the ranks may have them in other orders."""
        if not self._order:
            self._order = sorted(self._passes_left, key=self.name_of.__getitem__)
        return self._order

    def _has_launched_all(self) -> bool:
        return sum(map(len, self._launched)) == len(self._passes_left)

    def _finish_common(self, order: list[Tensor], answer: Readiness) -> None:
        """Waits for the gradients that all ranks have sent."""
        if answer.apart:
            self._failure = self._failure or Mismatch(error_texts.STEPS_DIFFER)
        pairs = zip(order, answer.everywhere, strict=True)
        here = {p for p, all_sent in pairs if all_sent}
        for unit in [unit for unit in self._in_flight if here.issuperset(unit)]:
            flight = self._in_flight.pop(unit)
            self._record_failure(partial(flight.receive, self.options.compression))
            for p in unit:
                if p.grad is not None:
                    self._reduced[p] = weakref.ref(p.grad)
        # Answers to rounds of several threads may be taken in another order.
        self.all_reduced = self.all_reduced or len(here) == len(self._passes_left)

    def _await_end_of_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task >= 0 and task not in self._tasks:
            self._tasks.add(task)
            _queue_callback(
                partial(_call, weakref.ref(self), "_on_end_of_backward", task)
            )

    def _on_end_of_backward(self, task: int) -> None:
        """Submits a round; `_finish_round` waits when other optimizers have, too.

        Not at the end of a reentrant pass, of a checkpoint, within another pass.
        """
        with self._lock:
            self._tasks.discard(task)
            if not self.begun or torch._C._current_autograd_node() is not None:
                return
            self._backwards += 1
            passes = self.options.backward_passes_per_step
            if self._failure or not (self._launched or self._backwards >= passes):
                return
            if not self._has_launched_all():
                self._unsent = [
                    InFlightGradient(p, p.grad, p.grad._version, None)
                    for p, left in self._passes_left.items()
                    if not left and p.grad is not None
                    if self._unit_of[p] not in self._launched
                ]
            answer = self._record_failure(partial(self._submit_round, final=False))
        if answer is not None:
            _queue_callback(partial(self._finish_round, answer))

    def _finish_round(
        self, answer: Callable[[], tuple[list[Tensor], Readiness]]
    ) -> None:
        found = self._record_failure(
            answer
        )  # without the lock: other backward passes may go on
        if found is not None:
            with self._lock:
                self._finish_common(*found)

    def check_scaler(self) -> None:
        """To be called when somebody looks at the parameters, between two steps.

        Raises:
            RuntimeError: it is `GradScaler.unscale_`, which divides gradients without
                a trace, and some are under way.
        """
        waiting = [*self._in_flight, *(each[:1] for each in self._unsent)]
        if waiting:
            reader = sys._getframe(2).f_globals.get("__name__")
            if reader == torch.amp.GradScaler.__module__:
                raise RuntimeError(
                    error_texts.GRADIENT_CHANGED.format(
                        name=self.name_of[waiting[0][0]]
                    )
                )

    def _tune(self) -> None:
        """At the end of a step: how long it took, and what the next one is to try."""
        now = time.monotonic()
        if self._tuning is None:
            bytes_of = [self.name_of[p] + str(p.nbytes) for p in self._passes_left]
            self._tuning = Tuning(
                self.title,
                ["torch", *sorted(bytes_of)],
                None,
                self.options.process_set,
            )
        else:
            self._tuning.record_step(now - self._ended)
        self._ended = now

    def check_parameters(self) -> None:
        """In some steps, looks whether all ranks have the same; a warning if not."""
        if not self._passes_left or not mpi_ops.is_initialized() or self.is_alone():
            return

        def memory() -> Iterator[tuple[str, int, int]]:
            for p in self._ordered_parameters():
                here = p.detach().cpu().contiguous()  # the parameter itself, mostly
                yield self.name_of[p], here.data_ptr(), here.nbytes

        parameter_check.check(self.title, memory, self.options.process_set)

    def _broadcast_names(self, names: list[str]) -> list[str]:
        """The order of the names on the first rank that takes part."""
        if not mpi_ops.is_initialized() or self.is_alone():
            return names
        ranks = self.options.process_set
        name = "DistributedOptimizer.groups"
        order: list[str] = broadcast_object(names, ranks.ranks[0], name, ranks)
        return order

    def on_gradient_ready(self, p: Tensor) -> None:
        """Backward has added to the gradient of `p`.

        Raises:
            AssertionError: more often than it was to.
        """
        with self._lock:
            if not self.begun and (not mpi_ops.is_initialized() or self.is_alone()):
                return
            assert p.grad is not None
            if p.grad.requires_grad:
                raise RuntimeError(
                    error_texts.GRADIENT_HAS_GRAPH.format(name=self.name_of[p])
                )
            if p in self._reduced and self._reduced[p]() is not p.grad:
                self.reset()  # the module's zero_grad has dropped what was reduced
            left = self._passes_left[p] - 1
            if left < 0:
                passes = self.options.backward_passes_per_step
                text = error_texts.TOO_MANY_BACKWARDS.format(
                    name=self.name_of[p], passes=passes
                )
                raise AssertionError(text)
            if not self.begun:
                self._begin_step()
            self._passes_left[p] = left
            if self.options.op == Adasum:
                return
            unit = self._unit_of[p]
            if not any(self._passes_left[member] for member in unit):
                self._launch(unit)
            self._await_end_of_backward()

    def _begin_step(self) -> None:
        mine = set(self.name_of.values())
        for other in _in_step:
            if twice := mine.intersection(other.name_of.values()):
                raise ValueError(error_texts.DUPLICATE_NAME.format(name=min(twice)))
        self.begun = True
        _in_step.add(self)

    def _launch(self, unit: Unit) -> None:
        """Puts the gradients of a unit into the bucket, and sends it when it is full.

        Submissions have names, so the buckets of the ranks need not be alike.
        """
        first = not self._launched
        self._launched.add(unit)
        self._bucket.append(unit)
        self._bucket_bytes += sum(p.nbytes for p in unit)
        how = self._tuning.setting if self._tuning else runtime.config()
        room = how.bucket_bytes
        if self._bucket_bytes >= (min(room, _FIRST_BUCKET) if first else room):
            self._send_bucket()

    def _send_bucket(self) -> None:
        bucket, self._bucket, self._bucket_bytes = self._bucket, [], 0
        if not bucket:
            return
        try:
            with lane.submission_group(self.options.process_set):
                for unit in bucket:
                    self._in_flight[unit] = self._try_to_send(unit)
        except RingjaxError as error:
            self._in_flight.update(dict.fromkeys(bucket, failed_reduction(error)))

    def _try_to_send(self, unit: Unit) -> InFlightReduction:
        gradients = [self._gradient(p) for p in unit]
        try:
            return submit_gradients(
                unit, gradients, self.name_of[unit[0]], self.options
            )
        except RingjaxError as error:
            return failed_reduction(error)

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
        # A frozen one, and one without a gradient in a group, take part for the others.
        if p.requires_grad and p in self._present_anywhere:
            p.grad = zeros
        return zeros


def _queue_callback(action: Callable[[], Any]) -> None:
    """Has autograd call it at the end of the backward pass that runs."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def _call(owner: weakref.ref[Reducer], method: str, *arguments: Any) -> None:
    if (gradients := owner()) is not None:
        getattr(gradients, method)(*arguments)


def _hook(owner: weakref.ref[Reducer]) -> Callable[[Tensor], None]:
    """A hook that does not keep the optimizer alive; parameters may outlive it."""

    def hook(p: Tensor) -> None:
        if (gradients := owner()) is not None:
            gradients.on_gradient_ready(p)

    return hook


def _remove(removers: list[Any]) -> None:
    for remover in removers:
        remover.remove()
