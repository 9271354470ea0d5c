"""Tests of the available memory, computed from fake /proc and cgroup files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ringjax.links.memory import available

GIB = 1 << 30
Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Returns a function that writes files. Values are numbers, texts, or tables."""

    def make(files: dict[str, object], free: int = 64 * GIB) -> Path:
        files = {
            "proc/meminfo": f"MemAvailable: {free >> 10} kB\nHugetlb: 0 kB\n"
        } | files
        for name, content in files.items():
            if isinstance(content, dict):
                content = "".join(f"{key} {value}\n" for key, value in content.items())
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")
        return tmp_path

    return make


def version_2(path: str, base: str = "/") -> dict[str, object]:
    mount = (
        f"30 24 0:26 {base} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
    )
    return {
        "proc/self/cgroup": f"0::{path}",
        "proc/self/mountinfo": f"\n{mount}".strip(),
    }


def group(path: str, most: object, used: int, **stat: int) -> dict[str, object]:
    folder = f"sys/fs/cgroup{path}"
    return {
        f"{folder}/memory.max": most,
        f"{folder}/memory.current": used,
        f"{folder}/memory.stat": {"anon": used} | stat,
    }


def test_without_cgroups_the_machines_memory_counts(machine: Machine) -> None:
    assert available(machine({}, free=7 * GIB)) == 7 * GIB


def test_clean_page_cache_counts_as_available(machine: Machine) -> None:
    stat = {"inactive_file": 6 * GIB, "active_file": GIB, "slab_reclaimable": GIB}
    root = machine(version_2("/") | group("", 8 * GIB, 8 * GIB, **stat))
    assert available(root) == 7 * GIB


def test_dirty_page_cache_does_not_count(machine: Machine) -> None:
    stat = {"inactive_file": 3 * GIB, "file_dirty": GIB, "file_writeback": GIB}
    root = machine(version_2("/") | group("", 8 * GIB, 8 * GIB, **stat))
    assert available(root) == GIB


def test_the_smallest_limit_of_all_parent_groups_counts(machine: Machine) -> None:
    files = version_2("/pod/job/rank")
    files |= group("/pod/job/rank", "max", GIB)
    files |= group("/pod/job", 20 * GIB, 4 * GIB)
    files |= group("/pod", 30 * GIB, 27 * GIB)  # also used by other jobs
    assert available(machine(files)) == 3 * GIB


def test_a_container_that_sees_the_hosts_cgroups(machine: Machine) -> None:
    """The container's cgroup is mounted at the path of the host's root cgroup."""
    files = version_2("/docker/abc/x", base="/docker/abc")
    files |= group("", 4 * GIB, 3 * GIB) | group("/x", 4 * GIB, GIB)
    assert available(machine(files)) == GIB
    files |= version_2("/elsewhere", base="/docker/abc")
    assert available(machine(files)) == GIB
    assert available(machine(files | version_2("/../other"))) == GIB


def test_cgroup_version_1(machine: Machine) -> None:
    mount = "36 30 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    other = "37 30 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"
    folder = "sys/fs/cgroup/memory"
    files: dict[str, object] = {
        "proc/self/cgroup": "4:memory:/job\n3:cpu:/\n0::/",
        "proc/self/mountinfo": f"{other}\n{mount}",
        f"{folder}/memory.limit_in_bytes": 9223372036854771712,
        f"{folder}/memory.usage_in_bytes": 9 * GIB,
        f"{folder}/memory.stat": {},
        f"{folder}/job/memory.limit_in_bytes": 8 * GIB,
        f"{folder}/job/memory.usage_in_bytes": 7 * GIB,
        f"{folder}/job/memory.stat": {
            "inactive_file": 0,
            "total_inactive_file": 2 * GIB,
            "total_active_file": 2 * GIB,
            "total_dirty": GIB,
        },
    }
    assert available(machine(files)) == 3 * GIB


@pytest.mark.parametrize("text", ["", "max", "no number"])
def test_malformed_files_set_no_limit(machine: Machine, text: str) -> None:
    files = version_2("/") | group("", text, GIB)
    assert available(machine(files)) == 64 * GIB
    assert available(machine({"proc/self/mountinfo": text})) == 64 * GIB


def test_usage_above_the_limit_leaves_0_bytes(machine: Machine) -> None:
    assert available(machine(version_2("/") | group("", GIB, 2 * GIB))) == 0


def test_here() -> None:
    assert 0 < available() < 1 << 62
