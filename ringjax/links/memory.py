"""How much memory this process could still have: of the machine, and of its cgroups.

Linux counts the files that were read as used memory, but gives them up for whoever
needs some. A container that has read its data set has none free, but all available.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 62


def available(root: Path = Path("/")) -> int:
    """Bytes that this process could still use.

    Args:
        root: where /proc and the control groups are, for tests.
    """
    limits = [_NO_LIMIT]
    with contextlib.suppress(OSError, ValueError):
        limits.append(_table(root / "proc/meminfo", ":")["MemAvailable"] << 10)
    for folder, version in groups(root, "memory"):
        # Not every group has a limit, and the files may go away with the group.
        with contextlib.suppress(OSError, ValueError, KeyError):
            limits.append(_left_2(folder) if version == 2 else _left_1(folder))
    return max(0, min(limits))


def _left_2(group: Path) -> int:
    """What a group of version 2 may take; ValueError if it has no limit."""
    most, used = (_number(group / name) for name in ("memory.max", "memory.current"))
    stat = _table(group / "memory.stat")
    return most - used + _reclaimable(stat, "") + stat.get("slab_reclaimable", 0) // 2


def _left_1(group: Path) -> int:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    most, used = (_number(group / name) for name in names)
    return most - used + _reclaimable(_table(group / "memory.stat"), "total_")


def _reclaimable(stat: dict[str, int], prefix: str) -> int:
    """Bytes of files that can be dropped without slowing the job down much.

    Half of what is in use by somebody counts, as in the kernel's MemAvailable. What has
    to be written to disk first does not count, in either spelling.
    """
    inactive, active = (
        stat.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file")
    )
    names = ("file_dirty", "file_writeback", f"{prefix}dirty", f"{prefix}writeback")
    return max(0, inactive + active // 2 - sum(stat.get(name, 0) for name in names))


def groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The groups that limit this process, from its own up, and their version.

    Args:
        root: where /proc and the control groups are, for tests.
        controller: "memory" or "cpu"; version 2 has one tree for all.
    """
    with contextlib.suppress(OSError, ValueError):
        own = _own_groups((root / "proc/self/cgroup").read_text(), controller)
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = after.split()[:3]
            version = {"cgroup2": 2, "cgroup": 1}.get(kind, 0)
            if not version or (version == 1 and controller not in options.split(",")):
                continue
            base, place = (_unescaped(word) for word in before.split()[3:5])
            top = root / place.lstrip("/")
            inside = PurePosixPath(own.get(version, "/"))
            # In a container the group may be outside of what is mounted: then what is
            # mounted is its own.
            if ".." not in inside.parts and inside.is_relative_to(base):
                inside = inside.relative_to(base)
                for part in [inside, *inside.parents]:
                    yield top / part, version
            else:
                yield top, version


def _own_groups(text: str, controller: str) -> dict[int, str]:
    """The path of our group, by version, from /proc/self/cgroup."""
    found = {}
    for line in text.splitlines():
        number, kinds, path = line.split(":", 2)
        if number == "0" and not kinds:
            found[2] = path
        elif controller in kinds.split(","):
            found[1] = path
    return found


def _unescaped(word: str) -> str:
    return word.replace("\\040", " ").replace("\\134", "\\")


def _number(file: Path) -> int:
    return int(file.read_text())


def _table(file: Path, after_name: str = "") -> dict[str, int]:
    """Lines of a name and a number."""
    lines = [line.split() for line in file.read_text().splitlines()]
    return {
        words[0].removesuffix(after_name): int(words[1])
        for words in lines
        if len(words) > 1 and words[1].isdigit()
    }
