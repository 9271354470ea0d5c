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
from ringjax.settings import same_bits

# Variables that describe one host and would mislead a program on another host. The
# agent on the other host sets the variables of the user's account
# (`account_variables`).
_ACCOUNT = ("HOME", "LOGNAME", "SHELL", "USER")
_HOST_BOUND = frozenset(
    (*_ACCOUNT, "DISPLAY", "HOSTNAME", "OLDPWD", "PWD", "SHLVL", "TERM", "TMPDIR", "_")
)
_HOST_BOUND_PREFIXES = ("BASH_FUNC_", "SSH_", "XDG_")
# XLA:CPU calls malloc for every result that is not donated. If malloc returned the
# memory to the kernel, each page would cost a page fault at its next use. These
# tunables of glibc keep memory in the heap. glibc reads them when a program starts, and
# ignores tunables that it does not know.
_MALLOC = (
    # Touching pages of 2 MiB takes a fraction of the time of pages of 4 KiB.
    "glibc.malloc.hugetlb=1",
    # Allocate blocks below 32 MiB, the largest limit that every glibc allows, in the
    # heap. Larger blocks would fragment the heap, so malloc returns them to the kernel.
    "glibc.malloc.mmap_threshold=33554432",
    # The heap does not shrink, so each of its pages is faulted in only once.
    "glibc.malloc.trim_threshold=1099511627776",
)
# Default variables of the ranks. The user's environment takes precedence.
_DEFAULTS = {
    # Otherwise Python would buffer output to a pipe, and the last lines of a killed
    # rank would be lost.
    "PYTHONUNBUFFERED": "1",
    "GLIBC_TUNABLES": ":".join(_MALLOC),
}
_PREFIXES = ("RINGJAX_", "HOROVOD_")
# A rank may start another job. That inner job must not inherit these variables of the
# outer job, because it has a secret, an elastic mode and ranks of its own.
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
    """Returns the default variables for ranks that an engine starts."""
    return {name: os.environ.get(name, value) for name, value in _DEFAULTS.items()}


def own_settings() -> dict[str, str]:
    """Returns ringjax's settings in this environment, for the ranks of another job."""
    drop = (*_SECRETS, *_OUTER_JOB, *_RANK_VARIABLES)
    return {
        key: value
        for key, value in os.environ.items()
        if key.startswith(_PREFIXES) and key not in drop
    }


def for_ranks(base: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of all ranks: defaults, then `base`, then `changes`.

    Raises ValueError if RINGJAX_SAME_BITS contradicts another variable.
    """
    env = {**_DEFAULTS, **base, **changes}
    # Only this setting: the ranks report mistakes in others.
    name = "RINGJAX_SAME_BITS"
    if config.Config.from_env({name: env.get(name, "")}).same_bits:
        env |= same_bits.variables(env)
    for name in (*_SECRETS, *_OUTER_JOB):
        env.pop(name, None)
    return env


def split_for_host(
    env: Mapping[str, str], forwarded: Set[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Splits the variables of ranks that are valid on another host into two dicts.

    On the other host, variables of an engine take precedence over the first dict. The
    second dict contains ringjax's variables, PYTHONPATH, and the `forwarded` ones (-x).
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
    """Returns those variables of this agent that an engine may have set."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith((*_PREFIXES, "PYTHON"))
    }


def account_variables() -> dict[str, str]:
    """Returns the variables that name the user, the home folder and the shell."""
    return {name: os.environ[name] for name in _ACCOUNT if name in os.environ}


def agent_path() -> str:
    """Returns a PYTHONPATH by which an agent on any host finds this ringjax."""
    root = Path(config.__file__).resolve().parent.parent
    return _join([str(root), *_paths(os.environ)])


def task_path(base: Mapping[str, str], *, same_python: bool = True) -> str:
    """Returns a PYTHONPATH by which a rank finds the modules of this process.

    Args:
        base: the environment of the ranks.
        same_python: whether the ranks use this Python, which finds its own folders
            without PYTHONPATH. In PYTHONPATH these folders could hide installed
            modules.
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
    """Returns the folders in LD_LIBRARY_PATH, which the linker searches first."""
    return [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]


def wants_colour() -> bool:
    """Returns whether colors are allowed: NO_COLOR forbids them (no-color.org)."""
    return not os.environ.get("NO_COLOR")


def _paths(env: Mapping[str, str]) -> list[str]:
    return [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]


def _join(paths: list[str]) -> str:
    return os.pathsep.join(dict.fromkeys(paths))
