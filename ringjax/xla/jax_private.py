"""What touches JAX's private or moving names: primitives, tracers, custom calls.

No other file but ``tokens.py`` may import ``jax._src``; the tests run both on the
oldest and the newest supported JAX. It knows how a call is emitted and ordered, and
nothing about what a collective means: that is ``primitive.py`` and ``collectives/``.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core
import numpy as np
from jax._src import checkify as _checkify
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import sharding_impls as _shardings
from jax._src import xla_bridge as _bridge
from jax._src.api_util import InternalFloatingPointError
from jax._src.lib import xla_client as _client  # type: ignore[attr-defined]
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir

from ringjax import runtime
from ringjax.world.world import World
from ringjax.xla import call_order, jax_distributed, placement, tokens

Zero = ad.Zero
Primitive = jax.extend.core.Primitive


# -- primitives and tracers ------------------------------------------------------------


def new_primitive(name: str) -> Any:
    """A primitive with several results that also works outside of jit.

    XLA names its instructions after it, and so do the traces of jax.profiler.
    """
    primitive = Primitive(f"ringjax.{name}")
    primitive.multiple_results = True
    primitive.def_impl(partial(_apply, primitive))
    check = partial(_checkify.nan_error_check, primitive)  # another rank's NaN, perhaps
    _checkify.error_checks[primitive] = check
    _dispatch.prim_requires_devices_during_lowering.add(primitive)
    return primitive


def _apply(primitive: Any, *values: Any, **params: Any) -> Any:
    """Runs a primitive outside of jit.

    With jax_debug_nans, JAX runs a program that has returned a NaN again, operation by
    operation, within the handler of its own exception. Other ranks may have no NaN, so
    the call has another name there: such ranks disagree, and their error says why.

    Raises:
      FloatingPointError: a call that was made again has failed.
    """
    if not isinstance(sys.exc_info()[1], InternalFloatingPointError):
        return _dispatch.apply_primitive(primitive, *values, **params)
    name = f"{params['name'] or primitive.name} again, for jax_debug_nans"
    try:
        found = _dispatch.apply_primitive(primitive, *values, **params | {"name": name})
        return jax.block_until_ready(found)
    except jax.errors.JaxRuntimeError as error:
        raise FloatingPointError(
            "a jit function has returned a NaN, and no operation in front of a "
            "collective makes one on this rank. The collective could not be made "
            f"again, so look behind it, and at what other ranks send: {error}"
        ) from None


def set_shape_rule(primitive: Any, rule: Any, *, ordered: bool) -> None:
    """Installs ``rule(*avals, **params) -> avals``; `ordered` adds the effects."""
    if ordered:
        primitive.def_effectful_abstract_eval(
            lambda *avals, **params: (rule(*avals, **params), {tokens.EFFECT})
        )
    else:
        primitive.def_abstract_eval(rule)


def set_rules(primitive: Any, *, batch: Any, jvp: Any, transpose: Any) -> None:
    """Installs the rules of `vmap` and of derivatives; None for what it has not."""
    if batch is not None:
        batching.primitive_batchers[primitive] = batch
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = partial(_apply_transpose, transpose)


_transposed_any = False  # this process has taken a derivative through a collective


def _apply_transpose(rule: Any, *values: Any, **params: Any) -> Any:
    global _transposed_any
    _transposed_any = True
    return rule(*values, **params)


def with_rows(aval: Any, rows: int) -> Any:
    """`aval` with another first dimension; its dtype and mesh axes stay."""
    return aval.update(shape=(rows, *aval.shape[1:]), weak_type=False)


def zero_tangent(value: Any) -> Any:
    """The symbolic zero tangent of `value`."""
    return Zero(jax.typeof(value).to_tangent_aval())


def zero_cotangent(linear: Any) -> Any:
    """The symbolic zero cotangent of an undefined primal."""
    return Zero(linear.aval)


def is_linear(value: Any) -> bool:
    """Whether a transpose rule is asked for the cotangent of this operand."""
    return bool(ad.is_undefined_primal(value))


def is_eager(values: Sequence[Any]) -> bool:
    """True if a collective bound now runs now, on exactly these values."""
    concrete = all(_core.is_concrete(v) for v in values)
    return concrete and not _core.unsafe_am_i_under_a_jit()


def device_count(value: Any) -> int:
    """The number of devices that hold `value`; 1 if that is not known yet."""
    concrete = _core.to_concrete_value(value)
    if isinstance(concrete, jax.Array) and not isinstance(concrete, _core.Tracer):
        return len(concrete.sharding.device_set)
    return 1


def producers(values: Sequence[Any]) -> list[int]:
    """The place of the equation that produces each traced value; -1 for an input.

    Raises:
      AttributeError, TypeError: the values are not traced together, or this jax keeps
        its equations elsewhere.
    """
    if len({id(v._trace) for v in values}) != 1:
        raise TypeError("values of several traces, or of none")
    equations = values[0]._trace.frame.tracing_eqns
    entries = [e() if callable(e) else e for e in equations]  # weak references or not
    places = {id(e): place for place, e in enumerate(entries) if e is not None}
    return [places.get(id(v.parent), -1) for v in values]


def has_collective(
    function: Any, arguments: Sequence[Any], named: Mapping[str, Any]
) -> bool | None:
    """Whether `function` has a collective; None if it cannot be traced.

    Args:
      function: is traced, with as many of `arguments` as it takes.
      arguments: by their places.
      named: of these, those that it takes by their names.
    """
    try:
        taken = list(inspect.signature(function).parameters)
        first = [n for n in taken if n not in named][: len(arguments)]
        options = {n: named[n] for n in taken if n in named}
        jaxpr = jax.make_jaxpr(lambda *args: function(*args, **options))(
            *arguments[: len(first)]
        )
    except Exception:  # whatever it raises, it will raise where it is called
        return None
    return tokens.EFFECT in jaxpr.effects


def has_transposed_collective(values: Sequence[Any]) -> bool:
    """Whether traced gradients come from a derivative through a collective.

    Then cotangents of all ranks are in them already. Not seen are gradients that come
    from another program: see `may_have_transposed_collective`.
    """
    return any(map(_is_transposed, _upstream(values)))


def may_have_transposed_collective(values: Sequence[Any]) -> bool:
    """Whether gradients that another program has computed may be such ones."""
    return _transposed_any and any(next(_upstream([v]), None) is None for v in values)


def is_computed_locally(value: Any) -> bool:
    """Whether the program that is traced computes the value without a collective.

    False for an input of the program, and for a value that is not traced.
    """
    equations = list(_upstream([value]))
    return bool(equations) and all(tokens.EFFECT not in e.effects for e in equations)


def _upstream(values: Sequence[Any]) -> Iterator[Any]:
    """The equations of this program that traced values are computed by."""
    seen: set[int] = set()
    equations = [getattr(v, "parent", None) for v in values]
    while equations:
        equation = equations.pop()
        if equation is None or id(equation) in seen:
            continue
        seen.add(id(equation))
        yield equation
        operands = getattr(equation, "in_tracers", ())
        equations += [getattr(v, "parent", None) for v in operands]


def _is_transposed(equation: Any, within: bool = False) -> bool:
    if tokens.EFFECT not in equation.effects:
        return False
    # The operations in a jax.checkpoint that is transposed do not say that they are.
    within = within or "transpose(" in str(equation.source_info.name_stack)
    if equation.primitive.name.startswith("ringjax."):
        return within
    inner = _core.jaxprs_in_params(equation.params)
    return any(_is_transposed(e, within) for jaxpr in inner for e in jaxpr.eqns)


def in_mesh() -> bool:
    """Whether this is not traced, and `jax.set_mesh` has set a mesh."""
    return _core.trace_state_clean() and not jax.sharding.get_abstract_mesh().empty


# -- lowering --------------------------------------------------------------------------


def emit(
    ctx: Any,
    program: Any,
    target: str,
    operands: Sequence[Any],
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
    *,
    aliases: Mapping[int, int],
    attributes: Mapping[str, Any],
    tie: bool = True,
    inside: bool = False,
) -> list[Any]:
    """Emits one custom call whose last operand and last result are its order value.

    The tie: XLA runs calls that share no value in any order, and ranks would disagree.
    So the order value of the previous call in the same block, whichever kind it has,
    becomes an extra operand that the handler ignores.

    Of `aliases`, operand to result, those stay out that would cost a copy, and in an
    elastic job all: a call that the loss of a rank breaks off is repeated. `program` is
    a `Program`.

    `inside`: it is lowered for a program that has been lowered already, on a thread of
    XLA's, which must remember nothing; aliases and ties are the caller's.
    """
    kept = () if inside else unaliasable(program, operands)
    operands, avals_in = list(operands), list(avals_in)
    if tie and not inside:
        for value, aval in call_order.previous_value(ctx):
            operands.append(value)
            avals_in.append(aval)
    rule = jax.ffi.ffi_lowering(
        target,
        has_side_effect=True,
        operand_output_aliases={i: o for i, o in aliases.items() if i not in kept},
        backend_config={k: _attribute(v) for k, v in attributes.items()},
    )
    local = ctx.replace(avals_in=avals_in, avals_out=list(avals_out))
    results: list[Any] = list(rule(local, *operands))
    if not inside:
        call_order.set_previous_value(ctx, results[-1], avals_out[-1])
    return results


def unaliasable(program: Any, values: Sequence[Any]) -> tuple[int, ...]:
    """The places of values whose memory a result must not have."""
    return tuple(
        i for i, v in enumerate(values) if program.elastic or _is_undonated_argument(v)
    )


def _is_undonated_argument(value: Any) -> bool:
    """True for an argument of the whole program that its caller keeps.

    XLA must not write to one that is not donated: a result that aliased it would first
    be a copy of it, one more pass over memory. Of arguments of an inner jit, of a loop
    and of the like, nobody knows here; in a training step, gradients are temporaries.
    """
    while isinstance(value.owner, stablehlo.ReshapeOp):  # the same memory
        value = value.owner.operands[0]
    block = value.owner
    if not isinstance(block, mlir.ir.Block):
        return False
    attributes: Any = block.owner.attributes
    if "sym_visibility" not in attributes:
        return False
    if attributes["sym_visibility"].value != "public":
        return False
    if "arg_attrs" not in attributes:
        return True
    marks = attributes["arg_attrs"][value.arg_number]
    return "tf.aliasing_output" not in marks and "jax.buffer_donor" not in marks


def emit_ordered(
    ctx: Any,
    program: Any,
    target: str,
    operands: Sequence[Any],
    calls: Sequence[tuple[Sequence[int], Mapping[str, Any]]],
    *,
    in_place: bool,
) -> list[Any]:
    """`emit` with JAX's token of the `CollectiveTokenEffect` as the order value.

    Args:
      calls: for each native call the places of its operands and its attributes; all
        operands in order.
      in_place: results may be in the memory of the operands.
    """
    out, token = [], ctx.tokens_in.get(tokens.EFFECT)
    for cut, attributes in calls:
        *results, token = emit(
            ctx,
            program,
            target,
            [*(operands[i] for i in cut), token],
            [*(ctx.avals_in[i] for i in cut), tokens.ABSTRACT],
            [*(ctx.avals_out[i] for i in cut), tokens.ABSTRACT],
            aliases={i: i for i in range(len(cut))} if in_place else {},
            attributes=attributes,
        )
        out += results
    call_order.set_token(ctx, token)
    return out


def lower_function(
    ctx: Any,
    function: Any,
    operands: Sequence[Any],
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
) -> list[Any]:
    """Emits what ``function(*operands)`` traces to, which has no effects."""
    local = ctx.replace(
        avals_in=list(avals_in),
        avals_out=list(avals_out),
        tokens_in=mlir.TokenSet(),
        tokens_out=None,
    )
    traced = mlir.lower_fun(lambda *xs: list(function(*xs)), multiple_results=True)
    return list(traced(local, *operands))


@contextlib.contextmanager
def named_axes(mesh: Any) -> Iterator[None]:
    """What `lower_function` traces inside may name the axes of `mesh`."""
    with _core.extend_axis_env_nd(mesh.shape.items()):
        yield


def tiled_sharding(devices: Sequence[Any], assignment: np.ndarray) -> Any:
    """A sharding that cuts a tensor into tiles, one for each device.

    Args:
      devices: those of the program, in its order.
      assignment: for each tile, by its place in the tensor, the place of its device.
    """
    tiles = np.ascontiguousarray(assignment, np.int64)
    hlo = _client.HloSharding.subgroup_with_device_ordering(tiles)
    return _shardings.GSPMDSharding(tuple(devices), hlo)


def without_mesh(aval: Any) -> Any:
    """`aval` without what JAX knows about a mesh."""
    return jax.core.ShapedArray(aval.shape, aval.dtype)


def varying_axes(aval: Any) -> frozenset[str] | None:
    """The axes of the mesh over which a value in shard_map differs, if known."""
    kind = getattr(aval, "mat", aval)
    return getattr(kind, "varying", getattr(kind, "vma", None))


def checks_varying() -> bool:
    """Whether the shard_map that is being lowered knows what varies (check_vma).

    Without, JAX says of every value that it varies over nothing.
    """
    return bool(_config._check_vma.value)


def increment(value: Any, aval: Any) -> Any:
    """Emits the addition of 1 to an integer array that is being lowered."""
    return stablehlo.add(value, mlir.ir_constant(np.ones(aval.shape, aval.dtype)))


def _attribute(value: Any) -> Any:
    if isinstance(value, tuple):
        return mlir.ir.DenseI64ArrayAttr.get(list(value))
    if isinstance(value, bool | int):
        return mlir.ir_attribute(np.int64(value))
    if isinstance(value, float):
        return mlir.ir_attribute(np.float64(value))
    return mlir.ir_attribute(value)


# -- failure and exit ------------------------------------------------------------------


def _wait_for_programs() -> None:
    """Lets dispatched programs finish before the links under them are closed."""
    call_order.release_module()
    if not _bridge.backends_are_initialized():
        return  # nothing ever ran, or JAX's own exit came first
    waits = [
        tokens.wait_for_programs,
        *(a.block_until_ready for a in jax.live_arrays()),
    ]
    for wait in waits:
        # A failure is reported where the result is used, if anywhere.
        with contextlib.suppress(Exception):
            wait()


_rank_and_size: tuple[int, int] | None = None


def _clear_stale_programs() -> None:
    """After a restart in another place: shapes that hold rank or size are stale."""
    global _rank_and_size
    place = (runtime.rank(), runtime.size())
    if _rank_and_size not in (None, place):
        jax.clear_caches()
    _rank_and_size = place


def _init_arguments() -> tuple[World, bool]:
    """The world, and whether JAX's backends have been started already."""
    return runtime.current("init"), _bridge.backends_are_initialized()


# First: once JAX has looked for its devices, it is too late.
runtime.on_init(
    lambda: jax_distributed.initialize_group(
        *_init_arguments(), place=runtime.group_rank()
    )
)
runtime.on_init(_clear_stale_programs)
runtime.on_shutdown(_wait_for_programs)
# Last: it may raise.
runtime.on_init(lambda: placement.open_devices(*_init_arguments()))
