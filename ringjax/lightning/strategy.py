"""RingjaxStrategy for Lightning's Trainer, and RingjaxFabricStrategy for Fabric.

Lightning 2 has two names, `lightning` and `pytorch_lightning`, with classes of their
own. This module extends the package that the program has imported before, or else the
one that is installed.

Gradients are reduced once for all parameters of the module, and not for each optimizer:
every backward pass that Lightning does not block ends with reduced gradients, as with
DDP. So clipping, scaling, closures and several optimizers see averages, and optimizers,
schedulers and checkpoints stay those of PyTorch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

import ringjax.torch as hvd
from ringjax import runtime
from ringjax.ops import Average, Max, Min, Product, ReduceOp, Sum
from ringjax.torch.compression import Compression, Compressor
from ringjax.torch.in_flight import AllreduceOptions, InFlightGradient
from ringjax.torch.parameters import ParamGroups
from ringjax.torch.reducer import Reducer
from ringjax.world.process_set import ProcessSet, global_process_set


def _package() -> str:
    """Returns the name of the Lightning that this module extends."""
    names = ("lightning", "pytorch_lightning")
    for name in names:
        if name in sys.modules:
            return name
    return next(filter(importlib.util.find_spec, names), names[0])


_OWN_PACKAGES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
_TRAINER, _FABRIC = _OWN_PACKAGES[_package()]

if TYPE_CHECKING:
    from lightning import fabric as lightning_fabric
    from lightning import pytorch as lightning_pytorch
else:
    for _part in ("strategies", "plugins.environments", "utilities.seed"):
        importlib.import_module(f"{_FABRIC}.{_part}")
    lightning_pytorch = importlib.import_module(_TRAINER)
    lightning_fabric = sys.modules[_FABRIC]

_REDUCTIONS: Mapping[str, ReduceOp] = {
    "mean": Average,
    "avg": Average,
    "sum": Sum,
    "max": Max,
    "min": Min,
    "prod": Product,
    "product": Product,
}
_BARRIER_SECONDS = 1800.0
_DEVICES = (
    "{class_name}: devices={devices} and num_nodes={nodes} ask for {wanted} processes, "
    "but this job has {size} rank(s), {local} on this host. The strategy starts no "
    "processes: run `ringrun -np {wanted} python train.py`, or leave devices and "
    "num_nodes out."
)
_CHANGED = (
    "the gradient of {name!r} was changed before it was reduced, after fewer backward "
    "passes than backward_passes_per_step. Leave backward_passes_per_step out: each "
    "backward pass ends with reduced gradients then."
)
_ELASTIC = (
    "RingjaxStrategy: this is an elastic job (ringrun --min-np), and a fit of "
    "Lightning's Trainer cannot go on with other ranks. Start without --min-np and "
    "continue with trainer.fit(..., ckpt_path='last'), or write the loop with Fabric "
    "inside of ringjax.torch.elastic.run."
)


class RingjaxEnvironment(lightning_fabric.plugins.environments.ClusterEnvironment):
    """Tells Lightning the ranks of ringjax, which a launcher has started.

    Args:
        process_set: the ranks that train together; their number is the world's size.
    """

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._process_set = process_set

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning starts no process."""
        return True

    @property
    def main_address(self) -> str:
        """No address: ringjax connects the ranks."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """No port; see `main_address`."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Returns whether ringjax is initialised."""
        return runtime.is_initialized()

    def world_size(self) -> int:
        """The number of ranks that train together."""
        return self._process_set.size()

    def global_rank(self) -> int:
        """The rank of this process among these ranks."""
        return self._process_set.rank()

    def local_rank(self) -> int:
        """The rank of this process among the ranks of its host."""
        return runtime.local_rank()

    def node_rank(self) -> int:
        """The number of this host."""
        return runtime.cross_rank()

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher has decided."""

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher has decided."""


class _Gradients(Reducer):
    """Reduces the gradients of all parameters of a program after each backward pass.

    The sum of a reduced gradient and a new local one has the right average if it is
    reduced again. So a program may accumulate gradients over several passes without
    telling how many, and `passes` only saves messages.
    """

    def __init__(
        self, compression: type[Compressor], passes: int, process_set: ProcessSet
    ) -> None:
        options = AllreduceOptions(
            compression=compression,
            backward_passes_per_step=passes,
            op=Average,
            gradient_predivide_factor=1.0,
            sparse_as_dense=False,
            process_set=process_set,
        )
        super().__init__([], [], None, options)
        self._module_groups: ParamGroups = []
        # The passes of a window that is not complete, and the gradients after them.
        self._open_passes = 0
        self._open_gradients: list[InFlightGradient] = []
        self._blocked = False
        self.epoch: int | None = None

    @property
    def title(self) -> str:
        """The name of these gradients in operations.

        It has the epoch, because loaders without a length may end at different times.
        Ranks in different epochs then raise an error, and do not mix their gradients.
        """
        epoch = "" if self.epoch is None else f", epoch {self.epoch}"
        return super().title.replace("the optimizer", "the module") + epoch

    def add_module(self, module: torch.nn.Module, prefix: str = "") -> None:
        """Adds the parameters of a module, under their names."""
        named = list(module.named_parameters())
        for name, p in named:
            self.name_of.setdefault(p, prefix + name)
        self._module_groups.append({"params": [p for _, p in named]})
        self.add_parameters(self._module_groups)

    def on_gradient_ready(self, p: Tensor) -> None:
        if not self._blocked:
            super().on_gradient_ready(p)

    @contextmanager
    def blocked(self, enabled: bool = True) -> Iterator[None]:
        """Makes a context whose backward passes only add to the local gradients."""
        before, self._blocked = self._blocked, enabled
        try:
            yield
        finally:
            self._blocked = before

    def end_backward(self, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Reduces the gradients if this was the last pass before a step."""
        if self._blocked:
            return
        self._open_passes += 1
        if self._open_passes >= self.options.backward_passes_per_step:
            self._reduce(optimizers)
            return
        self._open_gradients = [
            InFlightGradient(p, p.grad, p.grad._version, None)
            for p in self.parameters
            if p.grad is not None
        ]

    def begin_step(self, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Reduces what is left: of an incomplete window, or of a plain `backward()`."""
        for gradient in self._open_gradients:
            if gradient.parameter.grad is not None and gradient.is_changed():
                name = self.name_of[gradient.parameter]
                raise RuntimeError(_CHANGED.format(name=name))
        if self.begun or self._open_passes:
            self._reduce(optimizers)

    def end_step(self) -> None:
        """Notes the step, which all ranks must make or leave out."""
        if self.stepped is not None:
            self.stepped = True

    @torch.no_grad()
    def _reduce(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._open_passes, self._open_gradients = 0, []
        if self.is_alone():
            return
        # Parameters that only an optimizer has, and parameters that were frozen.
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.synchronize([*self._module_groups, *groups])
        self.check_parameters()


class _Ranks:
    """The parts of both strategies: devices, checks and collectives."""

    _gradients: _Gradients
    parallel_devices: list[torch.device] | None

    def _use(
        self, compression: type[Compressor], passes: int, process_set: ProcessSet
    ) -> None:
        if passes < 1:
            raise ValueError(f"backward_passes_per_step={passes} is no positive number")
        self._options = (compression, passes, process_set)
        self._process_set = process_set
        self._num_nodes = 1

    @property
    def is_distributed(self) -> bool:
        """True, so that Lightning puts distributed samplers into data loaders."""
        return True

    @property
    def num_nodes(self) -> int:
        """The number of hosts that the program has asked for."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        self._num_nodes = number

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        devices, rank = self.parallel_devices or [torch.device("cpu")], hvd.local_rank()
        if len(devices) > 1 or devices[0] != torch.device("cuda", 0):
            return devices[rank % len(devices)]
        # devices=1 on each of several ranks: each rank has a GPU of its own.
        return torch.device("cuda", rank % torch.cuda.device_count())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The share of this rank, for `DistributedSampler`."""
        return {
            "num_replicas": self._process_set.size(),
            "rank": self._process_set.rank(),
        }

    def _connect_ranks(self) -> None:
        """Calls `init`, and compares the job with the numbers of the program."""
        hvd.init()
        rank_zero_only.rank = self._process_set.rank()
        devices = self.parallel_devices or []
        count, local = len(devices), hvd.local_size()
        # The default on a CPU is 1 device, and on GPUs all of them: both fit any job.
        by_default = count <= 1 or (
            devices[0].type == "cuda"
            and local <= count == torch.cuda.device_count()
            and self._num_nodes == 1
        )
        wanted = max(count, 1) * self._num_nodes
        fits = count == local and wanted in (local, hvd.size())
        if not (fits or (by_default and self._num_nodes in (1, hvd.cross_size()))):
            raise ValueError(
                _DEVICES.format(
                    class_name=type(self).__name__,
                    devices=count,
                    nodes=self._num_nodes,
                    wanted=wanted,
                    size=hvd.size(),
                    local=local,
                )
            )

    def _ranks_of(self, group: Any) -> ProcessSet:
        if group is None:
            return self._process_set
        if isinstance(group, ProcessSet):
            return group
        raise TypeError(
            f"group={group!r} is no group of ringjax: pass a ringjax.ProcessSet"
        )

    def _reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        name = str(getattr(reduce_op, "name", reduce_op)).lower()
        if name not in _REDUCTIONS:
            known = ", ".join(_REDUCTIONS)
            raise ValueError(f"reduce_op={reduce_op!r} is none of {known}")
        process_set, op = self._ranks_of(group), _REDUCTIONS[name]
        call: dict[str, Any] = {"name": "lightning.reduce", "process_set": process_set}
        if op == Average and not (tensor.is_floating_point() or tensor.is_complex()):
            return hvd.allreduce(tensor, op=Sum, **call) / process_set.size()
        return hvd.allreduce(tensor, op=op, **call)

    def barrier(self, name: str | None = None) -> None:
        """Waits until all ranks have called it.

        Rank 0 may take its time, for `prepare_data` or to write a checkpoint, so the
        limit is that of torch.distributed. A lost rank still ends the wait at once.
        """
        with hvd.collective_timeout(_BARRIER_SECONDS):
            hvd.barrier(self._process_set)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of rank `src`."""
        root = self._process_set.ranks[src]
        name = "lightning.broadcast"
        with hvd.collective_timeout(_BARRIER_SECONDS):
            return hvd.broadcast_object(obj, root, name, self._process_set)

    def all_gather(
        self, tensor: Tensor, group: Any = None, sync_grads: bool = False
    ) -> Tensor:
        """Returns the tensors of all ranks, stacked along a new first dimension.

        With one rank the tensor stays as it is, as Lightning's documentation says. With
        `sync_grads`, the gradient of this rank's tensor is the sum of the gradients of
        all ranks, as with DDP.
        """
        ranks, name = self._ranks_of(group), "lightning.all_gather"
        if ranks.size() == 1:
            return tensor
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            gathered = hvd.allgather(tensor.unsqueeze(0), name, ranks)
        if gathered.requires_grad:
            # The derivative of ringjax's allgather is the mean over the ranks.
            scale: Any = gathered.register_hook
            scale(lambda gradient: gradient * ranks.size())
        return gathered

    def _send_module(self, module: torch.nn.Module) -> None:
        """Gives all ranks the parameters and buffers of rank 0."""
        if self._process_set.size() == 1:
            return
        named = dict([*module.named_parameters(), *module.named_buffers()])
        for name, tensor in named.items():
            if is_lazy(tensor):
                raise ValueError(
                    f"{name!r} has no shape yet. Call the module once, for example in "
                    "configure_model, before the strategy sets it up."
                )
        found = {n: (list(t.shape), str(t.dtype)) for n, t in named.items()}
        first = self.broadcast(found)
        names = sorted(found.keys() | first.keys())
        differ = [name for name in names if found.get(name) != first.get(name)]
        # All ranks raise the error: those with equal modules would wait otherwise.
        if self._reduce(torch.tensor(len(differ)), None, "sum") > 0:
            here = [f"{n!r} is {found.get(n, 'missing')}" for n in differ[:1]]
            raise ValueError(
                f"rank {hvd.rank()}: the ranks have made different modules. Compared "
                f"with the first rank's module, here {''.join(here) or 'all is equal'}"
            )
        self._send_tensors(named)

    def _send_tensors(self, named: Mapping[str, Tensor]) -> None:
        root, ranks = self._process_set.ranks[0], self._process_set
        names = [name for name, tensor in named.items() if tensor.numel()]
        handles = [
            hvd.broadcast_async_(named[name].detach(), root, name, ranks)
            for name in names
        ]
        for handle in handles:
            handle.wait()


class RingjaxStrategy(_Ranks, lightning_pytorch.strategies.ParallelStrategy):
    """Trains a LightningModule on the ranks of ringjax.

    A launcher starts the ranks: ringrun, Slurm or torchrun. In one process the strategy
    trains alone. `Trainer(accumulate_grad_batches=…)`, clipping, precision plugins,
    several optimizers and `sync_batchnorm` work as with DDP, and no parameter needs to
    be used in a step.

    Args:
        compression: the form in which gradients are sent, see
            `ringjax.torch.Compression`.
        backward_passes_per_step: for manual optimization: the number of calls of
            `manual_backward` before a step. Gradients are reduced in the last of them.
        process_set: the ranks that train this module together.
        accelerator, parallel_devices, checkpoint_io, precision_plugin: as in every
            strategy of Lightning.

    Raises:
        ValueError: raised by Trainer: its `devices` and `num_nodes` contradict the job.
        RuntimeError: raised by Trainer: the job is elastic.

    Example:
        >>> import lightning
        >>> strategy = RingjaxStrategy(compression=Compression.bf16)
        >>> trainer = lightning.Trainer(
        ...     strategy=strategy, accelerator="cpu", logger=False
        ... )
        >>> trainer.world_size == hvd.size()
        True
    """

    strategy_name = "ringjax"

    def __init__(
        self,
        compression: type[Compressor] = Compression.none,
        backward_passes_per_step: int = 1,
        process_set: ProcessSet = global_process_set,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=RingjaxEnvironment(process_set),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._use(compression, backward_passes_per_step, process_set)
        self._gradients = _Gradients(*self._options)
        self._plain_layers: dict[torch.nn.Module, type[torch.nn.Module]] = {}

    def set_world_ranks(self) -> None:
        """Joins the job; Trainer calls it while it is made."""
        self._connect_ranks()
        if runtime.elastic():
            raise RuntimeError(_ELASTIC)

    def setup_environment(self) -> None:
        """Sets up the device, and the seed of `seed_everything`."""
        super().setup_environment()
        lightning_fabric.utilities.seed.reset_seed()

    def setup(self, trainer: Any) -> None:
        """Sets up module, optimizers and gradients before a fit or an evaluation."""
        module, fits = self.lightning_module, trainer.state.fn == "fit"
        passes = self._options[1]
        if fits and passes > 1 and module.automatic_optimization:
            raise ValueError(
                f"backward_passes_per_step={passes} is for manual optimization: pass "
                f"Trainer(accumulate_grad_batches={passes}) instead"
            )
        if fits:
            self._synchronize_batch_norms(module)
        super().setup(trainer)
        if fits:
            self._gradients = _Gradients(*self._options)
            self._gradients.add_module(module)

    def model_to_device(self) -> None:
        """Moves the module to the device of this rank, with the values of rank 0."""
        self.model.to(self.root_device)
        self._send_module(self.model)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning uses this context for all but the last pass before a step."""
        with self._gradients.blocked():
            yield

    def backward(
        self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Runs backward and reduces the gradients, before `on_after_backward`."""
        self.pre_backward(closure_loss)
        plugin, module = self.precision_plugin, self.lightning_module
        closure_loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        self._gradients.end_backward(self.optimizers)
        result: Tensor = plugin.post_backward(closure_loss, module)
        self.post_backward(result)
        return result

    def optimizer_step(
        self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any
    ) -> Any:
        """Makes a step with reduced gradients."""
        self._gradients.begin_step(self.optimizers)
        if isinstance(optimizer, torch.optim.LBFGS):
            closure = partial(self._mean_loss, closure)
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._gradients.end_step()
        return result

    def _mean_loss(self, closure: Any) -> Any:
        # LBFGS decides by the loss how often to call the closure. All ranks must decide
        # alike, since each call reduces gradients.
        loss = closure()
        return self.reduce(loss.detach()) if isinstance(loss, Tensor) else loss

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns the reduction of a tensor over all ranks, and other objects as is.

        Args:
            tensor: equal in shape and dtype on all ranks.
            group: None, or a `ringjax.ProcessSet`.
            reduce_op: "mean", "sum", "min", "max", "prod", or PyTorch's `ReduceOp`.
        """
        return self._reduce(tensor, group, reduce_op)

    def on_train_start(self) -> None:
        """Compares the numbers of batches, which the ranks must have alike."""
        self._connect_metrics()
        batches = float(self.lightning_module.trainer.num_training_batches)
        found = self.all_gather(torch.tensor([batches])).flatten().tolist()
        if len(set(found)) > 1:
            raise ValueError(
                f"rank {hvd.rank()}: the ranks have {found} batches in an epoch, and "
                "every step needs all ranks. Leave the sampler to Lightning, or pass "
                f"Trainer(limit_train_batches={int(min(found))})."
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Notes the epoch, see `_Gradients.title`."""
        self._gradients.epoch = self.lightning_module.trainer.current_epoch

    def on_validation_start(self) -> None:
        """Gives all ranks the buffers of rank 0, such as running statistics."""
        self._connect_metrics()
        self._send_buffers()

    def on_test_start(self) -> None:
        """Makes metrics add up over all ranks."""
        self._connect_metrics()

    def on_predict_start(self) -> None:
        """Makes metrics add up over all ranks."""
        self._connect_metrics()

    def on_train_end(self) -> None:
        """Leaves all ranks with equal modules."""
        self._send_buffers()

    def teardown(self) -> None:
        """Removes the hooks of gradients, and restores batch normalizations."""
        self._gradients = _Gradients(*self._options)
        for layer, plain in self._plain_layers.items():
            layer.__class__ = plain
        self._plain_layers = {}
        super().teardown()

    def _send_buffers(self) -> None:
        if self.lightning_module.trainer.state.fn == "fit":
            self._send_tensors(dict(self.lightning_module.named_buffers()))

    def _connect_metrics(self) -> None:
        # TorchMetrics only looks for torch.distributed, which is not in use here.
        for metric in self.lightning_module.modules():
            if isinstance(metric, Metric) and metric.dist_sync_fn is None:
                metric.distributed_available_fn = _is_distributed
                metric.dist_sync_fn = _MetricGather(self._process_set)

    def _synchronize_batch_norms(self, module: torch.nn.Module) -> None:
        # PyTorch's own SyncBatchNorm normalizes each rank's batch alone if
        # torch.distributed is not initialised, so it is replaced in any case.
        kinds: tuple[type[torch.nn.Module], ...] = (torch.nn.SyncBatchNorm,)
        if isinstance(self._layer_sync, lightning_pytorch.plugins.TorchSyncBatchNorm):
            kinds = (_BatchNorm,)
        elif self._layer_sync is not None:
            raise ValueError(
                f"RingjaxStrategy cannot use {type(self._layer_sync).__name__}, which "
                "needs torch.distributed: pass Trainer(sync_batchnorm=True)"
            )
        layers = [layer for layer in module.modules() if isinstance(layer, kinds)]
        if layers and self._process_set is not global_process_set:
            raise ValueError("SyncBatchNorm normalizes over all ranks, no process_set")
        # The class has no attributes of its own, so layers keep hooks and parameters.
        for layer in layers:
            self._plain_layers[layer] = type(layer)
            layer.__class__ = hvd.SyncBatchNorm


class RingjaxFabricStrategy(_Ranks, lightning_fabric.strategies.ParallelStrategy):
    """Runs a loop that is written with Lightning Fabric on the ranks of ringjax.

    `fabric.backward` ends with reduced gradients, unless it is called within
    `fabric.no_backward_sync`. In an elastic job (``ringrun --min-np``), call
    `fabric.setup` first, and the loop inside of `ringjax.torch.elastic.run`.

    Args:
        compression, backward_passes_per_step, process_set: as in `RingjaxStrategy`.
        accelerator, parallel_devices, checkpoint_io, precision: as in every strategy of
            Fabric.

    Raises:
        ValueError: raised by Fabric: its `devices` and `num_nodes` contradict the job.

    Example:
        >>> import lightning
        >>> fabric = lightning.Fabric(
        ...     strategy=RingjaxFabricStrategy(), accelerator="cpu"
        ... )
        >>> fabric.launch()
        >>> fabric.world_size == hvd.size()
        True
    """

    def __init__(
        self,
        compression: type[Compressor] = Compression.none,
        backward_passes_per_step: int = 1,
        process_set: ProcessSet = global_process_set,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision: Any = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=RingjaxEnvironment(process_set),
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._use(compression, backward_passes_per_step, process_set)
        self._gradients = _Gradients(*self._options)
        self._modules = 0
        self._backward_sync_control = _BackwardSyncControl(self._gradients)

    def _set_world_ranks(self) -> None:
        self._connect_ranks()

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Moves a module to the device of this rank."""
        module.to(self.root_device)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Gives all ranks the module of rank 0, and reduces its gradients from now on.

        Several modules may be set up. Their order is the same on all ranks.
        """
        self._send_module(module)
        self._gradients.add_module(module, f"{self._modules}.")
        self._modules += 1
        return module

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Runs backward and reduces the gradients of all modules."""
        super().backward(tensor, module, *args, **kwargs)
        self._gradients.end_backward()

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Makes a step with reduced gradients."""
        self._gradients.begin_step([optimizer])
        result = super().optimizer_step(optimizer, **kwargs)
        self._gradients.end_step()
        return result

    def all_reduce(
        self, tensor: Any, group: Any = None, reduce_op: Any = "mean"
    ) -> Any:
        """Returns the reduction of a tensor, as `RingjaxStrategy.reduce`."""
        return self._reduce(tensor, group, reduce_op)


class _BackwardSyncControl:
    """Blocks the reduction within `fabric.no_backward_sync`."""

    def __init__(self, gradients: _Gradients) -> None:
        self._gradients = gradients

    def no_backward_sync(self, module: object, enabled: bool) -> Any:
        return self._gradients.blocked(enabled)


class _MetricGather:
    """Gathers a metric's state of all ranks, for TorchMetrics.

    A copy of a metric keeps this object, and with it the registered process set.
    """

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set

    def __deepcopy__(self, memo: object) -> _MetricGather:
        return self

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Returns the tensors of all ranks, whose shapes may differ."""
        ranks, name = self._process_set, "lightning.metric"
        header = torch.zeros((1, 16), dtype=torch.int64)
        header[0, : 1 + tensor.ndim] = torch.tensor([tensor.ndim, *tensor.shape])
        headers = hvd.allgather(header, f"{name}.shape", ranks).tolist()
        shapes = [header[1 : 1 + header[0]] for header in headers]
        values = hvd.allgather(tensor.detach().reshape(-1), name, ranks)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        parts = zip(torch.split(values, sizes), shapes, strict=True)
        return [part.reshape(shape) for part, shape in parts]


def _is_distributed() -> bool:
    return runtime.is_initialized() and runtime.size() > 1


lightning_pytorch.strategies.StrategyRegistry.register(
    "ringjax",
    RingjaxStrategy,
    description="The ranks of ringjax: ringrun, Slurm or torchrun starts them",
    override=True,
)
lightning_fabric.strategies.STRATEGY_REGISTRY.register(
    "ringjax",
    RingjaxFabricStrategy,
    description="The ranks of ringjax: ringrun, Slurm or torchrun starts them",
    override=True,
)
