"""What somebody asks of an elastic job: how few, how many, on which hosts.

Turns options into one record and says what does not fit together; nothing runs here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringjax.run.hosts.slots import HostSlots

UNBOUNDED = 1 << 16  # as many as the hosts have slots
# What an elastic job alone understands, by the names of Python's arguments.
ELASTIC_OPTIONS = (
    "max_np",
    "slots",
    "elastic_timeout",
    "reset_limit",
    "cooldown_range",
)


@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """How an elastic job may change.

    Attributes:
        np: workers to start with; None: as many as the hosts have slots.
        min_np, max_np: least and most workers.
        hosts: where they run; None: a script finds the hosts.
        script: that script.
        slots: of a host that it names without a number.
        reset_limit: how often the members may change, None: without limit.
        cooldown: least and most seconds that a host stays on the blacklist.
        group: so many workers are started, lost and admitted together.
    """

    np: int | None
    min_np: int
    max_np: int
    hosts: Sequence[HostSlots] | None = None
    script: str = ""
    slots: int = 1
    reset_limit: int | None = None
    cooldown: tuple[float, float] | None = None
    group: int = 1

    @property
    def coordinator_options(self) -> dict[str, int]:
        """What the coordinator has to know."""
        return {"min_np": self.min_np, "max_np": self.max_np, "group": self.group}

    def initial_size(self, places: int) -> int:
        """How many workers begin where there are so many places: whole groups."""
        count = min(self.np or self.max_np, places)
        return count - count % self.group

    @property
    def uses_blacklist(self) -> bool:
        """Whether hosts are held to account when their workers fail."""
        return bool(self.script) or self.cooldown is not None


def refuse_elastic_options(given: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Refuse options of elastic jobs for a job that is none.

    Args:
        given: the arguments by their names, None: not given.
        names: what they are called where they were given.

    Raises:
        ValueError: naming them.
    """
    found = [names[key] for key in ELASTIC_OPTIONS if given.get(key) is not None]
    if found:
        raise ValueError(
            f"{', '.join(found)}: only for elastic jobs; add {names['min_np']} or "
            f"{names['script']}"
        )


def resolve_settings(
    *,
    np: int | None,
    min_np: int | None = None,
    max_np: int | None = None,
    hosts: Sequence[HostSlots] | None = None,
    script: str | None = None,
    listens: bool = False,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    group: int = 1,
    names: Mapping[str, str],
) -> ElasticSettings:
    """The record of what was asked for; `listens`: hosts come by themselves.

    Raises:
        ValueError: something does not fit together; it is named by `names`.

    Example:
        >>> names = {"min_np": "--min-np", "max_np": "--max-np", "np": "-np"}
        >>> resolve_settings(np=4, min_np=2, names=names).max_np
        4
    """
    if script is not None and not script.strip():
        raise ValueError(f"{names['script']}: no command given")
    if script is not None and hosts is not None:
        raise ValueError(f"{names['script']}: it finds the hosts; do not give others")
    if script is None and slots is not None:
        raise ValueError(f"{names['slots']}: only for hosts that a script finds")
    if listens:
        np = np or min_np
    elif script is None and hosts is None:
        if np is None:
            raise ValueError(f"{names['np']}: say how many processes to start")
        hosts = [HostSlots("localhost", max(np, max_np or np))]
    available = None if hosts is None else sum(host.slots for host in hosts)
    for name, asked in (("np", np), ("min_np", min_np), ("max_np", max_np)):
        check_group_multiple(asked, group, names[name])
    least = min_np if min_np is not None else np if np is not None else group
    if max_np is not None:
        most = max_np
    elif available is None:
        most = UNBOUNDED
    else:
        most = np if np is not None else available
    most -= most % group
    first = np
    if np is None and available is not None:
        first = min(most, available - available % group)
        if first < group:
            raise ValueError(f"a group of {group}: there are {available} slots")
    _check_numbers(np, least, most, available, names)
    return ElasticSettings(
        np=first,
        min_np=least,
        max_np=most,
        hosts=hosts,
        script=script or "",
        slots=slots or 1,
        reset_limit=reset_limit,
        cooldown=_cooldown(cooldown_range, names),
        group=group,
    )


def check_group_multiple(number: int | None, group: int, name: str) -> None:
    """Refuse a number of processes that is not one of whole groups.

    Args:
        number: None: not given.
        name: where it was given.

    Raises:
        ValueError: naming it.

    Example:
        >>> check_group_multiple(6, 3, "-np")
    """
    if number is not None and number % group:
        raise ValueError(
            f"{name} {number}: with groups of {group} (--group-size, "
            f"RINGJAX_GROUP_SIZE) it must be a multiple of {group}"
        )


def _check_numbers(
    np: int | None, least: int, most: int, slots: int | None, names: Mapping[str, str]
) -> None:
    if np is not None and least > np:
        raise ValueError(f"{names['min_np']} {least}: more than {names['np']} {np}")
    for name, asked in (("min_np", least), ("np", np)):
        if slots is not None and asked is not None and asked > slots:
            raise ValueError(
                f"{names[name]} {asked}: more processes than slots; there are {slots}"
            )
    if np is not None and most < np:
        raise ValueError(f"{names['max_np']} {most}: less than {names['np']} {np}")
    if most < least:
        raise ValueError(
            f"{names['max_np']} {most}: less than {names['min_np']} {least}"
        )


def _cooldown(
    seconds: Sequence[float] | None, names: Mapping[str, str]
) -> tuple[float, float] | None:
    if seconds is None:
        return None
    values = tuple(float(value) for value in seconds)
    if len(values) != 2 or not 0 < values[0] <= values[1] < float("inf"):
        shown = " ".join(f"{value:g}" for value in values)
        raise ValueError(
            f"{names['cooldown_range']} {shown}: give two numbers of seconds, the "
            "least and the most, such as 10 60"
        )
    return values[0], values[1]
