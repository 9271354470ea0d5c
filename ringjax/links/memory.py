"""Computes the memory that is available to this process on its host and in its cgroups.

Linux counts the page cache as used memory, but frees the cache when a process needs
memory. A container that has read a large data set may show no free memory, although the
memory of the cache is available.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 62


def available(root: Path = Path("/")) -> int:
    """Returns the bytes that this process can still use.

    /proc and the control groups are in `root`, which is another folder in tests.
    """
    limits = [_NO_LIMIT]
    with contextlib.suppress(OSError, ValueError):
        limits.append(_table(root / "proc/meminfo", ":")["MemAvailable"] << 10)
    for folder, version in cgroups(root, "memory"):
        # A group may have no limit, or may be deleted while this function runs.
        with contextlib.suppress(OSError, ValueError, KeyError):
            limits.append(
                _available_2(folder) if version == 2 else _available_1(folder)
            )
    return max(0, min(limits))


def _available_2(group: Path) -> int:
    """Returns the available bytes in a control group of version 2.

    Raises ValueError if the group has no limit: then memory.max contains "max".
    """
    limit, used = (_number(group / name) for name in ("memory.max", "memory.current"))
    stat = _table(group / "memory.stat")
    slab = stat.get("slab_reclaimable", 0) // 2
    return limit - used + _reclaimable(stat, "") + slab


def _available_1(group: Path) -> int:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, used = (_number(group / name) for name in names)
    return limit - used + _reclaimable(_table(group / "memory.stat"), "total_")


def _reclaimable(stat: dict[str, int], prefix: str) -> int:
    """Returns the bytes of the page cache that the kernel can free at little cost.

    Half of the active pages count, as in the kernel's MemAvailable. Pages that must be
    written to disk first do not count. `prefix` is "total_" for groups of version 1.
    """
    inactive, active = (
        stat.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file")
    )
    names = ("file_dirty", "file_writeback", f"{prefix}dirty", f"{prefix}writeback")
    return max(0, inactive + active // 2 - sum(stat.get(name, 0) for name in names))


def cgroups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yields the control groups that limit this process, and their versions.

    The innermost group comes first. `controller` is "memory", "cpu" or "pids"; groups
    of version 2 form one tree for all controllers.
    """
    with contextlib.suppress(OSError, ValueError):
        own = _own_groups((root / "proc/self/cgroup").read_text(), controller)
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = after.split()[:3]
            version = {"cgroup2": 2, "cgroup": 1}.get(kind, 0)
            if not version or (version == 1 and controller not in options.split(",")):
                continue
            base, mount_point = (_unescaped(word) for word in before.split()[3:5])
            top = root / mount_point.lstrip("/")
            inside = PurePosixPath(own.get(version, "/"))
            # In a container, the path of the group may be outside of the mounted tree.
            # Then the root of the mounted tree is the group of the container.
            if ".." not in inside.parts and inside.is_relative_to(base):
                inside = inside.relative_to(base)
                for part in [inside, *inside.parents]:
                    yield top / part, version
            else:
                yield top, version


def _own_groups(text: str, controller: str) -> dict[int, str]:
    """Returns this process's group path by version, from /proc/self/cgroup."""
    found = {}
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found[2] = path
        elif controller in controllers.split(","):
            found[1] = path
    return found


def _unescaped(word: str) -> str:
    return word.replace("\\040", " ").replace("\\134", "\\")


def _number(file: Path) -> int:
    return int(file.read_text())


def _table(file: Path, suffix: str = "") -> dict[str, int]:
    """Reads a file whose lines are "name number", and removes `suffix` from names."""
    lines = [line.split() for line in file.read_text().splitlines()]
    return {
        words[0].removesuffix(suffix): int(words[1])
        for words in lines
        if len(words) > 1 and words[1].isdigit()
    }
