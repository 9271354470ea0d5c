"""Common code of all sections of check.py: the report, and ringjax's device path.

A section is `python -m benchmarks.gpu.…`, which prints its tables if run alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Report, text_table

RESULT = "RINGJAX_GPU_CHECK_RESULT"


@contextlib.contextmanager
def section() -> Iterator[Report]:
    """Yields the report of this process, and records an exception as a failure."""
    path = os.environ.get(RESULT)
    report = Report(Path(path) if path else None)
    try:
        yield report
    except BaseException as error:
        report.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        for table in report.tables:
            print(text_table(table) + "\n", flush=True)
    if report.failures:
        sys.exit(1)


def attempt(
    report: Report, what: str, action: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs a part of a section. An exception is a failure, and other parts continue."""
    try:
        return action(*args, **kwargs)
    except Exception as error:
        import traceback

        traceback.print_exc()
        report.fail(f"{what}: {type(error).__name__}: {str(error)[:600]}")
        return None


def device_communicator() -> Any:
    """Returns the world's device communicator; None if the CPU's transports are used.

    JAX makes the communicator when it first needs it.
    """
    from ringjax import runtime

    devices = getattr(runtime.current("gpu_check"), "devices", None)
    return devices.communicators.get(0, [None])[0] if devices is not None else None


def allreduce_stats() -> dict[str, float]:
    """Returns counters of allreduce of the communicator that JAX uses here."""
    from ringjax import runtime

    communicator = device_communicator() or runtime.communicator()
    stats = communicator.stats().get("allreduce", {})
    return {k: v for k, v in stats.items() if isinstance(v, int | float)}


def on_gpu() -> bool:
    """Returns whether JAX computes on a GPU here."""
    import jax

    return bool(jax.default_backend() == "gpu")


def require_device_path(report: Report) -> None:
    """Reports a failure if JAX uses a GPU but ringjax does not use NCCL."""
    if on_gpu() and device_communicator() is None:
        report.fail("JAX computes on the GPU, but ringjax has no device communicator")


def missing(*modules: str) -> list[str]:
    """Returns the modules that cannot be imported here."""

    def absent(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is None
        except (ImportError, ValueError):
            return True

    return [name for name in modules if absent(name)]
