"""For which devices a primitive is lowered: one or several, of a CPU or CUDA.

What they become is said by the rules that are registered here; the private names of JAX
are in `jax_private.py`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.interpreters import mlir

from ringjax import _native, runtime
from ringjax.xla import tokens
from ringjax.xla.program import check_joined_devices, check_processes, program_of


def register(primitive: Any, rule: Any) -> None:
    """Lowers `primitive` by ``rule(ctx, program, *operands, **params)``.

    Platforms other than CPU and CUDA are refused. The parameter `elastic`, if there is
    one, is in the program.

    ``cacheable=False`` is essential: by default JAX lowers every equation into a
    function of its own, no two calls would share a block, and the tie would silently
    do nothing.
    """
    name = primitive.name.removeprefix("ringjax.")

    def on(platform: str) -> Any:
        def lower(
            ctx: Any, *operands: Any, elastic: bool = False, **params: Any
        ) -> Any:
            program = program_of(ctx, name, platform)._replace(elastic=elastic)
            # A part of one device is of a call that has been looked at as a whole.
            if platform == "cuda" and "comm" in params:
                devices = runtime.current(name).devices
                program = program._replace(joined=devices.numbers)
                if not _lowering.only:
                    check_joined_devices(name, devices.problem(params["comm"]), program)
            _register_handlers(platform)
            check_processes(program, name, params)
            return rule(ctx, program, *operands, **params)

        return lower

    def elsewhere(ctx: Any, *operands: Any, **params: Any) -> Any:
        platforms = "/".join(ctx.module_context.platforms)
        raise ValueError(
            f"{primitive.name}: `tensor` is on a {platforms} device, but the "
            "JAX collectives run on CPU and CUDA devices only; set JAX_PLATFORMS=cpu"
        )

    for platform in ("cpu", "cuda"):
        rule_of = on(platform)
        mlir.register_lowering(primitive, rule_of, platform=platform, cacheable=False)
    mlir.register_lowering(primitive, elsewhere, cacheable=False)


class _Lowering(threading.local):
    only = False


_lowering = _Lowering()


@contextlib.contextmanager
def without_device() -> Iterator[None]:
    """Lowers for CUDA devices that are not there: to look at a program, not to run it.

    For compilation ahead of time against the description of a device, as the test of
    XLA's schedules does. A program that ran after all would end in an error.
    """
    before, _lowering.only = _lowering.only, True
    try:
        yield
    finally:
        _lowering.only = before


_registration = threading.Lock()
_registered: set[str] = set()


def _register_handlers(platform: str) -> None:
    # Not at import: a handler registered before the backend exists is checked only when
    # the backend starts, and takes all of it down if it is refused.
    with _registration:
        if platform in _registered:
            return
        on_cuda = platform == "cuda"
        targets = _native.cuda_ffi_targets() if on_cuda else _native.ffi_targets()
        for name, handler in targets.items():
            jax.ffi.register_ffi_target(
                name, handler, platform="CUDA" if on_cuda else platform
            )
        _native.set_failure_hook(tokens.drop_failed_tokens)
        _registered.add(platform)
