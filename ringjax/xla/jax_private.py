"""Wraps JAX's private names, which change between versions of JAX.

Only this file, `jax_client.py` and `tokens.py` may import ``jax._src``. The tests run
them with the oldest and the newest supported JAX. This module emits and orders calls;
`primitive.py` and `collectives/` define what each collective means.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from jax.sharding import Mesh, Sharding

from ringjax import runtime
from ringjax.world.world import World
from ringjax.xla import call_order, jax_distributed, placement, tokens
from ringjax.xla.jax_types import (
    Aval,
    Context,
    IrValue,
    Primitive,
    Rule,
    Traced,
)
from ringjax.xla.program import Program

AnyAval = jax.core.AbstractValue  # the abstract value of an array or a token

Zero = ad.Zero


# -- primitives and tracers ------------------------------------------------------------


def new_primitive(name: str) -> Primitive:
    """Returns a primitive with several results that also works outside of jit.

    XLA and jax.profiler show operations of the primitive as ``ringjax.<name>``.
    """
    primitive = jax.extend.core.Primitive(f"ringjax.{name}")
    primitive.multiple_results = True
    primitive.def_impl(partial(_apply, primitive))
    # Make checkify check the results, which may contain NaNs of other ranks.
    check = partial(_checkify.nan_error_check, primitive)
    _checkify.error_checks[primitive] = check
    _dispatch.prim_requires_devices_during_lowering.add(primitive)
    return primitive


def _apply(primitive: Primitive, *values: Traced, **params: Any) -> Any:
    """Runs a primitive outside of jit.

    With jax_debug_nans, JAX runs a program that has returned a NaN again, operation by
    operation, inside the handler of its own exception. Other ranks may have no NaN, and
    then do not repeat the call. So the repeated call has another name, which causes a
    mismatch between the ranks, with an error that mentions jax_debug_nans.
    """
    if not isinstance(sys.exc_info()[1], InternalFloatingPointError):
        return _dispatch.apply_primitive(primitive, *values, **params)
    name = f"{params['name'] or primitive.name} again, for jax_debug_nans"
    try:
        results = _dispatch.apply_primitive(
            primitive, *values, **params | {"name": name}
        )
        return jax.block_until_ready(results)
    except jax.errors.JaxRuntimeError as error:
        raise FloatingPointError(
            "a jit function has returned a NaN, and no operation in front of a "
            "collective makes one on this rank. The collective could not be made "
            f"again, so look behind it, and at what other ranks send: {error}"
        ) from None


def set_shape_rule(
    primitive: Primitive, rule: Callable[..., Sequence[Aval]], *, ordered: bool
) -> None:
    """Sets the shape rule of a primitive, ``(*avals, **params) -> avals of results``.

    If `ordered` is true, the primitive has the ordered effect, so that JAX keeps its
    calls in the order of the program.
    """
    if ordered:
        primitive.def_effectful_abstract_eval(
            lambda *avals, **params: (rule(*avals, **params), {tokens.EFFECT})
        )
    else:
        primitive.def_abstract_eval(rule)


def set_rules(
    primitive: Primitive,
    *,
    batch: Rule | None,
    jvp: Rule | None,
    transpose: Rule | None,
) -> None:
    """Sets the rules of a primitive for vmap and derivatives. Pass None for no rule."""
    if batch is not None:
        batching.primitive_batchers[primitive] = batch
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = partial(_apply_transpose, transpose)


_has_transposed = False  # this process has taken a derivative through a collective


def _apply_transpose(rule: Rule, *values: Any, **params: Any) -> Any:
    global _has_transposed
    _has_transposed = True
    return rule(*values, **params)


def with_rows(aval: Aval, rows: int) -> Aval:
    """Returns `aval` with another first dimension, but equal dtype and mesh axes."""
    result: Aval = aval.update(shape=(rows, *aval.shape[1:]), weak_type=False)
    return result


def zero_tangent(value: Traced) -> Zero:
    return Zero(jax.typeof(value).to_tangent_aval())


def zero_cotangent(linear: Any) -> Zero:
    return Zero(linear.aval)


def is_linear(value: object) -> bool:
    """Returns True if a transpose rule must return a cotangent for this operand."""
    return bool(ad.is_undefined_primal(value))


def is_eager(values: Sequence[object]) -> bool:
    """Returns True if a collective of these values runs at once, not in a trace."""
    concrete = all(_core.is_concrete(v) for v in values)
    return concrete and not _core.unsafe_am_i_under_a_jit()


def device_count(value: object) -> int:
    """Returns the number of devices that hold `value`, or 1 for a tracer."""
    concrete = _core.to_concrete_value(value)
    if isinstance(concrete, jax.Array) and not isinstance(concrete, _core.Tracer):
        return len(concrete.sharding.device_set)
    return 1


def producers(values: Sequence[Any]) -> list[int]:
    """Returns the position, in the trace, of the equation that computes each value.

    The position of an input of the program is -1.

    Raises:
        AttributeError, TypeError: the values are not traced together, or this version
            of JAX stores its equations in another attribute.
    """
    if len({id(v._trace) for v in values}) != 1:
        raise TypeError("values of several traces, or of none")
    equations = values[0]._trace.frame.tracing_eqns
    # The entries are equations or, in some versions of JAX, weak references to them.
    entries = [e() if callable(e) else e for e in equations]
    positions = {id(e): i for i, e in enumerate(entries) if e is not None}
    return [positions.get(id(v.parent), -1) for v in values]


def has_collective(
    function: Callable[..., object],
    arguments: Sequence[object],
    named: Mapping[str, object],
) -> bool | None:
    """Traces `function`, and returns whether it calls a collective.

    Returns None if tracing fails. Passes only the arguments that `function` accepts.
    """
    try:
        parameters = list(inspect.signature(function).parameters)
        positional = [n for n in parameters if n not in named][: len(arguments)]
        options = {n: named[n] for n in parameters if n in named}
        jaxpr = jax.make_jaxpr(lambda *args: function(*args, **options))(
            *arguments[: len(positional)]
        )
    # Ignore the error: the optimizer calls `function` later, which raises it again.
    except Exception:
        return None
    return tokens.EFFECT in jaxpr.effects


def has_transposed_collective(values: Sequence[object]) -> bool:
    """Returns True if this program derives the gradients `values` through a collective.

    Such gradients already contain cotangents of all ranks. For gradients that another
    program has computed, see `may_have_transposed_collective`.
    """
    return any(map(_is_transposed, _upstream(values)))


def may_have_transposed_collective(values: Sequence[object]) -> bool:
    """Returns True if another program may have derived `values` through a collective.

    That is so if some values are inputs of this program, and this process has taken a
    derivative through a collective before.
    """
    return _has_transposed and any(next(_upstream([v]), None) is None for v in values)


def is_computed_locally(value: object) -> bool:
    """Returns True if the traced program computes `value` without a collective.

    Returns False for an input of the program, and for a value that is not traced.
    """
    equations = list(_upstream([value]))
    return bool(equations) and all(tokens.EFFECT not in e.effects for e in equations)


def _upstream(values: Sequence[object]) -> Iterator[Any]:
    """Yields the equations of this program on which traced values depend."""
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


def _is_transposed(equation: Any, inside_transpose: bool = False) -> bool:
    if tokens.EFFECT not in equation.effects:
        return False
    # Only the outermost equation has "transpose(" in its name stack: operations inside
    # a transposed jax.checkpoint do not.
    inside_transpose |= "transpose(" in str(equation.source_info.name_stack)
    if equation.primitive.name.startswith("ringjax."):
        return inside_transpose
    inner = _core.jaxprs_in_params(equation.params)
    return any(_is_transposed(e, inside_transpose) for j in inner for e in j.eqns)


def is_tracing() -> bool:
    """Returns True inside of jit, vmap, grad and loops of JAX."""
    return not _core.trace_state_clean()


def in_mesh() -> bool:
    """Returns True if `jax.set_mesh` has set a mesh and no trace is running."""
    return not is_tracing() and not jax.sharding.get_abstract_mesh().empty


# -- lowering --------------------------------------------------------------------------


def avals_in(ctx: Context) -> list[Aval]:
    """Returns the avals of a primitive's operands, without tokens."""
    return [aval for aval in ctx.avals_in if isinstance(aval, jax.core.ShapedArray)]


def emit(
    ctx: Context,
    program: Program,
    target: str,
    operands: Sequence[IrValue],
    operand_avals: Sequence[AnyAval],
    result_avals: Sequence[AnyAval],
    *,
    aliases: Mapping[int, int],
    attributes: Mapping[str, object],
    tie: bool = True,
    inside: bool = False,
) -> list[IrValue]:
    """Emits one custom call whose last operand and last result are its order value.

    Args:
        target: the name of the native handler.
        aliases: maps an operand to the result that may use the memory of the operand.
            This function drops an alias that would cost a copy, and, in an elastic job,
            all aliases, because a call that a loss interrupts is repeated.
        tie: whether the call depends on the previous call of the block, see
            `call_order.py`.
        inside: True if XLA requests the call of one device while compiling, on a thread
            of XLA. This function then stores nothing in the thread, and uses `aliases`
            and `operands` unchanged.
    """
    kept = () if inside else unaliasable(program, operands)
    previous = call_order.previous_value(ctx) if tie and not inside else []
    rule = jax.ffi.ffi_lowering(
        target,
        has_side_effect=True,
        operand_output_aliases={i: o for i, o in aliases.items() if i not in kept},
        backend_config={k: _attribute(v) for k, v in attributes.items()},
    )
    local = ctx.replace(
        avals_in=[*operand_avals, *(aval for _, aval in previous)],
        avals_out=list(result_avals),
    )
    results: list[Any] = list(rule(local, *operands, *(value for value, _ in previous)))
    if not inside:
        call_order.set_previous_value(ctx, results[-1], result_avals[-1])
    return results


def unaliasable(program: Program, values: Sequence[IrValue]) -> tuple[int, ...]:
    """Returns the positions of the values whose memory no result may use."""
    return tuple(
        i
        for i, value in enumerate(values)
        if program.elastic or _is_undonated_argument(value)
    )


def _is_undonated_argument(value: Any) -> bool:
    """Returns True for an argument of the whole program that its caller keeps.

    XLA must not write to an argument that is not donated. For a result that aliases the
    argument, XLA would first copy the argument, which is one more pass over memory. The
    function returns False for arguments of an inner jit or a loop, which it cannot
    check; in a training step, gradients are usually no arguments.
    """
    # Look through reshapes, because a reshape uses the memory of its operand.
    while isinstance(value.owner, stablehlo.ReshapeOp):
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
    ctx: Context,
    program: Program,
    target: str,
    operands: Sequence[IrValue],
    calls: Sequence[tuple[Sequence[int], Mapping[str, object]]],
    *,
    in_place: bool,
) -> list[IrValue]:
    """Emits calls whose order value is JAX's token of `CollectiveTokenEffect`.

    Each of `calls` is a pair of the positions of its operands, and its attributes.
    Together the calls have all operands, in order. If `in_place` is true, results may
    use the memory of the operands.
    """
    out: list[IrValue] = []
    token = ctx.tokens_in.get(tokens.EFFECT)
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
    ctx: Context,
    function: Callable[..., Sequence[Traced]],
    operands: Sequence[IrValue],
    operand_avals: Sequence[AnyAval],
    result_avals: Sequence[AnyAval],
) -> list[IrValue]:
    """Traces ``function(*operands)``, which has no effects; emits its operations."""
    local = ctx.replace(
        avals_in=list(operand_avals),
        avals_out=list(result_avals),
        tokens_in=mlir.TokenSet(),
        tokens_out=None,
    )
    traced = mlir.lower_fun(lambda *xs: list(function(*xs)), multiple_results=True)
    return list(traced(local, *operands))


@contextlib.contextmanager
def named_axes(mesh: Mesh) -> Iterator[None]:
    """Lets functions that `lower_function` traces use the axis names of `mesh`."""
    with _core.extend_axis_env_nd(mesh.shape.items()):
        yield


def tiled_sharding(
    devices: Sequence[jax.Device], assignment: np.ndarray[Any, Any]
) -> Sharding:
    """Returns a sharding that cuts a tensor into tiles, one for each device.

    `assignment` has the shape of the grid of tiles. Each entry is the index in
    `devices` of the device that holds the tile.
    """
    tiles = np.ascontiguousarray(assignment, np.int64)
    hlo = _client.HloSharding.subgroup_with_device_ordering(tiles)
    return _shardings.GSPMDSharding(tuple(devices), hlo)


def without_mesh(aval: Aval) -> Aval:
    return jax.core.ShapedArray(aval.shape, aval.dtype)


def varying_axes(aval: Aval) -> frozenset[str] | None:
    """Returns the mesh axes over which a value in shard_map differs, or None."""
    # Some versions of JAX have the axes in `aval.mat`, others in `aval`.
    kind: Any = getattr(aval, "mat", aval)
    axes: frozenset[str] | None = getattr(kind, "varying", getattr(kind, "vma", None))
    return axes


def checks_varying() -> bool:
    """Returns True if the shard_map that is lowered tracks varying axes (check_vma).

    Without check_vma, JAX reports that no value varies over any axis.
    """
    return bool(_config._check_vma.value)


def increment(value: IrValue, aval: Aval) -> IrValue:
    one: Any = mlir.ir_constant(np.ones(aval.shape, aval.dtype))
    return stablehlo.add(value, one)


def _attribute(value: Any) -> mlir.ir.Attribute:
    if isinstance(value, tuple):
        return mlir.ir.DenseI64ArrayAttr.get(list(value))
    if isinstance(value, bool | int):
        return mlir.ir_attribute(np.int64(value))
    if isinstance(value, float):
        return mlir.ir_attribute(np.float64(value))
    return mlir.ir_attribute(value)


# -- failure and exit ------------------------------------------------------------------


def _wait_for_programs() -> None:
    """Waits until dispatched programs finish, before `shutdown` closes their links."""
    call_order.release_module()
    if not _bridge.backends_are_initialized():
        return  # no program has run, or JAX's exit function has run before
    arrays = jax.live_arrays()
    for wait in [tokens.wait_for_programs, *(a.block_until_ready for a in arrays)]:
        # Suppress errors of failed programs, which the users of their results raise. An
        # error here would only end the wait for the other programs.
        with contextlib.suppress(Exception):
            wait()


_rank_and_size: tuple[int, int] | None = None


def _clear_stale_programs() -> None:
    """Clears JAX's caches if the rank or the size has changed since the last init.

    Shapes in compiled programs depend on both the rank and the size.
    """
    global _rank_and_size
    current = (runtime.rank(), runtime.size())
    if _rank_and_size not in (None, current):
        jax.clear_caches()
    _rank_and_size = current


def _init_arguments() -> tuple[World, bool]:
    """Returns the world, and whether JAX's backends have been started already."""
    return runtime.current("init"), _bridge.backends_are_initialized()


# Initialize the group first, because JAX must join a group before it finds its devices.
runtime.on_init(
    lambda: jax_distributed.initialize_group(
        *_init_arguments(), place=runtime.group_rank()
    )
)
runtime.on_init(_clear_stale_programs)
runtime.on_shutdown(_wait_for_programs)
# Open the devices last, because opening devices may raise an error.
runtime.on_init(lambda: placement.open_devices(*_init_arguments()))
