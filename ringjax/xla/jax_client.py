"""Wraps JAX's private names around its client: the job, the executables, the rules.

JAX imports this module while it makes its client, and holds a lock meanwhile. So
nothing here may ask for JAX's devices, and unlike jax_private.py this module does not
import `runtime`, whose functions for `init` do ask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import distributed as _distributed
from jax._src import xla_bridge as _bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jax._src.lax import parallel as _parallel
from jax._src.lib import _jax as _lib  # type: ignore[attr-defined]
from jax._src.lib import guard_lib as _guard_lib


class JaxJob(NamedTuple):
    """The processes that `jax.distributed` has joined, and their key-value store."""

    store: Any
    process: int
    processes: int


def current_job() -> JaxJob | None:
    """Returns the job of this process, or None without `jax.distributed`."""
    state: Any = _distributed.global_state
    if state.client is None:
        return None
    return JaxJob(state.client, int(state.process_id), int(state.num_processes))


def make_client(collectives: Any = None) -> Any:
    """Makes JAX's client for CPUs; None stands for the collectives that are set."""
    return _bridge.make_cpu_client(collectives=collectives)


def has_mpi() -> bool:
    return hasattr(_lib, "make_mpi_collectives")


def make_mpi() -> Any:
    """Returns XLA's collectives over MPI. The caller calls `Init` and `Finalize`."""
    return _lib.make_mpi_collectives()


def make_gloo(store: Any) -> Any:
    return _lib.make_gloo_tcp_collectives(distributed_client=store)


# Receives a program's devices, in the order of its device assignment, and a function
# that returns the text of its optimised HLO modules.
OnLoad = Callable[[Sequence[jax.Device], Callable[[], Sequence[str]]], None]


def on_load(function: OnLoad) -> Callable[[], None]:
    """Calls `function` whenever a program is loaded, before it can run.

    Every program is loaded once, whether it was compiled, taken from the cache of
    compiled programs, or read by jax.experimental.serialize_executable. An exception of
    `function` reaches whoever compiles or reads the program. Returns a function that
    ends the calls.
    """
    executable: Any = _pxla.UnloadedMeshExecutable
    load = executable.load

    @functools.wraps(load)
    def load_and_call(self: Any) -> Any:
        modules = self.xla_executable.hlo_modules
        function(tuple(self.device_list), lambda: [m.to_string() for m in modules()])
        return load(self)

    def undo() -> None:
        if executable.load is load_and_call:
            executable.load = load

    executable.load = load_and_call
    return undo


def guard_thread() -> None:
    """Makes JAX refuse programs of several processes in all threads but this one.

    This is the state of `jax.thread_guard`. JAX's setting keeps its value.
    """
    unguard_threads()  # JAX refuses a second guard, even if the first thread has ended
    _guard_lib.update_thread_guard_global_state(True)


def unguard_threads() -> None:
    """Ends `guard_thread`."""
    _guard_lib.update_thread_guard_global_state(False)


# JAX's collectives of whose element types XLA refuses some; the others send bytes.
_TYPED = (
    *("psum", "psum_invariant", "pmax", "pmin", "reduce_scatter"),
    *("all_gather", "all_gather_invariant"),
)


def carry_types(carrier: Callable[[Any], Any]) -> Callable[[], None]:
    """Makes JAX's collectives on CPUs carry their operands in another element type.

    `carrier` returns that type for the type of the operand, which the result has, too.
    Derivatives and batching are not concerned: only the lowering rules are replaced, by
    rules that convert and call JAX's own. Returns a function that restores these.
    """
    primitives: list[Any] = [getattr(_parallel, f"{name}_p") for name in _TYPED]
    for primitive in primitives:
        rule = functools.partial(_carry, _mlir._lowerings[primitive].rule, carrier)
        _mlir.register_lowering(primitive, rule, platform="cpu")

    def undo() -> None:
        for primitive in primitives:
            _mlir._platform_specific_lowerings["cpu"].pop(primitive, None)

    return undo


def _carry(
    rule: Any, carrier: Callable[[Any], Any], ctx: Any, operand: Any, **params: Any
) -> Any:
    (given,), (wanted,) = ctx.avals_in, ctx.avals_out
    dtype = carrier(given.dtype)
    if dtype == given.dtype:
        return rule(ctx, operand, **params)
    carried, result = given.update(dtype=dtype), wanted.update(dtype=dtype)
    operand = _mlir.convert_hlo(ctx, operand, given, carried)
    inner = ctx.replace(avals_in=[carried], avals_out=[result])
    (value,) = rule(inner, operand, **params)
    return [_mlir.convert_hlo(ctx, value, result, wanted)]
