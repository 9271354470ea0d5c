"""Reducer: reduces the gradients of one optimizer while backward runs.

It works like the Reducer of PyTorch's DDP, with names in place of an order:

1. A hook on each parameter puts its gradient into a bucket, and submits full buckets.
2. When backward ends, the ranks exchange which gradients they have sent (readiness.py),
   and wait for the gradients that all ranks have sent. A program that clips or scales
   `.grad` after backward therefore changes the reduced gradient.
3. `synchronize`, before a step, submits the gradients that are missing, because another
   rank may have used other parameters, and waits for all gradients.

Neighbours: optimizer.py has the public methods, parameters.py the names and groups,
in_flight.py the operations.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

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
from ringjax.torch.parameters import ParamGroups, Unit, parameter_names, parameter_units
from ringjax.torch.readiness import Readiness, submit_round
from ringjax.tuning.tuning import Tuning

T = TypeVar("T")
# A function that waits for a round of readiness.py. It returns the parameters in the
# order of their flags, and the combined flags of all ranks.
Round = Callable[[], tuple[list[Tensor], Readiness]]

# The first bucket of a step is limited to these bytes, so that it is sent early.
_FIRST_BUCKET = 1 << 20

# All reducers, and the reducers that are between a backward pass and their step.
_all: weakref.WeakSet[Reducer] = weakref.WeakSet()
_in_step: weakref.WeakSet[Reducer] = weakref.WeakSet()
runtime.on_init(_in_step.clear)


def _forget_steps() -> None:
    # After a reset all ranks return to a commit. A rank that has just joined has made
    # no step, so its flag `stepped` would otherwise differ from that of other ranks.
    for reducer in list(_all):
        reducer.stepped = None


runtime.on_init(_forget_steps)
runtime.on_fresh_start(_forget_steps)


class Reducer:
    """Reduces the gradients of an optimizer's parameters.

    Attributes:
        options: how the gradients are reduced.
        name_of: the names of the parameters.
        begun: whether backward has run since the last `synchronize` or `reset`.
        all_reduced: whether all gradients are reduced on all ranks.
        stepped: whether the optimizer has made a step since the last `synchronize`;
            None if there was no `synchronize`.

    """

    def __init__(
        self,
        param_groups: ParamGroups,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        groups: Sequence[Sequence[Tensor]] | int | None,
        options: AllreduceOptions,
    ) -> None:
        self.options = options
        self.name_of = parameter_names(param_groups, named_parameters)
        # A lock is needed, because autograd runs the hooks in its own threads.
        self._lock = threading.RLock()
        self._passes_left: dict[Tensor, int] = {}
        self._sparse_dims: dict[Tensor, int] = {}
        self._hooks: list[RemovableHandle] = []
        self._tuning: Tuning | None = None
        self._step_ended = 0.0  # the end of the last step by `time.monotonic`
        self.stepped: bool | None = None
        _all.add(self)
        self._first_name = ""  # the first name of a parameter in the alphabet
        # The parameters, sorted by name; empty if they must be sorted again.
        self._sorted: list[Tensor] = []
        weakref.finalize(self, _remove_hooks, self._hooks)
        self.reset()
        units = parameter_units(
            param_groups, groups, self.name_of, self._broadcast_names
        )
        self._unit_of = {p: unit for unit in units for p in unit}
        self.add_parameters(param_groups)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that require gradients."""
        return list(self._passes_left)

    @property
    def title(self) -> str:
        """The name of the optimizer in warnings and operations, equal on all ranks."""
        return f"the optimizer of {self._first_name}"

    def groups(self) -> list[Unit]:
        """The groups of several parameters that one operation reduces."""
        return [unit for unit in dict.fromkeys(self._unit_of.values()) if unit[1:]]

    def is_alone(self) -> bool:
        """Returns whether there is no other rank to reduce gradients with."""
        return mpi_ops.size() == 1 or not self.options.process_set.included()

    def add_parameters(self, param_groups: ParamGroups) -> None:
        """Puts hooks on new parameters, and on parameters that now need gradients."""
        for i, group in enumerate(param_groups):
            for j, p in enumerate(group["params"]):
                if p in self._passes_left or not p.requires_grad:
                    continue
                self.name_of.setdefault(p, f"allreduce.noname.{i}.{j}")
                self._unit_of.setdefault(p, (p,))
                self._passes_left[p] = self.options.backward_passes_per_step
                self.all_reduced = False
                self._sorted = []
                name = self.name_of[p]
                self._first_name = min(self._first_name or name, name)
                hook = partial(_call, weakref.ref(self), "on_gradient_ready")
                self._hooks.append(p.register_post_accumulate_grad_hook(hook))

    def reset(self) -> None:
        """Begins a new step. Operations in flight continue, but nobody awaits them."""
        with self._lock:
            self._in_flight: dict[Unit, InFlightReduction] = {}
            self._bucket: list[Unit] = []
            self._bucket_bytes = 0
            # Units whose gradients are in the bucket, in flight or reduced.
            self._launched: set[Unit] = set()
            self._reduced: dict[Tensor, weakref.ref[Tensor]] = {}
            # Parameters that have a gradient on some rank.
            self._present_anywhere: set[Tensor] = set()
            # Gradients that are not sent yet, because other gradients of their group
            # are missing.
            self._unsent: list[InFlightGradient] = []
            self._failure: RingjaxError | None = None
            self._rounds = self._backwards = 0
            # Autograd's ids of the running backward passes.
            self._tasks: set[int] = set()
            self.begun = self.all_reduced = False
            passes = self.options.backward_passes_per_step
            self._passes_left = dict.fromkeys(self._passes_left, passes)
            _in_step.discard(self)

    def synchronize(self, param_groups: ParamGroups) -> None:
        """Submits the gradients that no hook has submitted; waits for all gradients.

        A parameter that has no gradient on any rank keeps no gradient. Raises the first
        failure after all operations have ended.
        """
        with self._lock:
            try:
                sent = [g for r in self._in_flight.values() for g in r.sent]
                unreduced = [*sent, *self._unsent]
                changed = [g.parameter for g in unreduced if g.is_changed()]
                self.add_parameters(param_groups)
                if self._failure is None:
                    self._attempt(self._send_missing)
                for reduction in self._in_flight.values():
                    self._receive(reduction)
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

    def _send_missing(self) -> None:
        """Submits the gradients that another rank has and this rank has not sent."""
        readiness = None
        while not self.all_reduced and not (readiness and readiness.final):
            order, readiness = self._submit_round(final=True)()
            self._receive_common(order, readiness)
        if readiness is not None:
            pairs = zip(order, readiness.anywhere, strict=True)
            self._present_anywhere = {p for p, found in pairs if found}
            units = dict.fromkeys(self._unit_of[p] for p in order)
            self._bucket = [
                unit
                for unit in units
                if unit not in self._launched
                and not self._present_anywhere.isdisjoint(unit)
            ]
            self._send_bucket()

    def _receive(self, reduction: InFlightReduction) -> None:
        self._attempt(partial(reduction.receive, self.options.compression))

    def _attempt(self, action: Callable[[], T]) -> T | None:
        """Runs `action`. If it fails, stores the error for `synchronize`."""
        try:
            return action()
        except RingjaxError as error:
            self._failure = self._failure or error
            return None

    def _submit_round(self, final: bool) -> Round:
        """Sends the bucket, submits a round of flags, and returns a wait function.

        All ranks must submit equally many rounds, but may make different numbers of
        backward passes. So a rank that is about to step submits further rounds until
        all ranks are about to step, or until all gradients are reduced.
        """
        self._rounds += 1
        order = self._sorted_parameters()
        sent = present = [True] * len(order)
        if not self._has_launched_all():
            sent = [self._unit_of[p] in self._launched for p in order]
            pairs = zip(sent, order, strict=True)
            present = [has or p.grad is not None for has, p in pairs]
        name = f"gradients of {self.title}, {self._rounds}"
        with lane.submission_group(self.options.process_set):
            self._send_bucket()
            ranks = self.options.process_set
            wait = submit_round(name, sent, present, final, self.stepped, ranks)
        return lambda: (order, wait())

    def _sorted_parameters(self) -> list[Tensor]:
        """Returns the parameters by name; their order may differ between ranks."""
        if not self._sorted:
            self._sorted = sorted(self._passes_left, key=self.name_of.__getitem__)
        return self._sorted

    def _has_launched_all(self) -> bool:
        return sum(map(len, self._launched)) == len(self._passes_left)

    def _receive_common(self, order: list[Tensor], readiness: Readiness) -> None:
        """Waits for the gradients that all ranks have sent."""
        if readiness.steps_differ:
            self._failure = self._failure or Mismatch(error_texts.STEPS_DIFFER)
        pairs = zip(order, readiness.everywhere, strict=True)
        common = {p for p, sent in pairs if sent}
        for unit in [unit for unit in self._in_flight if common.issuperset(unit)]:
            self._receive(self._in_flight.pop(unit))
            for p in unit:
                if p.grad is not None:
                    self._reduced[p] = weakref.ref(p.grad)
        # `all_reduced` stays true once it is true: threads that run backward at the
        # same time may process the results of rounds in another order than they
        # submitted the rounds.
        self.all_reduced = self.all_reduced or len(common) == len(self._passes_left)

    def _await_end_of_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task >= 0 and task not in self._tasks:
            self._tasks.add(task)
            _queue_callback(
                partial(_call, weakref.ref(self), "_on_end_of_backward", task)
            )

    def _on_end_of_backward(self, task: int) -> None:
        with self._lock:
            self._tasks.discard(task)
            # If autograd has a current node, this pass runs within a node of another
            # pass, as in reentrant checkpointing. The outer pass has a callback of its
            # own.
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
            wait = self._attempt(partial(self._submit_round, final=False))
        if wait is not None:
            # Wait in a second callback: autograd runs it after the first callbacks of
            # all reducers. If each reducer waited in its first callback, ranks with
            # different orders of reducers would wait for each other forever.
            _queue_callback(partial(self._finish_round, wait))

    def _finish_round(self, wait: Round) -> None:
        # Wait without the lock, so that other backward passes may run.
        found = self._attempt(wait)
        if found is not None:
            with self._lock:
                self._receive_common(*found)

    def check_scaler(self) -> None:
        """Refuses `GradScaler.unscale_` while gradients are in flight.

        `unscale_` divides gradients in place without a new version of the tensors, so
        `InFlightGradient.is_changed` cannot see the change. But `unscale_` first reads
        `param_groups`, whose getter calls this method. So the frame above the getter
        shows whether `GradScaler` reads.
        """
        in_flight = [p for unit in self._in_flight for p in unit]
        in_flight += [g.parameter for g in self._unsent]
        if in_flight:
            reader = sys._getframe(2).f_globals.get("__name__")
            if reader == torch.amp.GradScaler.__module__:
                name = self.name_of[in_flight[0]]
                raise RuntimeError(error_texts.GRADIENT_CHANGED.format(name=name))

    def _tune(self) -> None:
        """Reports the duration of a step to the autotuner, which tunes later steps."""
        now = time.monotonic()
        if self._tuning is None:
            sizes = [self.name_of[p] + str(p.nbytes) for p in self._passes_left]
            key = ["torch", *sorted(sizes)]
            self._tuning = Tuning(self.title, key, None, self.options.process_set)
        else:
            self._tuning.record_step(now - self._step_ended)
        self._step_ended = now

    def check_parameters(self) -> None:
        """Compares the parameters of all ranks in some steps; warns if they differ."""
        if not self._passes_left or not mpi_ops.is_initialized() or self.is_alone():
            return

        def memory() -> Iterator[tuple[str, int, int]]:
            for p in self._sorted_parameters():
                on_host = p.detach().cpu().contiguous()  # usually this does not copy
                yield self.name_of[p], on_host.data_ptr(), on_host.nbytes

        parameter_check.check(self.title, memory, self.options.process_set)

    def _broadcast_names(self, names: list[str]) -> list[str]:
        """Returns the names in the order of the first rank of the process set."""
        if not mpi_ops.is_initialized() or self.is_alone():
            return names
        ranks = self.options.process_set
        name = "DistributedOptimizer.groups"
        order: list[str] = broadcast_object(names, ranks.ranks[0], name, ranks)
        return order

    def on_gradient_ready(self, p: Tensor) -> None:
        """A hook: processes the gradient of `p` after backward has accumulated it."""
        with self._lock:
            if not self.begun and (not mpi_ops.is_initialized() or self.is_alone()):
                return
            assert p.grad is not None
            name = self.name_of[p]
            if p.grad.requires_grad:
                raise RuntimeError(error_texts.GRADIENT_HAS_GRAPH.format(name=name))
            # If `.grad` is another object now, the zero_grad of the module has dropped
            # the reduced gradient, without a call of this optimizer's zero_grad.
            if p in self._reduced and self._reduced[p]() is not p.grad:
                self.reset()
            left = self._passes_left[p] - 1
            if left < 0:
                passes = self.options.backward_passes_per_step
                text = error_texts.TOO_MANY_BACKWARDS
                raise AssertionError(text.format(name=name, passes=passes))
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
        # Operations have the names of their parameters, so two optimizers that share a
        # parameter name must not have gradients in flight at the same time.
        names = set(self.name_of.values())
        for other in _in_step:
            if common := names.intersection(other.name_of.values()):
                raise ValueError(error_texts.DUPLICATE_NAME.format(name=min(common)))
        self.begun = True
        _in_step.add(self)

    def _launch(self, unit: Unit) -> None:
        """Puts the gradients of a unit into the bucket; sends the bucket if it is full.

        Operations are matched by name, so the buckets of other ranks may differ.
        """
        first = not self._launched
        self._launched.add(unit)
        self._bucket.append(unit)
        self._bucket_bytes += sum(p.nbytes for p in unit)
        tuned = self._tuning.setting if self._tuning else runtime.config()
        full = tuned.bucket_bytes
        if self._bucket_bytes >= (min(full, _FIRST_BUCKET) if first else full):
            self._send_bucket()

    def _send_bucket(self) -> None:
        bucket, self._bucket, self._bucket_bytes = self._bucket, [], 0
        if not bucket:
            return
        try:
            with lane.submission_group(self.options.process_set):
                for unit in bucket:
                    self._in_flight[unit] = self._submit(unit)
        except RingjaxError as error:
            self._in_flight.update(dict.fromkeys(bucket, failed_reduction(error)))

    def _submit(self, unit: Unit) -> InFlightReduction:
        gradients = [self._gradient(p) for p in unit]
        try:
            name = self.name_of[unit[0]]
            return submit_gradients(unit, gradients, name, self.options)
        except RingjaxError as error:
            return failed_reduction(error)

    def _gradient(self, p: Tensor) -> Tensor:
        """Returns the gradient of `p`, or zeros if `p` has no gradient on this rank."""
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
        # Zeros become the gradient only if another rank has a gradient. A frozen
        # parameter, or a parameter that is reduced only because of its group, keeps no
        # gradient.
        if p.requires_grad and p in self._present_anywhere:
            p.grad = zeros
        return zeros


def _queue_callback(action: Callable[[], None]) -> None:
    """Makes autograd call `action` at the end of the running backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def is_reduced(parameter: Tensor) -> bool:
    """Returns whether a distributed optimizer reduces the parameter's gradients."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(
        isinstance(hook, partial) and hook.func is _call and hook.args[0]() is not None
        for hook in hooks.values()
    )


def _call(owner: weakref.ref[Reducer], method: str, *arguments: object) -> None:
    """Calls a method if `owner` still exists: hooks may outlive their optimizer."""
    if (reducer := owner()) is not None:
        getattr(reducer, method)(*arguments)


def _remove_hooks(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
