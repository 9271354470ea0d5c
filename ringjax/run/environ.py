"""The environment: ringrun's own, and what ranks here and on other hosts get of it.

The only reader of the environment in the launcher. Settings of ringjax themselves are
read by config.py, from what `inherited` returns.
"""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
from collections.abc import Mapping, Set
from pathlib import Path

from ringjax import config

# What describes the first host and would mislead a program on another one.
# The account may be another one there: its agent knows (`account_variables`).
_ACCOUNT = ("HOME", "LOGNAME", "SHELL", "USER")
_HOST_BOUND = frozenset(
    (*_ACCOUNT, "DISPLAY", "HOSTNAME", "OLDPWD", "PWD", "SHLVL", "TERM", "TMPDIR", "_")
)
_HOST_BOUND_PREFIXES = ("BASH_FUNC_", "SSH_", "XDG_")
# XLA:CPU asks malloc for every result that is not donated, and what malloc gave back to
# the kernel is faulted in again, page by page. Only the C library can be told to keep
# it, and only before the program starts; it ignores what it does not know.
_MALLOC = (
    # Pages of 2 MiB are touched in a fraction of the time that pages of 4 KiB take.
    "glibc.malloc.hugetlb=1",
    # Blocks below 32 MiB, the most that every glibc takes here, come from the heap. One
    # without larger blocks fragments little; those go back to the kernel at once.
    "glibc.malloc.mmap_threshold=33554432",
    # And the heap does not shrink, so that it is faulted in once.
    "glibc.malloc.trim_threshold=1099511627776",
)
# What ranks are better off with; whoever starts the job may say otherwise.
_DEFAULTS = {
    # On a pipe Python would hold back output, of all things the last lines.
    "PYTHONUNBUFFERED": "1",
    "GLIBC_TUNABLES": ":".join(_MALLOC),
}
_PREFIXES = ("RINGJAX_", "HOROVOD_")
# Each job makes its own; a job inside a job must not tell the outer one's.
_SECRETS = ("RINGJAX_SECRET", "RINGJAX_SECRET_FILE")
# Nor is it elastic because the outer one is.
_OUTER_JOB = ("RINGJAX_ELASTIC", "RINGJAX_SPREAD", "RINGJAX_WORKER", "RINGJAX_MONITOR")
# And has its own places; by whoever's name.
_RANK_VARIABLES = tuple(
    f"{prefix}{name}"
    for prefix in _PREFIXES
    for name in (
        *("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
        *("HOSTNAME", "RENDEZVOUS", "JOB"),
    )
)


def inherited() -> dict[str, str]:
    """This process's environment."""
    return dict(os.environ)


def rank_defaults() -> dict[str, str]:
    """What ranks are better off with that are started by somebody else than ringrun."""
    return {name: os.environ.get(name, value) for name, value in _DEFAULTS.items()}


def own_settings() -> dict[str, str]:
    """What this process's environment says about ringjax, for another job's ranks."""
    drop = (*_SECRETS, *_OUTER_JOB, *_RANK_VARIABLES)
    return {
        key: value
        for key, value in os.environ.items()
        if key.startswith(_PREFIXES) and key not in drop
    }


def for_ranks(base: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """What all ranks have in their environment."""
    env = {**_DEFAULTS, **base, **changes}
    for name in (*_SECRETS, *_OUTER_JOB):
        env.pop(name, None)
    return env


def split_for_host(
    env: Mapping[str, str], handed_on: Set[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """What of the ranks' environment another host gets: what makes sense there.

    Returns:
        What an engine there may know better; and what holds whatever it says, which is
        ringjax's own, how modules are found, and what the user hands on.
    """
    portable: dict[str, str] = {}
    ours: dict[str, str] = {}
    for key, value in env.items():
        if key in handed_on or key == "PYTHONPATH" or key.startswith(_PREFIXES):
            ours[key] = value
        elif key not in _HOST_BOUND and not key.startswith(_HOST_BOUND_PREFIXES):
            portable[key] = value
    return portable, ours


def engine_variables() -> dict[str, str]:
    """What the engine that has started this agent wants its processes to have."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith((*_PREFIXES, "PYTHON"))
    }


def account_variables() -> dict[str, str]:
    """The variables that name the user of this process, the home and the shell."""
    return {name: os.environ[name] for name in _ACCOUNT if name in os.environ}


def agent_path() -> str:
    """PYTHONPATH with which an agent finds this ringjax, here or on a like host."""
    root = Path(config.__file__).resolve().parent.parent
    return _join([str(root), *_paths(os.environ)])


def task_path(base: Mapping[str, str], *, alike: bool = True) -> str:
    """PYTHONPATH with which a rank finds the modules that this process has found.

    Args:
        base: the environment of the ranks.
        alike: they are of this Python, which finds by itself what comes behind its own
            modules: before them, it would hide some of those that are installed.
    """
    own = sysconfig.get_paths()

    def is_own(path: str) -> bool:
        return path in (own["purelib"], own["platlib"]) or path.startswith(
            own["stdlib"]
        )

    others = itertools.filterfalse(is_own, sys.path)
    first = itertools.takewhile(lambda path: not is_own(path), sys.path)
    paths = map(os.path.abspath, first if alike else others)
    return _join([*filter(os.path.isdir, paths), *_paths(base)])


def library_paths() -> list[str]:
    """Where LD_LIBRARY_PATH makes the linker look first."""
    return [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]


def wants_colour() -> bool:
    """Whether colours on a terminal are welcome (https://no-color.org)."""
    return not os.environ.get("NO_COLOR")


def _paths(env: Mapping[str, str]) -> list[str]:
    return [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]


def _join(paths: list[str]) -> str:
    return os.pathsep.join(dict.fromkeys(paths))
