"""For which devices a primitive is lowered: one or several, of a CPU or CUDA.

What they become is said by the rules that are registered here; the private names of JAX
are in `jax_private.py`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.interpreters import mlir

from ringjax import _native, runtime
from ringjax.world.groups import REPLICAS
from ringjax.xla import tokens


class Program(NamedTuple):
    """What the rules of a lowering know of the program.

    Attributes:
      platform: "cpu" or "cuda".
      devices: in the order of the program; of other processes, too. Empty if it is
        over one device only.
      mesh: None if the program is still to be cut into what each device does; else what
        is lowered is one device's part already, and the mesh is of all of them.
      elastic: ranks may be lost, and a call that this breaks off is repeated.
      joined: the numbers of the CUDA devices that this rank has joined with others.
    """

    platform: str
    devices: tuple[Any, ...] = ()
    mesh: Any = None
    elastic: bool = False
    joined: tuple[int, ...] = ()

    @property
    def here(self) -> list[Any]:
        """The devices of this process."""
        mine = jax.process_index()
        return [device for device in self.devices if device.process_index == mine]


def _program(ctx: Any, name: str, platform: str) -> Program:
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        if (getattr(axes, "num_devices", 1) or 1) == 1:
            return Program(platform)
        return Program(platform, tuple(axes.device_assignment))
    if mesh.size == 1:
        return Program(platform)
    missing = set(mesh.axis_names) - set(axes.manual_axes)
    if missing:
        raise ValueError(
            f"ringjax.{name}: this shard_map leaves the mesh axes {sorted(missing)} to "
            "JAX: name all axes in `axis_names`, or call it outside of the shard_map"
        )
    if not isinstance(mesh, jax.sharding.Mesh):
        raise ValueError(
            f"ringjax.{name}: this shard_map does not say which devices it is for: "
            "give it a mesh of devices, or call jax.set_mesh before"
        )
    return Program(platform, tuple(mesh.devices.flat), mesh)


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
            program = _program(ctx, name, platform)._replace(elastic=elastic)
            # A part of one device is of a call that has been looked at as a whole.
            if platform == "cuda" and "comm" in params:
                devices = runtime.current(name).devices
                program = program._replace(joined=devices.numbers)
                if not _lowering.only:
                    _check_joined(name, devices.problem(params["comm"]), program)
            _register_handlers(platform)
            _check_spread(program, name, params)
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


def _check_spread(program: Program, name: str, params: Mapping[str, Any]) -> None:
    """Of a program over several processes, each one averages its own shards."""
    if params.get("comm", REPLICAS) == REPLICAS:
        return
    count = len({device.process_index for device in program.devices})
    if count > 1:
        raise ValueError(
            f"ringjax.{name}: this program runs on the devices of {count} processes, "
            "which hold different shards: exchange them with the same place of the "
            "other groups, by process_set=ringjax.replica_set()"
        )


def _check_joined(name: str, problem: str, program: Program) -> None:
    wanted = [device.local_hardware_id for device in program.here]
    if not problem and not set(wanted) <= set(program.joined):
        raise ValueError(
            f"ringjax.{name}: this program runs on the CUDA devices "
            f"{', '.join(map(str, wanted))} of this process, which has joined only "
            f"{', '.join(map(str, program.joined))} with the other ranks: start it by "
            "ringrun --devices-per-rank all (RINGJAX_DEVICES_PER_RANK=all), or keep "
            "`tensor` on one device"
        )
    if problem:
        raise ValueError(
            f"ringjax.{name}: `tensor` is on a CUDA device, but there is no device "
            f"communicator: {problem}; for collectives on the CPU set "
            "JAX_PLATFORMS=cpu or move the tensors to a CPU device"
        )


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
        _native.set_failure_hook(tokens.forget_failed)
        _registered.add(platform)
