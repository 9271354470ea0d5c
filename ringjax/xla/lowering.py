"""Registers lowering rules for CPU and CUDA devices, and the native handlers.

`program.py` describes the program that is lowered. `jax_private.py` wraps JAX's private
names.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from ringjax import _native, runtime
from ringjax.xla import tokens
from ringjax.xla.jax_types import Context, IrValue, Primitive
from ringjax.xla.program import check_joined_devices, check_processes, program_of

LoweringRule = Callable[..., Sequence[IrValue]]


def register(primitive: Primitive, rule: LoweringRule) -> None:
    """Lowers `primitive` on CPU and CUDA devices by `rule`; refuses other platforms.

    The rule is ``(ctx, program, *operands, **params) -> results``. If the primitive has
    the parameter `elastic`, its value becomes ``program.elastic``.

    ``cacheable=False`` is essential. By default JAX lowers each equation into a
    separate function. Then no two calls would share a block, so `call_order.py` could
    not order them.
    """
    name = primitive.name.removeprefix("ringjax.")

    def rule_for(platform: str) -> LoweringRule:
        def lower(
            ctx: Context, *operands: IrValue, elastic: bool = False, **params: Any
        ) -> Sequence[IrValue]:
            program = program_of(ctx, name, platform)._replace(elastic=elastic)
            # `multi_device._part_p`, the part of a call on one device, has no "comm":
            # its program was checked when the whole call was lowered.
            if platform == "cuda" and "comm" in params:
                devices = runtime.current(name).devices
                program = program._replace(joined=devices.numbers)
                if not _lowering_mode.without_device:
                    problem = devices.problem(params["comm"])
                    check_joined_devices(name, problem, program)
            _register_handlers(platform)
            check_processes(program, name, params)
            return rule(ctx, program, *operands, **params)

        return lower

    def refuse(ctx: Context, *operands: IrValue, **params: Any) -> Sequence[IrValue]:
        platforms = "/".join(ctx.module_context.platforms)
        raise ValueError(
            f"{primitive.name}: `tensor` is on a {platforms} device, but the "
            "JAX collectives run on CPU and CUDA devices only; set JAX_PLATFORMS=cpu"
        )

    for platform in ("cpu", "cuda"):
        platform_rule = rule_for(platform)
        mlir.register_lowering(
            primitive, platform_rule, platform=platform, cacheable=False
        )
    mlir.register_lowering(primitive, refuse, cacheable=False)


class _LoweringMode(threading.local):
    without_device = False


_lowering_mode = _LoweringMode()


@contextlib.contextmanager
def without_device() -> Iterator[None]:
    """Lowers for CUDA devices that this machine does not have.

    A test of XLA's schedules compiles programs for the description of a device. If such
    a program ran, it would raise an error.
    """
    before = _lowering_mode.without_device
    _lowering_mode.without_device = True
    try:
        yield
    finally:
        _lowering_mode.without_device = before


_registration = threading.Lock()
_registered: set[str] = set()


def _register_handlers(platform: str) -> None:
    # Do not register handlers at import. JAX checks handlers that are registered before
    # a backend exists when the backend starts, and if JAX then refuses a handler, the
    # backend does not start.
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
