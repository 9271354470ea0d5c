"""Defines the JAX effect whose tokens order all collectives except gradients.

Like `jax_private.py`, this module uses private names of JAX. It defines the effect of a
collective, and changes JAX as follows:

* the token of one program is not placed again on the device of the next program;
* a finished lane of a vmapped loop keeps its values if the condition has a collective;
* a program on one CPU device makes its first token itself;
* a program that takes a token is not called from C++, and is not cached on disk if it
  runs on several devices: JAX would fail in both cases;
* tokens of a failed program are dropped.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
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
Tokens = dict[Any, Any]  # tokens by effect, or output tokens of programs by device


class CollectiveTokenEffect(_effects.Effect):
    """The effect of a collective. JAX passes one token through all collectives.

    Instances are equal and have the same hash, the hash of the type's name, because JAX
    puts instances into the keys of its caches.
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
# Allow programs over several devices here, so that not JAX but program.py refuses wrong
# programs, with better error texts.
_effects.shardable_ordered_effects.add_type(CollectiveTokenEffect)


def _skip_token_placement() -> None:
    """Removes the most expensive part of the dispatch of a program with ordered calls.

    JAX places the token of the previous program on the devices of the next program,
    even if the token is on these devices already. The placement takes 100 of the 170
    microseconds of a dispatch. Only the placement is skipped: JAX still waits for the
    token and raises its error.
    """
    store: Any = _dispatch.RuntimeTokenSet
    place = getattr(store, "get_token_input", None)
    if place is None:
        return  # this version of JAX places tokens in another function

    def get_token_input(
        tokens: Any, effect: _effects.Effect, devices: Sequence[jax.Device]
    ) -> Any:
        token = tokens.current_tokens.get(effect)
        if effect == EFFECT and isinstance(token, _core.Token) and len(devices) == 1:
            # If the token has failed, let JAX's own function raise its error.
            with contextlib.suppress(Exception):
                token.block_until_ready()
                if token._buf.devices() == set(devices):
                    return token
        # The first token is on no device yet: JAX transfers it from the host.
        with jax.transfer_guard("allow"):
            return place(tokens, effect, devices)

    store.get_token_input = get_token_input


_skip_token_placement()


def _freeze_finished_vmap_lanes() -> None:
    """Keeps the values of finished lanes if the condition of a loop has a collective.

    A vmapped loop runs until all lanes are finished. In each iteration JAX restores the
    values of the finished lanes, but not if the condition has an ordered effect. So
    this rule computes the condition in the loop's body, and carries its value.
    """
    rules: Any = _batching.fancy_primitive_batchers
    plain_rule = rules[_loops.while_p]

    def rule(
        axis: Any, args: Sequence[Any], dims: Sequence[int | None], **params: Any
    ) -> tuple[Sequence[Any], Sequence[int | None]]:
        condition, step = params["cond_jaxpr"], params["body_jaxpr"]
        if EFFECT not in condition.effects:
            results, out_dims = plain_rule(axis, args, dims, **params)
            return results, out_dims
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]

        def loop(*args: Any) -> Any:
            def continues(state: Sequence[Any]) -> Any:
                return _core.jaxpr_as_fun(condition)(*args[:first], *state)[0]

            def body(carry: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
                state = _core.jaxpr_as_fun(step)(*args[first:last], *carry[1])
                return continues(state), list(state)

            start = list(args[last:])
            carry = (continues(start), start)
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
    """The program that this thread lowers, until its first token is made."""

    jaxpr: _core.Jaxpr | None = None


_tokenless_program = _TokenlessProgram()
# Set if this process has lowered a program that creates its first token.
_has_tokenless_programs = threading.Event()


def _create_first_token_in_program() -> None:
    """Makes a program on the only CPU device create its first token itself.

    JAX passes a token into and out of each program with ordered calls, and therefore
    calls the program from Python, which takes 90 microseconds. But XLA's CPU client
    runs the programs of one thread in the order of their calls without tokens. So this
    function makes the program neither take nor return a token; only inside of the
    program, JAX passes a token as usual. JAX then calls the program from C++ like a
    program without effects.
    """
    lowering: Any = _mlir
    lower_module = lowering.lower_jaxpr_to_module
    lower_body = lowering.jaxpr_subcomp

    def lower_jaxpr_to_module(name: str, jaxpr: Any, **options: Any) -> Any:
        effects = options["ordered_effects"]
        before = _tokenless_program.jaxpr
        if EFFECT in effects and _is_ordered_by_xla(jaxpr, options):
            # The caller reads this list later, and passes no token to the program for
            # an effect that is not in the list.
            effects.remove(EFFECT)
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
    """Returns True if XLA orders the calls, and a failure is visible in a result."""
    return bool(
        tuple(options["platforms"]) == ("cpu",)
        and options["num_partitions"] == 1
        and options["backend"] is not None
        and options["backend"].local_device_count() == 1
        # If a program has no result, only a token can show its failure.
        and jaxpr.out_avals
    )


_create_first_token_in_program()


def wait_for_programs() -> None:
    """Waits for all programs that this thread has called, even without live results.

    Raises:
        JaxRuntimeError: a program that takes a token has failed.
    """
    if _has_tokenless_programs.is_set():
        # XLA runs the programs of a thread in order, so wait for one more program.
        device = jax.local_devices(backend="cpu")[0]
        _add_one(jax.device_put(np.uint32(0), device)).block_until_ready()
    jax.effects_barrier()


_add_one = jax.jit(lambda x: x + 1)


def _disable_fast_call_with_tokens() -> None:
    """Makes `lower().compile()` call programs with tokens from Python, not from C++.

    The call from C++ would not pass the token.
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
    """Keeps programs over several devices that take a token out of the disk cache.

    jaxlib saves the layouts of arguments, but a token has no layout, so the process
    would end by SIGSEGV.
    """
    cache: Any = _cache
    put = cache.put_executable_and_time

    def put_executable_and_time(
        key: str, name: str, executable: Any, *more: Any, **options: Any
    ) -> None:
        if len(executable.local_devices()) > 1 and any(
            "token[]" in module.to_string() for module in executable.hlo_modules()
        ):
            return
        put(key, name, executable, *more, **options)

    cache.put_executable_and_time = put_executable_and_time


_keep_multi_device_tokens_out_of_cache()


_SWEEP = "ringjax-sweep"  # the name of the threads that drop failed tokens


def drop_failed_tokens() -> None:
    """Drops the tokens of a failed program, with which every later program would fail.

    The native core calls this function on the main thread as soon as a handler has
    failed. A small program runs inside its own dispatch, so JAX stores its failed token
    only after this function has returned. So a thread drops failed tokens twice more.
    """
    tokens = _dispatch.runtime_tokens
    stores = (tokens.current_tokens, tokens.output_runtime_tokens)
    for store in stores:
        store.clear()
    threading.Thread(
        target=_drop_failed_later, args=(stores,), name=_SWEEP, daemon=True
    ).start()


def _drop_failed_later(stores: Sequence[Tokens]) -> None:
    for pause in (0.01, 0.1):
        _exits.wait(pause)
        _drop_failed(stores)


_exits = threading.Event()  # set when Python exits


def _drop_failed(stores: Sequence[Tokens], mark: str = "") -> None:
    """Waits for tokens, and drops each token whose error has `mark` in its text."""
    for store in stores:
        for key, token in list(store.items()):
            try:
                token.block_until_ready()
            except Exception as error:
                if mark in str(error) and store.get(key) is token:
                    store.pop(key, None)


@atexit.register
def _drop_failed_at_exit() -> None:
    """Drops failed tokens at exit, because JAX's exit function raises their errors.

    atexit calls functions in the reverse order of their registration. JAX registered
    its function before, so JAX's function runs after this function. ringjax.shutdown(),
    which ends all calls that still wait, was registered later, so it has already run.

    A thread that waits for a token in jaxlib while Python ends would abort the process,
    so this function joins the threads of `drop_failed_tokens`.
    """
    _exits.set()
    for thread in threading.enumerate():
        if thread.name == _SWEEP:
            thread.join()
    tokens = _dispatch.runtime_tokens
    _drop_failed((tokens.current_tokens, tokens.output_runtime_tokens), "RINGJAX[")
