"""The machine of a run of check.py: device, clocks, driver, NCCL, jax, device code.

Every line is queried separately. A line that cannot be queried says so.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.section import (
    Report,
    device_communicator,
    on_gpu,
    require_device_path,
    section,
)

QUERY = (
    "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,"
    "clocks.max.mem,power.limit,temperature.gpu,compute_mode"
)


def nvidia_smi() -> str:
    """Returns one line about the device; changes nothing."""
    words = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=20, check=False
    )
    return (done.stdout.strip() or done.stderr.strip()).splitlines()[0]


def packages() -> str:
    from importlib import metadata

    names = (
        "jax",
        "jaxlib",
        "jax-cuda13-plugin",
        "jax-cuda12-plugin",
        "optax",
        "numpy",
    )
    found = []
    for name in names:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def main() -> None:
    """Prints the table. A wrong sum on the device is a failure."""
    with section() as report:
        report.table("Machine", "what", "value")
        _line(report, "nvidia-smi", nvidia_smi)
        _line(report, "nvidia-smi asked for", lambda: QUERY)
        _line(report, "system", lambda: f"{platform.platform()}, {_cores()} cores")
        _line(report, "packages", packages)
        _line(report, "device code", lambda: _info()["device_code"])
        _line(report, "images", lambda: _info()["images"])
        _line(report, "driver API", lambda: _info()["driver"])
        _line(report, "devices", lambda: _info()["devices"])
        import jax

        _line(report, "jax devices", jax.devices)
        _first_sum(report)
        _line(report, "build_info()", _build_info)


def _first_sum(report: Report) -> None:
    """Adds on the device, with NCCL and the device communicator as in training."""
    import jax.numpy as jnp
    import numpy as np

    import ringjax

    ringjax.init()
    total = np.asarray(ringjax.allreduce(jnp.arange(5.0), ringjax.Sum, name="first"))
    if total.tolist() != [0.0, 1.0, 2.0, 3.0, 4.0]:
        report.fail(f"the allreduce of one rank gives {total}")
    communicator = device_communicator()
    if on_gpu() and _info()["device_code"] == "none":
        report.fail("ringjax was built without device code: no nvcc was found")
    require_device_path(report)
    used = "the CPU's transports" if communicator is None else "NCCL"
    report.row("allreduce uses", used)
    report.value("device_path", communicator is not None)


def _info() -> dict[str, Any]:
    from ringjax import _native

    found: dict[str, Any] = _native.cuda_info()
    return found


def _build_info() -> Any:
    import ringjax

    return ringjax.build_info()


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0))


def _line(report: Report, what: str, query: Callable[[], Any]) -> None:
    try:
        text = str(query())
    except Exception as error:
        text = f"not known: {type(error).__name__}: {error}"
    report.row(what, text)


if __name__ == "__main__":
    main()
