"""The machine of a benchmark: description, CPU time, memory, ports; result files."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Returns the date and the machine, for the files of results."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {
            "cpus": os.cpu_count(),
            "cpu": _cpu_name(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Writes results and the description of the machine as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**describe(), **results}, indent=1) + "\n")


def cpu_seconds() -> float:
    """Returns the CPU seconds that all programs of the machine have used since boot."""
    with Path("/proc/stat").open() as stat:
        # user nice system idle iowait irq softirq steal, then guests (in user already)
        ticks = [int(n) for n in stat.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def usable_memory() -> int:
    """Returns the bytes that a benchmark may use: 3/4 of the available memory."""
    with Path("/proc/meminfo").open() as lines:
        known = dict(line.split(":") for line in lines)
    return int(known["MemAvailable"].split()[0]) * 1024 * 3 // 4


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
