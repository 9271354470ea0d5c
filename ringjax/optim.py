"""`allreduce_grads`: the optax transformation that makes an optimizer data-parallel.

This module decides at trace time which gradients are sent together, in which order, and
whether communication overlaps with the backward pass. `xla/gradient_allreduce.py`
implements the collective, and `xla/buckets.py` assigns gradients to buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ringjax import runtime, stderr
from ringjax.collectives import allreduce, arguments
from ringjax.collectives.arguments import is_float0
from ringjax.compression import Compression, WireDtype
from ringjax.config import Config
from ringjax.ops import ReduceOp
from ringjax.tuning import trials
from ringjax.xla import (
    buckets,
    gradient_allreduce,
    jax_private,
    parameter_check,
    weights,
)

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from ringjax._native import Communicator

PyTree = Any
"""A tree of arrays: any nesting of containers that JAX knows."""

_FUNCTION = "allreduce_grads"  # the name in error messages
# Functions that optimizers call: (name of the argument, values that the optimizer
# passes after the parameters, an example that is correct on several ranks).
_CALLBACKS: tuple[tuple[str, tuple[int, ...], str], ...] = (
    ("value_fn", (), "lambda p: ringjax.allreduce(loss(ringjax.allreduce(p)))"),
    ("grad_fn", (0,), "lambda p, _: ringjax.allreduce(jax.grad(loss)(p))"),
)
_USE_WEIGHTED_LOSS = (
    f"ringjax.{_FUNCTION}: `weight` would weigh gradients of a loss that has a "
    "collective in it (a batch norm over ranks, a contrastive loss): cotangents of "
    "all ranks are in them already, unweighed. Weigh the loss, and leave out `weight`: "
    "jax.grad(lambda p: ringjax.weighted_loss(loss(p), n))"
)
_warned = False  # True if this process has printed _USE_WEIGHTED_LOSS as a warning


class AllreduceState(NamedTuple):
    """State of the transformation `allreduce_grads`.

    Attributes:
        seq: uint32[1], the number of the next update. Consecutive updates depend on
            each other through `seq`, which keeps their collectives in order. On CPUs,
            `seq` is also compared between ranks: if optimizer states come from
            different steps, every rank raises an error, and no gradients are averaged.
    """

    seq: jax.Array


def allreduce_grads(
    op: ReduceOp | int = ReduceOp.Average,
    *,
    compression: WireDtype = Compression.none,
    bucket_bytes: int | None = None,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    gradient_predivide_factor: float = 1.0,
    overlap: bool | Literal["auto"] = "auto",
    name: str = "grads",
) -> optax.GradientTransformationExtraArgs:
    """Replaces the gradients of each rank by their average over all ranks.

    With gradients ``g_0, …, g_{P-1}`` on P ranks, each rank continues with
    ``(g_0 + … + g_{P-1}) / P``. Put `allreduce_grads` in front of every
    transformation that is not linear in the gradients, such as
    `optax.clip_by_global_norm` or `optax.adam`, so that these see the global gradient.

    The transformation works on any tree, for example parameters of flax linen, states
    of flax nnx and plain trees, and inside `optax.chain`, `optax.masked`,
    `optax.MultiSteps`, `optax.multi_transform` and `optax.inject_hyperparams`.

    Args:
        op: how gradients are reduced: ``Average``, ``Sum``, ``Min``, ``Max``,
            ``Product`` or ``Adasum``. Adasum needs CPUs and a power of two of ranks,
            and weights every gradient separately. See `ringjax.allreduce`.
        compression: the dtype in which float32 and float64 gradients are sent.
            `Compression.fp16` and `Compression.bf16` halve the bytes of float32.
        bucket_bytes: the largest size of a bucket, in bytes. A bucket is the set of
            gradients that are sent together if `overlap` is in effect; a larger
            gradient is a bucket of its own. None means the value of
            RINGJAX_BUCKET_BYTES.
        process_set: the ranks that take part. This rank must be one of them. In a job
            of process groups (``ringrun --group-size``) the default means
            `ringjax.replica_set()`.
        gradient_predivide_factor: a positive number by which gradients are divided
            before the sum and by which the average is multiplied afterwards. This
            prevents overflow of 16-bit gradients. It needs ``op=Average``.
        overlap: whether communication overlaps with the backward pass.

            * False: all gradients are reduced in place after the backward pass, by one
              call (on CPUs, by one call per 512 gradients).
            * True: each bucket is sent as soon as its gradients have been computed.
              On CPUs, this costs a copy of the gradients that are in flight.
            * "auto": True on CUDA devices. On CPUs, True if the ranks span several
              hosts. An elastic job keeps the decision that it began with.

            See the notes for the cases in which `overlap` has no effect.
        name: stands for the gradients in error messages.

    Returns:
        A `GradientTransformationExtraArgs` with an `AllreduceState`.

        The ``update`` function accepts an optional keyword argument ``weight``, a
        non-negative scalar that may be traced: the number of samples of which this
        rank's gradients are the mean. The result is then ``Σ n·g / Σ n``, the mean over
        all samples. Either all ranks pass a weight, or no rank does. The gradients of a
        rank with weight 0 are ignored, even if they are NaN; if all weights are 0, the
        result is 0. ``weight`` needs ``op=Average`` and gradients of a floating or
        complex dtype.

        The ``update`` function raises `NotInitialized` before `ringjax.init()`, and
        `TypeError` or `ValueError` if a gradient has a dtype that cannot be sent. These
        errors are raised before anything is sent. If other ranks fail or disagree, a
        compiled update raises an exception of JAX when its result is used; see
        `ringjax.errors.translated`.

    Raises:
        TypeError: an argument has a wrong type, or `op` is traced.
        ValueError: an argument has a value that is not allowed.

    Examples:
        With one rank, the average is the gradient of this rank.

        >>> import jax.numpy as jnp, optax, ringjax
        >>> ringjax.init()
        >>> tx = optax.chain(ringjax.allreduce_grads(), optax.sgd(0.5))
        >>> params = {"w": jnp.ones(2)}
        >>> state = tx.init(params)
        >>> grads = {"w": jnp.full(2, 4.0)}
        >>> updates, state = tx.update(grads, state, params)
        >>> updates["w"].tolist()
        [-2.0, -2.0]
        >>> state[0].seq.tolist()
        [1]

        If ranks have different numbers of samples, pass this rank's number:

        >>> tx = ringjax.allreduce_grads()
        >>> mean, _ = tx.update(grads, tx.init(params), weight=3)
        >>> mean["w"].tolist()
        [4.0, 4.0]

    Notes:
        *Leaves that are not sent.* None, masked nodes and leaves of dtype float0 pass
        through unchanged. If a tree has no other leaves, nothing is sent and ``seq``
        stays as it is.

        *Check of the parameters.* If ``update`` receives ``params``, every
        RINGJAX_CHECK_PARAMETERS-th update on CPUs compares a hash of the parameters
        between ranks, and prints a warning if they differ. It also compares ``value=``
        and ``grad=``, which the optimizers after this transformation receive unchanged:
        pass ``value=ringjax.allreduce(loss)``. On CUDA devices nothing is compared;
        there the compilation prints a warning if the program computes ``value`` or
        ``grad`` without a collective. A ``value_fn=`` or ``grad_fn=`` without a
        collective is a ValueError, whose text shows a function that is right.

        *Weights.* The product ``weight * gradient`` must not overflow: with float16
        gradients pass shares of the batch instead of sample counts. `optax.MultiSteps`
        passes on only the weight of its last micro-batch. If the weights of its
        micro-batches differ, accumulate ``weight * gradient`` and ``weight`` yourself.
        If the loss has a collective in it, use `weighted_loss` instead of ``weight``.

        *Overlap.* With several CUDA devices in a process, all gradients are always in
        one call. An elastic job holds each gradient in flight twice, so that all
        gradients of a step are averaged over the same ranks; if the copies would exceed
        RINGJAX_ELASTIC_OVERLAP_MEMORY, all gradients go in one call. In an elastic job
        of process groups, all gradients go in one call, and ``overlap=True`` is an
        error. The choice is compiled into the program. On CUDA devices
        RINGJAX_COMM_STREAM=0 runs the same program without overlap.

        *optax.inject_hyperparams.* If `allreduce_grads` itself is the inner factory,
        pass ``static_args=("op", "gradient_predivide_factor")``, because both are
        compiled into the program.

    References:
        A. Sergeev, M. Del Balso, Horovod: fast and easy distributed deep learning in
        TensorFlow, 2018, arXiv:1802.05799 (averaged gradients).

        S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel
        Training, VLDB 2020, arXiv:2006.15704 (buckets, overlap).

        S. Maleki et al., Scaling Distributed Training with Adaptive Summation, MLSys
        2021, arXiv:2006.02924 (Adasum).
    """
    prescale, postscale = _scale_factors(op, gradient_predivide_factor)
    wire = arguments.wire_dtype(_FUNCTION, compression, op)
    _check_bucketing(overlap, bucket_bytes)

    def init(params: PyTree) -> AllreduceState:
        del params
        return AllreduceState(seq=jnp.zeros((1,), jnp.uint32))

    def update(
        updates: PyTree,
        state: AllreduceState,
        params: PyTree = None,
        *,
        weight: ArrayLike | None = None,
        **extra: Any,
    ) -> tuple[PyTree, AllreduceState]:
        chosen, communicator, with_hosts = _resolve(process_set)
        config = runtime.config()
        if communicator.size > 1:
            _refuse_local_callbacks(params, extra)
        sent = arguments.flatten(_FUNCTION, updates, elementwise=True)
        if not sent.arrays:
            return updates, state
        arguments.reduce_op(_FUNCTION, op, sent.arrays, adasum_ranks=communicator.size)
        order = readiness_order(
            [x for x in jax.tree.leaves(updates) if not is_float0(x)]
        )
        arrays, names = sent.arrays, sent.names
        if weight is not None:
            own = weights.check_weight(
                _FUNCTION, weight, op, arrays, compressed=wire >= 0
            )
            if communicator.size > 1:
                _check_weighted_loss(arrays, communicator.rank)
            # One call sums the weights and the gradients, so that both sums are over
            # the same ranks even if a rank is lost. The weight is known before the
            # backward pass, so put its index first into `order`.
            arrays, names = weights.weight_arrays(arrays, own), (*names, "weight")
            order = order and [len(order), *order]
        seq = _check_parameters(
            updates,
            params,
            extra,
            state.seq,
            process_set=chosen,
            communicator=communicator,
            config=config,
            name=name,
        )
        # A setting of 0 means one gradient per bucket, which a limit of one byte
        # achieves.
        setting = trials.active_setting() or config
        limit = bucket_bytes or setting.bucket_bytes or 1
        out, seq = gradient_allreduce.bucketed_allreduce(
            arrays,
            seq,
            op=int(op if weight is None else ReduceOp.Sum),
            wire=wire,
            prescale=prescale,
            postscale=postscale,
            comm=communicator.id,
            timeout=chosen.limit(),
            cuts=buckets.plan([(x.shape, x.dtype) for x in arrays], limit, order),
            overlapped=should_overlap(overlap, with_hosts, config),
            overlapped_on_device=should_overlap(overlap, None, config),
            memory=setting.overlap_memory,
            elastic_memory=config.elastic_overlap_memory if config.elastic else None,
            name=name if weight is None else f"{name} with weights",
            names=names,
        )
        out = out if weight is None else weights.divide_by_total(out)
        return sent.rebuild(out), AllreduceState(seq)

    return optax.GradientTransformationExtraArgs(init, update)


def weighted_loss(
    loss: ArrayLike,
    weight: ArrayLike,
    *,
    process_set: runtime.ProcessSet = runtime.global_process_set,
) -> jax.Array:
    """Scales this rank's loss so that the average over ranks is the mean over samples.

    With P ranks, the result is ``P·w·loss / Σ w``. Pass its gradients to
    `allreduce_grads()` without a `weight`. Unlike a `weight`, this is also right for a
    loss with a collective in it (a batch norm over ranks, a contrastive loss). The
    cotangents of such a loss cross the ranks before the gradients could be weighted.

    Args:
        loss: the mean over this rank's samples, a floating-point scalar.
        weight: the number of this rank's samples, a number from 0 that may be traced.
            If it is 0, the result is 0 even if `loss` is NaN. But a derivative of
            `loss` that is NaN stays NaN: in a mean over n, divide by
            ``jnp.maximum(n, 1)``.
        process_set: the ranks that take part.

    Returns:
        A scalar of the dtype of `loss`; 0 if the weights of all ranks are 0.

    Example:
        >>> import jax, jax.numpy as jnp, ringjax
        >>> ringjax.init()
        >>> x = jnp.arange(4.0)
        >>> loss = lambda p: ringjax.weighted_loss(jnp.mean(p * x), len(x))
        >>> gradient = jax.grad(loss)(2.0)  # argument of allreduce_grads().update
        >>> float(gradient)
        1.5
    """
    loss = jnp.asarray(loss)
    if loss.ndim or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"ringjax.weighted_loss: `loss` is {loss.dtype.name}{list(loss.shape)}, "
            "expected one floating-point number"
        )
    own = weights.check_weight(
        "weighted_loss", weight, ReduceOp.Average, [loss], compressed=False
    )
    own = jax.lax.stop_gradient(own)
    mean = allreduce(own, process_set=process_set, name="weight of the loss")
    share = jnp.where(own > 0, own / jnp.where(own > 0, mean, 1), 0)
    # 0 * loss would be NaN if the loss of a rank without samples is NaN.
    return jnp.where(own > 0, loss * share.astype(loss.dtype), 0)


def _refuse_local_callbacks(params: PyTree, extra: Mapping[str, Any]) -> None:
    """Refuses a loss or gradient function that computes on the data of this rank only.

    A line search or SAM calls such a function at other parameters. All ranks make the
    same decision only if the function itself reduces over the ranks.
    """
    for key, given, remedy in _CALLBACKS:
        function = extra.get(key)
        if not callable(function) or params is None:
            continue
        if jax_private.has_collective(function, (params, *given), extra) is False:
            raise ValueError(
                f"ringjax.{_FUNCTION}: `{key}` computes on the data of this rank "
                f"alone, so the ranks would part; give {key}={remedy}, and likewise "
                "`value` and `grad`"
            )


def _check_weighted_loss(arrays: Sequence[jax.Array], rank: int) -> None:
    """Refuses a weight for gradients of a loss that has a collective in it.

    If another program has computed the gradients, ringjax only knows whether this
    process has ever computed a derivative through a collective. In that case rank 0
    prints a warning.
    """
    global _warned
    if jax_private.has_transposed_collective(arrays):
        raise ValueError(_USE_WEIGHTED_LOSS)
    if jax_private.may_have_transposed_collective(arrays) and not _warned:
        _warned = True
        if rank == 0:
            why = "another program has computed these gradients; if its loss has one, "
            stderr.line(f"[ringjax] warning: {why}{_USE_WEIGHTED_LOSS}")


def _check_parameters(
    updates: PyTree,
    params: PyTree,
    extra: Mapping[str, Any],
    seq: jax.Array,
    *,
    process_set: runtime.ProcessSet,
    communicator: Communicator,
    config: Config,
    name: str,
) -> jax.Array:
    """Adds a periodic comparison of parameters before the gradients are reduced.

    The check compares the parameters whose gradients are sent, and the arguments
    `value` and `grad` of the update: the optimizers after this transformation decide by
    them, so local values would make the ranks decide differently. Returns `seq`, which
    depends on the comparison.
    """
    compared: dict[str, object] = {}
    own: list[str] = []
    treedef: Any
    pairs, treedef = jax.tree_util.tree_flatten_with_path(params)
    if treedef == jax.tree.structure(updates):
        for (path, leaf), update in zip(pairs, jax.tree.leaves(updates), strict=True):
            if not is_float0(update):
                compared[jax.tree_util.keystr(path, simple=True, separator="/")] = leaf
    for key in ("value", "grad"):
        if extra.get(key) is not None:
            for path, leaf in jax.tree_util.tree_leaves_with_path(extra[key]):
                where = jax.tree_util.keystr(path, simple=True, separator="/")
                title = f"{key} {where}".rstrip()
                remedy = f"give {key}=ringjax.allreduce({key}) to update"
                compared[f"{title} ({remedy})"] = jnp.asarray(leaf)
                if communicator.size > 1 and jax_private.is_computed_locally(leaf):
                    own.append(f"{title} ({remedy})")
    if not config.check_parameters or not compared:
        return seq
    return parameter_check.check(
        seq,
        list(compared.values()),
        list(compared),
        comm=communicator.id,
        every=config.check_parameters,
        name=f"the check of the parameters of {name}",
        timeout=process_set.limit(),
        own=own,
    )


def readiness_order(values: Sequence[object]) -> list[int] | None:
    """Sorts gradients by when the backward pass computes them.

    JAX traces the backward pass in the order in which it will run, so the position of
    the equation that produces a gradient is its readiness. The order of the flattened
    tree says nothing about readiness: flax sorts ``layer_10`` before ``layer_2``.

    Returns the indices of `values`. Returns None if the order is not known: the values
    are not traced, one equation produces all of them, or this version of JAX does not
    expose its equations.
    """
    try:
        produced = jax_private.producers(values)
    except (AttributeError, TypeError):
        return None
    if len(set(produced)) < 2:
        return None
    # Gradients of one equation (a scan, an inner jit) have one position. The backward
    # pass inside of the equation ends with the first layer, so reverse their order.
    return sorted(range(len(values)), key=lambda i: (produced[i], -i))


def _scale_factors(op: object, factor: float) -> tuple[float, float]:
    """Checks `op` and `factor`. Returns the factors before and after the reduction.

    The division by the number of ranks is not among them: the native core divides by
    the size at run time.
    """
    if isinstance(op, jax.core.Tracer):
        raise TypeError(
            f"ringjax.{_FUNCTION}: `op` is traced, but it is part of the program; with "
            "optax.inject_hyperparams pass "
            'static_args=("op", "gradient_predivide_factor")'
        )
    # `update` checks the number of ranks, which is not known before `init`.
    chosen = arguments.reduce_op(_FUNCTION, op, [], adasum_ranks=1)
    number = arguments.factor(_FUNCTION, "gradient_predivide_factor", factor, [])
    if not 0.0 < number < float("inf"):
        raise ValueError(
            f"ringjax.{_FUNCTION}: `gradient_predivide_factor` is {number}, expected a "
            "positive finite number"
        )
    if number != 1.0 and chosen is not ReduceOp.Average:
        raise ValueError(
            f"ringjax.{_FUNCTION}: `gradient_predivide_factor` is {number}, which "
            f"needs op=Average, not {chosen.name}"
        )
    return 1.0 / number, number


def _check_bucketing(overlap: object, bucket_bytes: int | None) -> None:
    if overlap not in (True, False, "auto"):
        raise ValueError(
            f"ringjax.{_FUNCTION}: `overlap` is {overlap!r}, expected True, False or "
            "'auto'"
        )
    if bucket_bytes is not None and bucket_bytes < 1:
        raise ValueError(
            f"ringjax.{_FUNCTION}: `bucket_bytes` is {bucket_bytes}, expected at least "
            "1"
        )


def _resolve(
    process_set: runtime.ProcessSet,
) -> tuple[runtime.ProcessSet, Communicator, Communicator]:
    """Resolves the argument `process_set`.

    Returns the set, which is the replica set in place of all ranks of a job of groups;
    its communicator; and the communicator whose hosts decide about overlap. In a job of
    groups, the latter is the world: all processes of a group must compile one program,
    but their replica sets may span different hosts.
    """
    chosen = runtime.between_groups(process_set)
    communicator = runtime.communicator(chosen, _FUNCTION)
    grouped = runtime.group_size() > 1
    return chosen, communicator, runtime.communicator() if grouped else communicator


def should_overlap(
    overlap: bool | Literal["auto"],
    communicator: Communicator | None,
    config: Config,
) -> bool:
    """Decides whether buckets are sent during the backward pass.

    "auto" means no overlap if all ranks share a host: there the memory bus limits both
    computation and communication, so overlap gains no time. An elastic job uses the
    hosts with which it began: later the hosts may change, but the programs of all
    ranks, including ranks that join, must make the same calls. `communicator` is that
    of the participating ranks for a program on CPUs, and None on CUDA devices.
    """
    if config.elastic and config.group_size > 1:
        if overlap is True:
            raise ValueError(
                f"ringjax.{_FUNCTION}: `overlap` is True, but in an elastic job of "
                "groups the gradients of a step travel in one call"
            )
        return False
    if overlap != "auto":
        return overlap
    setting = trials.active_setting()
    if setting is not None and setting.overlap is not None:
        return setting.overlap
    if communicator is None:
        return True
    if config.elastic:
        return config.spread
    return len(set(communicator.hosts)) > 1
