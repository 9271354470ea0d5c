"""Environment variables: reads ringrun's environment, and makes that of the ranks.

No other module of ringjax/run reads the environment. config.py reads the settings of
ringjax from the dict that `inherited` returns.
"""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
from collections.abc import Mapping, Set
from pathlib import Path

from ringjax import config

# These variables describe one host, and would mislead a program on another host. The
# agent on the other host sets the variables of the user account (`account_variables`).
_ACCOUNT = ("HOME", "LOGNAME", "SHELL", "USER")
_HOST_BOUND = frozenset(
    (*_ACCOUNT, "DISPLAY", "HOSTNAME", "OLDPWD", "PWD", "SHLVL", "TERM", "TMPDIR", "_")
)
_HOST_BOUND_PREFIXES = ("BASH_FUNC_", "SSH_", "XDG_")
# XLA:CPU calls malloc for every result that is not donated. If malloc returns memory to
# the kernel, each page costs a page fault at its next use. These tunables of glibc keep
# memory in the heap. glibc reads them when a program starts, and ignores unknown ones.
_MALLOC = (
    # Pages of 2 MiB are touched in a fraction of the time that pages of 4 KiB take.
    "glibc.malloc.hugetlb=1",
    # Blocks below 32 MiB, the largest limit that every glibc allows, come from the
    # heap. Larger blocks would fragment the heap, so the kernel gets them back.
    "glibc.malloc.mmap_threshold=33554432",
    # The heap does not shrink, so each of its pages is faulted in only once.
    "glibc.malloc.trim_threshold=1099511627776",
)
# Defaults for ranks; the environment of the user has priority.
_DEFAULTS = {
    # Otherwise Python would buffer output to a pipe, and the last lines of a rank that
    # is killed would be lost.
    "PYTHONUNBUFFERED": "1",
    "GLIBC_TUNABLES": ":".join(_MALLOC),
}
_PREFIXES = ("RINGJAX_", "HOROVOD_")
# A rank may start another job. The inner job must not get these variables of the outer
# job, because the inner job has a secret, an elastic mode and ranks of its own.
_SECRETS = ("RINGJAX_SECRET", "RINGJAX_SECRET_FILE")
_OUTER_JOB = ("RINGJAX_ELASTIC", "RINGJAX_SPREAD", "RINGJAX_WORKER", "RINGJAX_MONITOR")
_RANK_VARIABLES = tuple(
    f"{prefix}{name}"
    for prefix in _PREFIXES
    for name in (
        "RANK",
        "SIZE",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
        "HOSTNAME",
        "RENDEZVOUS",
        "JOB",
    )
)


def inherited() -> dict[str, str]:
    return dict(os.environ)


def rank_defaults() -> dict[str, str]:
    """Returns the defaults for ranks that an engine starts."""
    return {name: os.environ.get(name, value) for name, value in _DEFAULTS.items()}


def own_settings() -> dict[str, str]:
    """Returns the settings of ringjax in this environment, for ranks of another job."""
    drop = (*_SECRETS, *_OUTER_JOB, *_RANK_VARIABLES)
    return {
        key: value
        for key, value in os.environ.items()
        if key.startswith(_PREFIXES) and key not in drop
    }


def for_ranks(base: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of all ranks: defaults, then `base`, then `changes`."""
    env = {**_DEFAULTS, **base, **changes}
    for name in (*_SECRETS, *_OUTER_JOB):
        env.pop(name, None)
    return env


def split_for_host(
    env: Mapping[str, str], forwarded: Set[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Selects the variables of ranks that are valid on another host, in two dicts.

    An engine on the other host may replace variables in the first dict. The second one
    contains the variables of ringjax, PYTHONPATH, and the `forwarded` variables (-x).
    """
    portable: dict[str, str] = {}
    ours: dict[str, str] = {}
    for key, value in env.items():
        if key in forwarded or key == "PYTHONPATH" or key.startswith(_PREFIXES):
            ours[key] = value
        elif key not in _HOST_BOUND and not key.startswith(_HOST_BOUND_PREFIXES):
            portable[key] = value
    return portable, ours


def engine_variables() -> dict[str, str]:
    """Returns the variables of this agent that an engine may have set."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith((*_PREFIXES, "PYTHON"))
    }


def account_variables() -> dict[str, str]:
    """Returns the variables with the user, the home and the shell of this process."""
    return {name: os.environ[name] for name in _ACCOUNT if name in os.environ}


def agent_path() -> str:
    """Returns the PYTHONPATH with which an agent, on any host, finds this ringjax."""
    root = Path(config.__file__).resolve().parent.parent
    return _join([str(root), *_paths(os.environ)])


def task_path(base: Mapping[str, str], *, same_python: bool = True) -> str:
    """Returns the PYTHONPATH with which a rank finds the modules of this process.

    Args:
        base: the environment of the ranks.
        same_python: whether the ranks use this Python, which finds its own folders
            without PYTHONPATH. In PYTHONPATH they could hide installed modules.
    """
    own = sysconfig.get_paths()

    def is_own(path: str) -> bool:
        return path in (own["purelib"], own["platlib"]) or path.startswith(
            own["stdlib"]
        )

    others = itertools.filterfalse(is_own, sys.path)
    first = itertools.takewhile(lambda path: not is_own(path), sys.path)
    paths = map(os.path.abspath, first if same_python else others)
    return _join([*filter(os.path.isdir, paths), *_paths(base)])


def library_paths() -> list[str]:
    """Returns the folders of LD_LIBRARY_PATH, which the linker searches first."""
    return [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]


def wants_colour() -> bool:
    """Returns whether NO_COLOR allows colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR")


def _paths(env: Mapping[str, str]) -> list[str]:
    return [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]


def _join(paths: list[str]) -> str:
    return os.pathsep.join(dict.fromkeys(paths))
