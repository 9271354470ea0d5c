"""DistributedOptimizer: any PyTorch optimizer, on gradients reduced over all ranks.

Behaviour, names and errors are Horovod's. How gradients travel is in reducer.py.
Adasum as in Maleki et al., "Scaling Distributed Training with Adaptive Summation"
(2020), applied to how far a local step of each rank moves the parameters.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from ringjax.errors import RingjaxError
from ringjax.ops import Adasum, Average, ReduceOp, Sum
from ringjax.torch import mpi_ops
from ringjax.torch.compression import Compression
from ringjax.torch.in_flight import AllreduceOptions
from ringjax.torch.parameters import Unit
from ringjax.torch.reducer import Reducer
from ringjax.world.process_set import ProcessSet, global_process_set

_PASSES = "backward_passes_per_step must be > 0"
_ZEROED = (
    "optimizer.zero_grad() was called after loss.backward() but before "
    "optimizer.step() or optimizer.synchronize(). Gradients are on their way to other "
    "ranks: to set them to zero now would be a race. If backward failed on this rank "
    "(out of memory, say), call optimizer.step() all the same: this rank then takes "
    "part with the gradients that it has, and all ranks make the same step. To drop "
    "the batch, call optimizer.synchronize() and then zero_grad() on every rank."
)
_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after "
    "optimizer.synchronize(): the gradients are reduced twice. If you call "
    "optimizer.synchronize(), put optimizer.step() into `with "
    "optimizer.skip_synchronize():`."
)


class _DistributedOptimizer(torch.optim.Optimizer):
    """What comes before an optimizer's own class; see `DistributedOptimizer`.

    It takes over an optimizer that exists, so `__init__` is not called.
    """

    plain_class: type[torch.optim.Optimizer]  # the optimizer's own
    _reducer: Reducer
    _synchronized = False
    _should_synchronize = True
    _is_scaled = False  # GradScaler.step has begun, after gradients were reduced

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters and options, as the optimizer's own.

        Raises:
            RuntimeError: see `Reducer.check_scaler`.
        """
        if (reducer := vars(self).get("_reducer")) is not None:
            reducer.check_scaler()
        groups: list[dict[str, Any]] = vars(self)["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        vars(self)["param_groups"] = groups

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step asks it before it looks at the gradients, so they are reduced
        # here. It may find infinities then, on all ranks, and make no step.
        if self._should_synchronize and self.op != Adasum:
            self._collect()
            self._is_scaled = True
        return bool(vars(self).get("_step_supports_amp_scaling"))

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        # Horovod's: scripts look here for the name of a parameter.
        return self._reducer.name_of

    @property
    def op(self) -> ReduceOp:
        """How gradients are reduced."""
        return self._reducer.options.op

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""
        return self._reducer.options.process_set

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes there are before each step."""
        return self._reducer.options.backward_passes_per_step

    @torch.no_grad()
    def synchronize(self) -> None:
        """Waits until all gradients are reduced; submits those that backward did not.

        Before gradients are clipped or changed, where the ranks' losses do not all use
        the same parameters (else they are reduced when backward returns). Put `step`
        into `skip_synchronize` then.

        Raises:
            Mismatch, PeerLost, Stalled: the first failure, after all have ended. The
                optimizer can go on.
        """
        self._collect()
        self._synchronized = True

    @torch.no_grad()
    def _collect(self) -> None:
        if self._reducer.is_alone():
            return
        failure = None
        try:
            self._reducer.synchronize(self.param_groups)
        except RingjaxError:
            raise
        except RuntimeError as error:  # of this rank alone
            failure = error
        # Here and not in `step`, which a rank may leave out: all ranks come here.
        self._reducer.check_parameters()
        if failure is not None:
            raise failure

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, `step` takes the gradients as they are.

        Example:
            >>> import torch, ringjax.torch as hvd
            >>> hvd.init()
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> optimizer = hvd.DistributedOptimizer(optimizer)
            >>> model(torch.ones(1, 2)).sum().backward()
            >>> optimizer.synchronize()
            >>> _ = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            >>> with optimizer.skip_synchronize():
            ...     optimizer.step()
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronizes, then makes a step of the optimizer.

        With a closure, the gradients that it computes are reduced, every time that the
        optimizer calls it.
        """
        if self._should_synchronize and not self._is_scaled:
            if self._synchronized and not self._reducer.begun:
                warnings.warn(_TWICE, stacklevel=2)
            if closure is None:
                self.synchronize()
            else:
                closure = self._reducing(closure)
        self._synchronized = self._is_scaled = False
        try:
            loss = super().step(closure)
        finally:
            self._synchronized = False
        if self._reducer.stepped is not None:
            self._reducer.stepped = True
        return loss

    # Else unpickling would wrap it, and the user's hooks on steps would run twice.
    step.hooked = True  # type: ignore[attr-defined]

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        done = self._reducer.begun
        if done:  # the closure may begin with zero_grad
            self.synchronize()

        def reduced() -> Any:
            nonlocal done
            loss = closure()
            if self._reducer.begun or not done:
                self.synchronize()
                done = True
            return self._loss_of_all(loss)

        return reduced

    def _loss_of_all(self, loss: Any) -> Any:
        """LBFGS decides by the loss how often to call the closure: all ranks alike."""
        if not isinstance(self, torch.optim.LBFGS) or self._reducer.is_alone():
            return loss
        losses = mpi_ops.allgather(
            torch.as_tensor(loss).detach().reshape(1),
            name=f"the loss of {self._reducer.title}",
            process_set=self.process_set,
        )
        if bool((losses == losses[0]).all()):  # the closure has reduced it already
            return loss
        return losses.mean() if self.op == Average else losses.sum()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Calls the optimizer's own `zero_grad`, also on gradients that are reduced.

        Raises:
            AssertionError: some gradients are on their way, or a backward pass of
                several is missing.
        """
        if self._reducer.begun and not self._reducer.all_reduced:
            raise AssertionError(_ZEROED)
        self._reducer.reset()
        self._is_scaled = False
        super().zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes there are before each step, from now on."""
        if passes <= 0:
            raise ValueError(_PASSES)
        self._reducer.options.backward_passes_per_step = passes
        self._reducer.reset()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own. Gradients that are under way are forgotten."""
        self._reducer.reset()
        self._synchronized, self._should_synchronize = False, True
        self._is_scaled = False
        super().load_state_dict(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; all ranks add the same."""
        super().add_param_group(param_group)
        self._reducer.add_parameters(self.param_groups)

    def __reduce__(self) -> tuple[Any, ...]:
        mine = [p for group in self.param_groups for p in group["params"]]
        names = [(self._reducer.name_of[p], p) for p in mine]
        options, groups = self._reducer.options, self._reducer.groups()
        everyone = options.process_set is global_process_set
        plain = super().__getstate__()
        return _rebuild, (self.plain_class, plain, names, groups, options, everyone)


class _AdasumOptimizer(_DistributedOptimizer):
    """Combines local steps: the hooks only count, and `step` does all the rest."""

    def synchronize(self) -> None:
        """Does nothing: there is something to reduce only within `step`."""

    def skip_synchronize(self) -> NoReturn:
        """Not possible.

        Raises:
            AssertionError: always.
        """
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a local step, and combines all ranks' steps into one."""
        plain_step = super(_DistributedOptimizer, self).step
        if self._reducer.is_alone():
            return plain_step(closure)
        self._reducer.check_parameters()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._reducer.add_parameters(self.param_groups)
        how = self._reducer.options
        starts = {p: p.clone() for p in self._reducer.parameters}
        plain_step()
        sent = []
        for p, start in starts.items():
            delta, context = how.compression.compress(p - start)
            p.copy_(start)  # where it stays, should a rank be lost
            name = self._reducer.name_of[p]
            handle = mpi_ops.allreduce_async_(
                delta, name=name, op=Adasum, process_set=how.process_set
            )
            sent.append((p, handle, context))
        self._reducer.reset()
        deltas = [mpi_ops.synchronize(handle) for _, handle, _ in sent]
        for (p, _, context), delta in zip(sent, deltas, strict=True):
            p.add_(how.compression.decompress(delta, context))
        return loss

    step.hooked = True  # type: ignore[attr-defined]


def _distributed(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None,
    groups: Sequence[Sequence[Tensor]] | int | None,
    options: AllreduceOptions,
) -> Any:
    """An object with the state of `optimizer`, of a subclass of its class."""
    base = type(optimizer)
    kind = _AdasumOptimizer if options.op == Adasum else _DistributedOptimizer
    about = {"__module__": __name__, "__doc__": base.__doc__, "plain_class": base}
    made: Any = type(base.__name__, (kind, base), about)
    result = made.__new__(made)
    # Not what would hide our methods: a scheduler has put a `step` of its own there.
    ours = vars(_DistributedOptimizer)
    state = vars(optimizer).items()
    vars(result).update((k, v) for k, v in state if not callable(ours.get(k)))
    groups_of_it = optimizer.param_groups
    result._reducer = Reducer(groups_of_it, named_parameters, groups, options)
    return result


def _rebuild(
    base: type[torch.optim.Optimizer],
    plain: dict[str, Any],
    names: list[tuple[str, Tensor]],
    groups: list[Unit],
    options: AllreduceOptions,
    everyone: bool,
) -> Any:
    """A pickled or copied optimizer, with hooks on parameters of its own."""
    optimizer = base.__new__(base)
    optimizer.__setstate__(plain)
    if everyone:  # not a copy of this set
        options = dataclasses.replace(options, process_set=global_process_set)
    return _distributed(optimizer, names, groups, options)


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Sequence[Sequence[Tensor]] | int | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the optimizer with a `step` that first reduces gradients over all ranks.

    Gradients travel while backward runs. Every rank takes part with every parameter
    that requires a gradient: with zeros if its graph did not use it.

    Args:
        optimizer: any PyTorch optimizer. It shares parameters and state with the
            result, whose class is a subclass of its class.
        named_parameters: usually `model.named_parameters()`; the names under which
            gradients travel, unique and the same on all ranks.
        compression: what gradients travel as, see `Compression`.
        backward_passes_per_step: how many times backward runs before `step`; gradients
            add up locally until then.
        op: Average, Sum, or Adasum. Adasum combines what the optimizer's local steps
            change, so each rank uses the learning rate of a single process.
        gradient_predivide_factor: with Average: gradients are divided by it before the
            sum, and multiplied by it and divided by the size after.
        num_groups: Horovod's former name of an integer for `groups`.
        groups: into how many operations to put all gradients, or the lists of
            parameters that are put into one each.
        sparse_as_dense: sparse gradients travel as dense ones.
        process_set: the ranks that take part. On others the result is like `optimizer`.

    Raises:
        ValueError: a bad argument; the text is Horovod's where Horovod has one.
        TypeError: it is a DistributedOptimizer already.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> isinstance(optimizer, torch.optim.SGD)
        True
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """
    if isinstance(optimizer, _DistributedOptimizer):
        raise TypeError("optimizer is a DistributedOptimizer already")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op must be Average, Sum or Adasum, not {op!r}")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if gradient_predivide_factor <= 0.0:
        raise ValueError("gradient_predivide_factor must be > 0")
    if num_groups != 0:
        text = "Parameter `num_groups` has been replaced by `groups`."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError(_PASSES)
    options = AllreduceOptions(
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        op=ReduceOp(op),
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    return _distributed(optimizer, named_parameters, groups, options)
