"""The one line that makes an optimizer data-parallel: `allreduce_grads` for optax.

Decides at trace time what travels when (readiness, buckets, in place or overlapped).
The call is `xla/gradient_allreduce.py`, the plan of buckets `xla/buckets.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

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

_FUNCTION = "allreduce_grads"
# Functions that optimizers call: the name of the argument, the values that optimizers
# pass behind the parameters, and a function that is right on several ranks.
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
_warned = False  # whether this process has printed that gradients may be of such a loss


class AllreduceState(NamedTuple):
    """What `allreduce_grads` remembers between two steps.

    Attributes:
      seq: uint32[1], the number of the next step. It orders the steps and travels with
        the data: ranks whose optimizer states are at different steps find out.
    """

    seq: jax.Array


def allreduce_grads(
    op: Any = ReduceOp.Average,
    *,
    compression: WireDtype = Compression.none,
    bucket_bytes: int | None = None,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    gradient_predivide_factor: float = 1.0,
    overlap: bool | Literal["auto"] = "auto",
    name: str = "grads",
) -> optax.GradientTransformationExtraArgs:
    """Replaces the gradients of this rank by their average over all ranks.

    Goes in front of everything that is not linear in the gradients (clipping, adam, …).
    Works in optax.chain, masked, MultiSteps, multi_transform and inject_hyperparams, on
    any tree: flax linen parameters, flax nnx states, plain trees.

    Args:
      op: Average, Sum, Min, Max, Product or Adasum (as `ringjax.allreduce` describes
        it: CPUs, a power of two of ranks; every gradient is weighed by itself).
      compression: Compression.fp16 or .bf16 halves the bytes of float32 gradients.
      bucket_bytes: how much travels at once when overlapped; None: as
        RINGJAX_BUCKET_BYTES says.
      process_set: the ranks that take part; this rank must be one of them. In a job of
        groups (ringrun --group-size) all of them means `ringjax.replica_set()`.
      gradient_predivide_factor: divides the gradients before the sum and multiplies the
        average by it afterwards, against overflow. With op=Average only.
      overlap: False: all gradients in one call that works in place. True: every bucket
        starts when its gradients exist and runs beside the rest of the backward pass.
        "auto": overlapped on CUDA devices; on CPUs in place where all ranks share
        one host, or did when an elastic job began, overlapped otherwise. Part of the
        program; RINGJAX_COMM_STREAM=0 lets the same program run on CUDA devices with
        one stream, hence in turns. Over several CUDA devices all gradients are in one
        call in any case. In an elastic job the gradients on their way are
        kept twice, so that all of a step are averaged over the same ranks; if that
        exceeds RINGJAX_ELASTIC_OVERLAP_MEMORY, they go in one call.
      name: stands for the gradients in error messages.

    Returns:
      A transformation whose state is an `AllreduceState`. Its update raises
      NotInitialized before ringjax.init(), TypeError or ValueError for gradients that
      cannot be sent; nothing was sent then. Leaves without a value (None, masked nodes)
      and float0 leaves pass through; a tree without others is not sent, `seq` stays.

      If it is given `params`, it now and then looks whether all ranks have the same
      ones, and warns if not (RINGJAX_CHECK_PARAMETERS; on CPUs). So it does of
      `value=` and `grad=`, which optimizers behind it get as they are: give
      ``value=ringjax.allreduce(loss)``. On CUDA devices nothing is compared: there it
      warns, when it is compiled, if the program itself computes `value` or `grad`
      without a collective. A `value_fn=` or `grad_fn=` without a
      collective is a ValueError that says how to write it.

      ``tx.update(grads, state, params, weight=n)`` weighs the averages: this rank's
      gradients are the mean over its `n` samples, and the result is ``Σ n·g / Σ n``,
      the mean over all samples, however they are spread. All ranks give a `weight`, a
      number from 0 that may be traced. A rank whose weight is 0 has no say, whatever
      its gradients are; if all are, the result is 0. ``n·g`` must not overflow: with
      float16 gradients, give shares of a batch. Needs op=Average. MultiSteps hands on
      the last weight only: if weights differ between its micro-batches, add up ``n·g``
      and `n` yourself. If the loss has a collective in it, use `weighted_loss`.

    Raises:
      TypeError, ValueError: a bad argument.

    Example:
      >>> import optax, ringjax
      >>> ringjax.init()
      >>> tx = optax.chain(ringjax.allreduce_grads(), optax.adam(1e-3))

    As the inner factory itself of optax.inject_hyperparams it needs
    ``static_args=("op", "gradient_predivide_factor")``: both are part of the program.
    """
    prescale, postscale = _scale_factors(op, gradient_predivide_factor)
    wire = arguments.wire_dtype(_FUNCTION, compression, op)
    _check_bucketing(overlap, bucket_bytes)

    def init(params: Any) -> AllreduceState:
        del params
        return AllreduceState(seq=jnp.zeros((1,), jnp.uint32))

    def update(
        updates: Any,
        state: AllreduceState,
        params: Any = None,
        *,
        weight: Any = None,
        **extra: Any,
    ) -> tuple[Any, AllreduceState]:
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
            # The sum of the weights travels with the gradients, and is there first.
            arrays, names = weights.weight_arrays(arrays, own), (*names, "weight")
            order = order and [len(order), *order]
        seq = _check_parameters(
            *(updates, params, extra, state.seq, chosen, communicator, config, name)
        )
        # Of 0 bytes: no two gradients travel together.
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
    loss: Any,
    weight: Any,
    *,
    process_set: runtime.ProcessSet = runtime.global_process_set,
) -> Any:
    """This rank's loss, so that the ranks' average is the mean over all samples.

    It is ``P·w·loss / Σ w`` for P ranks. Its gradients go through `allreduce_grads()`
    without a `weight`, and they are right also where the loss has a collective in it (a
    batch norm over ranks, a contrastive loss), whose cotangents cross the ranks before
    gradients could be weighed.

    Args:
      loss: the mean over this rank's samples, a floating-point scalar.
      weight: how many samples that are, a number from 0 that may be traced. If it is 0,
        the result is 0, also for a loss that is NaN. A derivative of the loss that is
        NaN stays one, though: divide by ``jnp.maximum(n, 1)`` in a mean over n.
      process_set: the ranks that take part.

    Returns:
      A scalar of the dtype of `loss`; 0 if no rank has a weight.

    Example:
      >>> import jax, jax.numpy as jnp, ringjax
      >>> ringjax.init()
      >>> x = jnp.arange(4.0)
      >>> loss = lambda p: ringjax.weighted_loss(jnp.mean(p * x), len(x))
      >>> gradient = jax.grad(loss)(2.0)  # for allreduce_grads().update
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
    # Not 0 * loss: of a rank without samples it may be NaN.
    return jnp.where(own > 0, loss * share.astype(loss.dtype), 0)


def _refuse_local_callbacks(params: Any, extra: Mapping[str, Any]) -> None:
    """Refuses a loss or gradient that an optimizer would call on this rank's data.

    A line search or SAM calls it at other parameters, so what it decides is alike on
    all ranks only if the function reduces over the ranks itself.
    """
    for key, given, remedy in _CALLBACKS:
        function = extra.get(key)
        known = callable(function) and params is not None
        if (
            known
            and jax_private.has_collective(function, (params, *given), extra) is False
        ):
            raise ValueError(
                f"ringjax.{_FUNCTION}: `{key}` computes on the data of this rank "
                f"alone, so the ranks would part; give {key}={remedy}, and likewise "
                "`value` and `grad`"
            )


def _check_weighted_loss(arrays: Sequence[Any], rank: int) -> None:
    """Refuses weights behind a derivative through a collective, or warns of them.

    Of gradients that another program has computed, only so much is known: whether this
    process has taken such a derivative at all.
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
    updates: Any,
    params: Any,
    extra: Mapping[str, Any],
    seq: Any,
    process_set: runtime.ProcessSet,
    communicator: Any,
    config: Config,
    name: str,
) -> Any:
    """Returns `seq`, behind a look at what is to be alike on all ranks.

    That is the parameters whose gradients are sent, and what optimizers behind this one
    get beside the gradients: they would decide by the loss of their rank.
    """
    compared: dict[str, Any] = {}
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


def readiness_order(values: Sequence[Any]) -> list[int] | None:
    """The indices of traced `values`, first computed first; None if that is not known.

    The order of the equations that are being traced is the order of the backward pass.
    Plain flatten order is no guide: flax sorts ``layer_10`` before ``layer_2``.
    """
    try:
        produced = jax_private.producers(values)
    except (AttributeError, TypeError):  # another jax, or values that are not traced
        return None
    if len(set(produced)) < 2:
        return None
    # Among equals (a scan, an inner jit) the backward pass still ends at layer 0.
    return sorted(range(len(values)), key=lambda i: (produced[i], -i))


def _scale_factors(op: Any, factor: float) -> tuple[float, float]:
    """Factors before and after the reduction; the division by the size is native."""
    if isinstance(op, jax.core.Tracer):
        raise TypeError(
            f"ringjax.{_FUNCTION}: `op` is traced, but it is part of the program; with "
            "optax.inject_hyperparams pass "
            'static_args=("op", "gradient_predivide_factor")'
        )
    # Of how many ranks is not known yet: one can do everything.
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


def _check_bucketing(overlap: Any, bucket_bytes: int | None) -> None:
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


def _resolve(process_set: runtime.ProcessSet) -> tuple[runtime.ProcessSet, Any, Any]:
    """The ranks with the same shards, where all ranks are meant; their communicator.

    And that of whose hosts it is to be asked: the programs of a group must be the same.
    """
    chosen = runtime.between_groups(process_set)
    communicator = runtime.communicator(chosen, _FUNCTION)
    grouped = runtime.group_size() > 1
    return chosen, communicator, runtime.communicator() if grouped else communicator


def should_overlap(
    overlap: bool | Literal["auto"], communicator: Any, config: Config
) -> bool:
    """Whether the buckets of a program travel beside its backward pass.

    On one host there is no wire to hide, the memory bus is the limit. In an elastic job
    hosts come and go, and all programs must be the same: what counts is its beginning.

    Args:
      communicator: of the ranks that take part, for CPUs; None: on CUDA devices.
      config: the settings in force.
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
