"""Horovod's small functions that programs import from horovod.common.util.

For those programs; ringjax itself uses `split_list` and `local_variables`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ringjax.config import Config
from ringjax.control import launch_environment
from ringjax.errors import HorovodVersionMismatchError
from ringjax.runtime import build
from ringjax.world import devices

T = TypeVar("T")
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?![\d.])")


def _with_verbose(question: Callable[[], Any]) -> Callable[..., Any]:
    """A question of `runtime.build` with Horovod's `verbose`, which is ignored."""

    def ask(verbose: bool = False) -> Any:
        return question()

    ask.__name__, ask.__doc__ = question.__name__, question.__doc__
    return ask


mpi_built = _with_verbose(build.mpi_built)
gloo_built = _with_verbose(build.gloo_built)
nccl_built = _with_verbose(build.nccl_built)
ddl_built = _with_verbose(build.ddl_built)
ccl_built = _with_verbose(build.ccl_built)
cuda_built = _with_verbose(build.cuda_built)
rocm_built = _with_verbose(build.rocm_built)
sycl_built = _with_verbose(build.sycl_built)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether ringjax has an adapter for a framework, and the framework is installed.

    Example:
        >>> extension_available("mxnet")
        False
    """
    places = (f"ringjax.{ext_base_name}", ext_base_name)
    return all(importlib.util.find_spec(place) is not None for place in places)


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there are CUDA devices, for which this build has code."""
    found = devices.information()
    return found["device_code"] != "none" and bool(found["devices"])


def check_extension(ext_name: str, *args: object) -> None:
    """Raises ImportError if the native core is missing; it serves all frameworks.

    Args:
        ext_name: for the error: what cannot be used without it.
        args: accepted and ignored: where Horovod would look.
    """
    if importlib.util.find_spec("ringjax._native") is None:
        raise ImportError(f"{ext_name} needs ringjax._native, which was not built")


def get_env_rank_and_size() -> tuple[int, int]:
    """This process's rank and how many there are, as its launcher said; before `init`.

    Raises:
        StartupError: the launcher's variables do not tell them.

    Example:
        >>> rank, size = get_env_rank_and_size()
        >>> 0 <= rank < size
        True
    """
    info = launch_environment.detect_launch(Config.from_env())
    return info.rank, info.size


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Cuts a list into parts of about the same length, the longer ones first.

    Example:
        >>> split_list([1, 2, 3, 4, 5], 3)
        [[1, 2], [3, 4], [5]]
    """
    each, longer = divmod(len(items), parts)
    ends = [each * i + min(i, longer) for i in range(parts + 1)]
    return [items[a:b] for a, b in itertools.pairwise(ends)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number is 1, 2, 4, 8 and so on."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version X.Y.Z is another one or newer; what follows Z is ignored.

    Raises:
        ValueError: one of them is no such version.

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
    """What HorovodVersionMismatchError says."""
    return str(HorovodVersionMismatchError(name, version, installed_version))


@contextlib.contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets environment variables for a while; None: not set then.

    Example:
        >>> import os
        >>> with env(RINGJAX_EXAMPLE="1"):
        ...     os.environ["RINGJAX_EXAMPLE"]
        '1'
        >>> "RINGJAX_EXAMPLE" in os.environ
        False
    """
    before = {name: os.environ.get(name) for name in variables}

    def put(values: dict[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = str(value)

    put(variables)
    try:
        yield
    finally:
        put(before)


def local_variables(layers: Any, kind: type[Any], expected: str) -> list[Any]:
    """The trainable weights of a layer or several; none for None.

    Args:
        layers: what the program gave as `local_layers`.
        kind: the class of layers.
        expected: how Horovod's error calls it.

    Raises:
        ValueError: something else is given.
    """
    several = [layers] if isinstance(layers, kind) else list(layers or ())
    if not all(isinstance(layer, kind) for layer in several):
        raise ValueError(f"All local layers must be of {expected}.")
    return [variable for layer in several for variable in layer.trainable_weights]
