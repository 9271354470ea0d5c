"""JAX's effects and tokens, which order the collectives that carry no seq.

Like ``jax_private.py`` it touches what is private to JAX, and nothing but tokens: the
effect of a stand-alone collective, loops that stop by one, programs that need no token
from outside, a shortcut for it between two that do, and what becomes of tokens after a
failure.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compilation_cache as _cache
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import effects as _effects
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jax._src.lax.control_flow import loops as _loops

ABSTRACT = _core.abstract_token


class CollectiveTokenEffect(_effects.Effect):
    """Ordered: JAX threads a token through all calls that carry it.

    Equal and hashed by type: the one below ends up in JAX's cache keys.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self).__name__)

    def __repr__(self) -> str:
        return type(self).__name__


EFFECT = CollectiveTokenEffect()

for _allowed in (
    _effects.lowerable_effects,
    _effects.control_flow_allowed_effects,
    _effects.custom_derivatives_allowed_effects,
    _effects.remat_allowed_effects,
    _effects.ordered_effects,
):
    _allowed.add_type(CollectiveTokenEffect)
# Or JAX refuses a program over several devices before _check_devices can say why.
_effects.shardable_ordered_effects.add_type(CollectiveTokenEffect)


def _skip_token_placement() -> None:
    """Takes the longest piece off the dispatch of a program with an ordered call.

    JAX places the token of the program before on the devices of the next one, also if
    it is there already: 100 us of 170, whatever the call does. Only the placement is
    left out; to wait for the token, and to raise its error, stays as it is.
    """
    store: Any = _dispatch.RuntimeTokenSet
    place = getattr(store, "get_token_input", None)
    if place is None:
        return  # a jax that does it otherwise

    def get_token_input(tokens: Any, effect: Any, devices: Any) -> Any:
        token = tokens.current_tokens.get(effect)
        if effect == EFFECT and isinstance(token, _core.Token) and len(devices) == 1:
            # A failed token too is for JAX to handle.
            with contextlib.suppress(Exception):
                token.block_until_ready()
                if token._buf.devices() == set(devices):
                    return token
        with jax.transfer_guard("allow"):  # the first token is on no device yet
            return place(tokens, effect, devices)

    store.get_token_input = get_token_input


_skip_token_placement()


def _freeze_finished_vmap_lanes() -> None:
    """Lets `vmap` of a loop whose condition has a collective keep finished lanes.

    A lane of a vmapped loop goes on until all lanes are finished, and JAX then selects
    what a finished lane had before, but not if the condition has an ordered effect. So
    the condition is computed in the body, and the loop carries it.
    """
    rules: Any = _batching.fancy_primitive_batchers
    plain_rule = rules[_loops.while_p]

    def rule(axis: Any, args: Any, dims: Any, **params: Any) -> Any:
        condition, step = params["cond_jaxpr"], params["body_jaxpr"]
        if EFFECT not in condition.effects:
            return plain_rule(axis, args, dims, **params)
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]

        def loop(*args: Any) -> Any:
            def is_on(state: Any) -> Any:
                return _core.jaxpr_as_fun(condition)(*args[:first], *state)[0]

            def body(carry: Any) -> Any:
                state = _core.jaxpr_as_fun(step)(*args[first:last], *carry[1])
                return is_on(state), list(state)

            start = list(args[last:])
            carry = (is_on(start), start)
            return jax.lax.while_loop(lambda carry: carry[0], body, carry)[1]

        lanes = jax.vmap(
            loop,
            in_axes=tuple(dims),
            axis_name=axis.name,
            axis_size=axis.size,
            spmd_axis_name=axis.spmd_name,
        )
        results = lanes(*args)
        return results, [0] * len(results)

    rules[_loops.while_p] = rule


_freeze_finished_vmap_lanes()


class _TokenlessProgram(threading.local):
    """The program being lowered, until its first token is made."""

    jaxpr: Any = None


_tokenless_program = _TokenlessProgram()
_has_tokenless_programs = threading.Event()  # this process has such programs


def _create_first_token_in_program() -> None:
    """Lets a program on the one CPU device make its first token itself.

    JAX hands a token into and out of every program with an ordered call, and therefore
    calls it from Python: 90 us. What one thread calls, XLA's CPU client runs in that
    order anyway. So JAX threads the token through the program and all functions in it
    as ever, but the program neither takes nor returns one, and JAX calls it as one
    without effects: from C++.
    """
    lowering: Any = _mlir
    lower_module = lowering.lower_jaxpr_to_module
    lower_body = lowering.jaxpr_subcomp

    def lower_jaxpr_to_module(name: Any, jaxpr: Any, **options: Any) -> Any:
        effects = options["ordered_effects"]
        before = _tokenless_program.jaxpr
        if EFFECT in effects and _is_ordered_by_xla(jaxpr, options):
            effects.remove(
                EFFECT
            )  # the caller's list, by which it will call the program
            _tokenless_program.jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
            _has_tokenless_programs.set()
        try:
            return lower_module(name, jaxpr, **options)
        finally:
            _tokenless_program.jaxpr = before

    def jaxpr_subcomp(
        ctx: Any, jaxpr: Any, stack: Any, tokens: Any, *rest: Any, **options: Any
    ) -> Any:
        if jaxpr is _tokenless_program.jaxpr:
            _tokenless_program.jaxpr = None
            first = lowering.create_token()
            tokens = lowering.TokenSet({**dict(tokens.items()), EFFECT: first})
        return lower_body(ctx, jaxpr, stack, tokens, *rest, **options)

    lowering.lower_jaxpr_to_module = lower_jaxpr_to_module
    lowering.jaxpr_subcomp = jaxpr_subcomp


def _is_ordered_by_xla(jaxpr: Any, options: Any) -> bool:
    """Whether what one thread calls is run in that order, and its errors are seen."""
    return bool(
        tuple(options["platforms"]) == ("cpu",)
        and options["num_partitions"] == 1
        and options["backend"] is not None
        and options["backend"].local_device_count() == 1
        and jaxpr.out_avals  # else nothing but the token would tell of a failure
    )


_create_first_token_in_program()


def wait_for_programs() -> None:
    """Returns when all that this thread has called is finished, also if dropped since.

    Raises:
      JaxRuntimeError: a program that takes a token has failed.
    """
    if _has_tokenless_programs.is_set():
        device = jax.local_devices(backend="cpu")[0]
        _add_one(jax.device_put(np.uint32(0), device)).block_until_ready()
    jax.effects_barrier()


_add_one = jax.jit(lambda x: x + 1)


def _disable_fast_call_with_tokens() -> None:
    """Keeps programs that take a token off the fast way of `lower().compile()`.

    JAX forgets there that it hands over none.
    """
    executable: Any = _pxla.MeshExecutable
    create = executable.create_cpp_call

    def create_cpp_call(self: Any, *rest: Any) -> Any:
        if getattr(self.unsafe_call, "ordered_effects", None):
            return None
        return create(self, *rest)

    executable.create_cpp_call = create_cpp_call


_disable_fast_call_with_tokens()


def _keep_multi_device_tokens_out_of_cache() -> None:
    """Leaves programs out of JAX's persistent cache that jaxlib cannot write there.

    It saves the layouts of arguments, and a token has none: where a program is for
    several devices, the process would end by SIGSEGV.
    """
    cache: Any = _cache
    put = cache.put_executable_and_time

    def put_executable_and_time(
        key: Any, name: Any, executable: Any, *more: Any, **options: Any
    ) -> None:
        if len(executable.local_devices()) > 1 and any(
            "token[]" in module.to_string() for module in executable.hlo_modules()
        ):
            return
        put(key, name, executable, *more, **options)

    cache.put_executable_and_time = put_executable_and_time


_keep_multi_device_tokens_out_of_cache()


def drop_failed_tokens() -> None:
    """Drops the tokens of a failed program, or every later program fails with them.

    Runs on the main thread as soon as a handler failed. A small program runs inside its
    own dispatch, and then JAX stores its failed token only after this returns; a second
    look from a thread of its own finds that one.
    """
    tokens = _dispatch.runtime_tokens
    stores = (tokens.current_tokens, tokens.output_runtime_tokens)
    for store in stores:
        store.clear()
    threading.Thread(
        target=_drop_failed_later, args=(stores,), name="ringjax-sweep", daemon=True
    ).start()


def _drop_failed_later(stores: Sequence[dict[Any, Any]]) -> None:
    for pause in (0.01, 0.1):
        time.sleep(pause)
        _drop_failed(stores)


def _drop_failed(stores: Sequence[dict[Any, Any]], mark: str = "") -> None:
    """Waits for tokens, and drops those whose errors have `mark` in their texts."""
    for store in stores:
        for key, token in list(store.items()):
            try:
                token.block_until_ready()
            except Exception as error:
                if mark in str(error) and store.get(key) is token:
                    store.pop(key, None)


@atexit.register
def _drop_failed_at_exit() -> None:
    """Or JAX, which waits for tokens at exit, raises what the program was told before.

    Runs behind ringjax.shutdown(), which ends whatever still waits, and before JAX.
    """
    tokens = _dispatch.runtime_tokens
    _drop_failed((tokens.current_tokens, tokens.output_runtime_tokens), "RINGJAX[")
