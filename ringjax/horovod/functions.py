"""Horovod's functions that programs import from horovod.common.util.

The adapters of ringjax use `split_list` and `local_variables`.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from ringjax.config import Config
from ringjax.control import launch_environment
from ringjax.errors import HorovodVersionMismatchError
from ringjax.runtime import build, reused_process
from ringjax.world import devices

T = TypeVar("T")
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?![\d.])")


def _with_verbose(check: Callable[[], T]) -> Callable[..., T]:
    """Adds Horovod's argument `verbose`, which has no effect here."""

    def check_build(verbose: bool = False) -> T:
        return check()

    check_build.__name__, check_build.__doc__ = check.__name__, check.__doc__
    return check_build


mpi_built = _with_verbose(build.mpi_built)
gloo_built = _with_verbose(build.gloo_built)
nccl_built = _with_verbose(build.nccl_built)
ddl_built = _with_verbose(build.ddl_built)
ccl_built = _with_verbose(build.ccl_built)
cuda_built = _with_verbose(build.cuda_built)
rocm_built = _with_verbose(build.rocm_built)
sycl_built = _with_verbose(build.sycl_built)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether a framework is installed and ringjax has an adapter for it.

    Example:
        >>> extension_available("mxnet")
        False
    """
    modules = (f"ringjax.{ext_base_name}", ext_base_name)
    return all(importlib.util.find_spec(module) is not None for module in modules)


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether there are CUDA devices, and this build has code for them."""
    found = devices.information()
    return found["device_code"] != "none" and bool(found["devices"])


def check_extension(ext_name: str, *args: object) -> None:
    """Raises ImportError if the native core, which all adapters need, was not built.

    `ext_name` is the name of the adapter, for the error. `args` are ignored: in Horovod
    they are folders with its libraries.
    """
    if importlib.util.find_spec("ringjax._native") is None:
        raise ImportError(f"{ext_name} needs ringjax._native, which was not built")


def get_env_rank_and_size() -> tuple[int, int]:
    """Returns rank and size from the variables of the launcher, also before `init`.

    Raises StartupError if the variables do not contain rank and size.

    Example:
        >>> rank, size = get_env_rank_and_size()
        >>> 0 <= rank < size
        True
    """
    info = launch_environment.detect_launch(Config.from_env())
    return info.rank, info.size


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Cuts a list into parts whose lengths differ by one at most, longer parts first.

    Example:
        >>> split_list([1, 2, 3, 4, 5], 3)
        [[1, 2], [3, 4], [5]]
    """
    each, longer = divmod(len(items), parts)
    ends = [each * i + min(i, longer) for i in range(parts + 1)]
    return [items[a:b] for a, b in itertools.pairwise(ends)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Returns whether a number is a power of two: 1, 2, 4, 8 and so on."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Returns whether version `ver` is `target` or newer.

    Versions have the form X.Y.Z. The text after Z is ignored.

    Example:
        >>> is_version_greater_equal_than("2.13.0+cpu", "2.4.0")
        True
    """
    numbers = []
    for text in (ver, target):
        if (match := _VERSION.match(text)) is None:
            raise ValueError(f"{text!r} is not a version like 1.2.3")
        numbers.append(tuple(map(int, match.groups())))
    return numbers[0] >= numbers[1]


def get_version_mismatch_message(
    name: str, version: str, installed_version: str
) -> str:
    """Returns the text of a HorovodVersionMismatchError."""
    return str(HorovodVersionMismatchError(name, version, installed_version))


def env(**variables: str | None) -> AbstractContextManager[None]:
    """Makes a context in which environment variables are set, or removed (None).

    Example:
        >>> import os
        >>> with env(RINGJAX_EXAMPLE="1"):
        ...     os.environ["RINGJAX_EXAMPLE"]
        '1'
        >>> "RINGJAX_EXAMPLE" in os.environ
        False
    """
    return reused_process.environment(variables)


def local_variables(layers: Any, kind: type[Any], expected: str) -> list[Any]:
    """Returns the trainable weights of `layers`: None, a layer, or several layers.

    `kind` is Keras's class of layers. Raises Horovod's ValueError, which names the
    class `expected`, if `layers` contains another object.
    """
    several = [layers] if isinstance(layers, kind) else list(layers or ())
    if not all(isinstance(layer, kind) for layer in several):
        raise ValueError(f"All local layers must be of {expected}.")
    return [variable for layer in several for variable in layer.trainable_weights]
