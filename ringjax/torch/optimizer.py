"""DistributedOptimizer: any PyTorch optimizer, on gradients reduced over all ranks.

Behaviour, names and errors are Horovod's; reducer.py reduces the gradients.

References:
    S. Maleki et al., Scaling Distributed Training with Adaptive Summation, 2020. Adasum
    combines the changes that the ranks' local steps make to the parameters.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from ringjax.errors import RingjaxError
from ringjax.horovod.gradient_options import check_reduction
from ringjax.ops import Adasum, Average, ReduceOp
from ringjax.torch import mpi_ops
from ringjax.torch.compression import Compression, Compressor
from ringjax.torch.in_flight import AllreduceOptions
from ringjax.torch.parameters import ParamGroups, Unit
from ringjax.torch.reducer import Reducer
from ringjax.world.process_set import ProcessSet, global_process_set

# The result of a closure: usually a tensor, although PyTorch's annotations say float.
Loss: TypeAlias = Any
Closure: TypeAlias = Callable[[], Loss]

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
    """The first base class of distributed optimizers, before the plain optimizer's.

    `_distributed` makes the object from an existing optimizer, so no `__init__` runs.

    Attributes:
        plain_class: the class of the plain optimizer.
    """

    plain_class: type[torch.optim.Optimizer]
    _reducer: Reducer
    _synchronized = False
    _should_synchronize = True
    # Whether GradScaler.step has begun after the reduction of the gradients.
    _is_scaled = False

    @property
    def param_groups(self) -> ParamGroups:
        """The `param_groups` of the plain optimizer.

        Raises:
            RuntimeError: see `Reducer.check_scaler`.
        """
        if (reducer := vars(self).get("_reducer")) is not None:
            reducer.check_scaler()
        groups: ParamGroups = vars(self)["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: ParamGroups) -> None:
        vars(self)["param_groups"] = groups

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step reads this property before it searches the gradients for
        # infinities. The gradients are reduced here, so all ranks find the same
        # infinities, and all or none of them make the step.
        if self._should_synchronize and self.op != Adasum:
            self._reduce_gradients()
            self._is_scaled = True
        return bool(vars(self).get("_step_supports_amp_scaling"))

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        # Horovod's attribute; scripts read the names of parameters from it.
        return self._reducer.name_of

    @property
    def op(self) -> ReduceOp:
        """The reduction of the gradients: Average, Sum or Adasum."""
        return self._reducer.options.op

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that reduce gradients together."""
        return self._reducer.options.process_set

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes before each step."""
        return self._reducer.options.backward_passes_per_step

    @torch.no_grad()
    def synchronize(self) -> None:
        """Waits until all gradients are reduced.

        Call it before you clip or change gradients if the losses of the ranks may use
        different parameters, and put `step` into `skip_synchronize`. If all losses use
        all parameters, the gradients are reduced already when backward returns.

        Raises:
            Mismatch, PeerLost, Stalled: the first failure, after all operations have
                ended. The optimizer can continue.
        """
        self._reduce_gradients()
        self._synchronized = True

    @torch.no_grad()
    def _reduce_gradients(self) -> None:
        if self._reducer.is_alone():
            return
        failure = None
        try:
            self._reducer.synchronize(self.param_groups)
        except RingjaxError:
            raise
        # A RuntimeError is an error of this rank, not of a collective.
        except RuntimeError as error:
            failure = error
        # The check is a collective. It is here and not in `step`, because all ranks
        # call this method, even after an error, whereas a rank may skip a step.
        self._reducer.check_parameters()
        if failure is not None:
            raise failure

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Makes a context in which `step` does not reduce gradients.

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

    def step(self, closure: Closure | None = None) -> Loss:
        """Reduces the gradients, then makes a step of the optimizer.

        With a closure, the gradients are reduced after each call of the closure.
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

    # PyTorch wraps `step` when it unpickles an optimizer, unless `hooked` is set. The
    # plain class has a wrapped `step` already: the user's hooks would run twice.
    step.hooked = True  # type: ignore[attr-defined]

    def _reducing(self, closure: Closure) -> Closure:
        """Returns a closure that reduces the gradients, and for LBFGS the loss."""
        done = self._reducer.begun
        # The closure may begin with zero_grad, so reduce earlier gradients first.
        if done:
            self.synchronize()

        def reducing_closure() -> Loss:
            nonlocal done
            loss = closure()
            if self._reducer.begun or not done:
                self.synchronize()
                done = True
            return self._reduce_loss(loss)

        return reducing_closure

    def _reduce_loss(self, loss: Loss) -> Loss:
        # LBFGS decides by the loss how often to call the closure. Each call reduces
        # gradients, so all ranks must make the same decision and need the same loss.
        if not isinstance(self, torch.optim.LBFGS) or self._reducer.is_alone():
            return loss
        losses = mpi_ops.allgather(
            torch.as_tensor(loss).detach().reshape(1),
            name=f"the loss of {self._reducer.title}",
            process_set=self.process_set,
        )
        # The losses are equal, so the closure has already reduced the loss.
        if bool((losses == losses[0]).all()):
            return loss
        return losses.mean() if self.op == Average else losses.sum()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Calls `zero_grad` of the plain optimizer.

        Raises:
            AssertionError: some gradients are in flight, or backward has run less than
                `backward_passes_per_step` times.
        """
        if self._reducer.begun and not self._reducer.all_reduced:
            raise AssertionError(_ZEROED)
        self._reducer.reset()
        self._is_scaled = False
        super().zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes before each step."""
        options = self._reducer.options
        check_reduction(options.op, options.gradient_predivide_factor, passes)
        options.backward_passes_per_step = passes
        self._reducer.reset()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads a state as the plain optimizer does; drops gradients in flight."""
        self._reducer.reset()
        self._synchronized, self._should_synchronize = False, True
        self._is_scaled = False
        super().load_state_dict(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as the plain optimizer does. All ranks add the same group."""
        super().add_param_group(param_group)
        self._reducer.add_parameters(self.param_groups)

    def __reduce__(
        self,
    ) -> tuple[Callable[..., _DistributedOptimizer], tuple[object, ...]]:
        parameters = [p for group in self.param_groups for p in group["params"]]
        names = [(self._reducer.name_of[p], p) for p in parameters]
        options, groups = self._reducer.options, self._reducer.groups()
        is_global = options.process_set is global_process_set
        plain = super().__getstate__()
        return _rebuild, (self.plain_class, plain, names, groups, options, is_global)


class _AdasumOptimizer(_DistributedOptimizer):
    """Combines the local steps of the ranks in `step`; its hooks only count passes."""

    def synchronize(self) -> None:
        """Does nothing, because `step` reduces changes and not gradients."""

    def skip_synchronize(self) -> NoReturn:
        """Raises an error, because `step` cannot leave the reduction out.

        Raises:
            AssertionError: always.
        """
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Loss:
        """Makes a local step, and combines the steps of all ranks into one step."""
        plain_step = super(_DistributedOptimizer, self).step
        if self._reducer.is_alone():
            return plain_step(closure)
        self._reducer.check_parameters()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._reducer.add_parameters(self.param_groups)
        options = self._reducer.options
        starts = {p: p.clone() for p in self._reducer.parameters}
        plain_step()
        sent = []
        for p, start in starts.items():
            delta, context = options.compression.compress(p - start)
            p.copy_(start)  # if a rank is lost, the parameter keeps this value
            name = self._reducer.name_of[p]
            handle = mpi_ops.allreduce_async_(
                delta, name=name, op=Adasum, process_set=options.process_set
            )
            sent.append((p, handle, context))
        self._reducer.reset()
        deltas = [mpi_ops.synchronize(handle) for _, handle, _ in sent]
        for (p, _, context), delta in zip(sent, deltas, strict=True):
            p.add_(options.compression.decompress(delta, context))
        return loss

    step.hooked = True  # type: ignore[attr-defined]


def _distributed(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None,
    groups: Sequence[Sequence[Tensor]] | int | None,
    options: AllreduceOptions,
) -> _DistributedOptimizer:
    """Returns an object of a new subclass that shares the state of `optimizer`."""
    plain_class = type(optimizer)
    base = _AdasumOptimizer if options.op == Adasum else _DistributedOptimizer
    namespace = {
        "__module__": __name__,
        "__doc__": plain_class.__doc__,
        "plain_class": plain_class,
    }
    subclass: Any = type(plain_class.__name__, (base, plain_class), namespace)
    result: _DistributedOptimizer = subclass.__new__(subclass)
    # A scheduler stores a wrapped `step` as an attribute of the plain optimizer. The
    # attribute would hide the method of `_DistributedOptimizer`, so do not copy it.
    methods = vars(_DistributedOptimizer)
    state = vars(optimizer).items()
    vars(result).update((k, v) for k, v in state if not callable(methods.get(k)))
    params = optimizer.param_groups
    result._reducer = Reducer(params, named_parameters, groups, options)
    return result


def _rebuild(
    plain_class: type[torch.optim.Optimizer],
    plain: dict[str, Any],
    names: list[tuple[str, Tensor]],
    groups: list[Unit],
    options: AllreduceOptions,
    is_global: bool,
) -> _DistributedOptimizer:
    """Rebuilds a pickled or copied optimizer, with hooks on its own parameters."""
    optimizer = plain_class.__new__(plain_class)
    optimizer.__setstate__(plain)
    # `options` has a copy of the global process set: use the process set itself.
    if is_global:
        options = dataclasses.replace(options, process_set=global_process_set)
    return _distributed(optimizer, names, groups, options)


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Sequence[Sequence[Tensor]] | int | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> _DistributedOptimizer:
    """Returns the optimizer with a `step` that first reduces gradients over all ranks.

    The gradients are reduced while backward runs. Every rank takes part with every
    parameter that requires a gradient. If the graph of a rank does not use a parameter,
    the rank contributes zeros.

    Args:
        optimizer: any PyTorch optimizer. The result shares its parameters and its
            state, and is an instance of its class.
        named_parameters: usually `model.named_parameters()`. The gradients are reduced
            under these names, which are unique and the same on all ranks.
        compression: the form in which gradients are sent, see `Compression`.
        backward_passes_per_step: the number of times that backward runs before `step`;
            gradients add up locally until then.
        op: Average, Sum, or Adasum. Adasum combines the changes of the ranks' local
            steps, so each rank uses the learning rate of a single process.
        gradient_predivide_factor: only allowed with Average. Gradients are divided by
            this factor before the sum; the sum is multiplied by the factor and divided
            by the size.
        num_groups: Horovod's former name of `groups`, if that is an integer.
        groups: the number of operations into which all gradients are put, or lists of
            parameters, each of which becomes one operation.
        sparse_as_dense: whether sparse gradients are sent as dense tensors.
        process_set: the ranks that take part. On other ranks the result behaves like
            `optimizer`.

    Raises:
        ValueError: a bad argument. Texts are Horovod's, if Horovod has a text.
        TypeError: `optimizer` is a DistributedOptimizer already.

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
    check_reduction(op, gradient_predivide_factor, backward_passes_per_step)
    if num_groups != 0:
        text = "Parameter `num_groups` has been replaced by `groups`."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    options = AllreduceOptions(
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        op=ReduceOp(op),
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    return _distributed(optimizer, named_parameters, groups, options)
