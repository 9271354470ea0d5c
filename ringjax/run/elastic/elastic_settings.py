"""Checks the options of an elastic job, and converts them to `ElasticSettings`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ringjax.run.hosts.slots import HostSlots

UNBOUNDED = 1 << 16  # stands for `max_np` if only the slots of the hosts are a limit
# Arguments of `ringjax.run` that static jobs do not have.
_ELASTIC = (
    "max_np",
    "spares",
    "slots",
    "elastic_timeout",
    "reset_limit",
    "cooldown_range",
)
# The names of the arguments of `ringjax.run`, for error texts.
_NAMES = {
    **{name: name for name in ("np", "min_np", *_ELASTIC)},
    "script": "host_discovery_script",
}


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """The options that define the hosts and the numbers of ranks; see `ringjax.run`.

    An option that the user has not given is None. `names` maps each option to its name
    on the command line or in `ringjax.run`, for error texts.
    """

    np: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    script: str | None = None
    min_np: int | None = None
    max_np: int | None = None
    spares: int | None = None
    slots: int | None = None
    elastic_timeout: float | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[float] | None = None
    names: Mapping[str, str] = field(default_factory=lambda: _NAMES)

    @property
    def elastic(self) -> bool:
        return self.min_np is not None or self.script is not None


@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """The limits of an elastic job. `ringjax.run` documents fields with equal names.

    Attributes:
        np: number of workers at the start. None means one worker for each slot. hosts:
        the hosts of the workers. None if a script or a listener finds the hosts.
        cooldown: least and most seconds that a host stays on the blacklist. group:
        number of workers that are started, lost and admitted together. spares: number
        of processes beyond `max_np` that wait until a rank is lost.
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
    spares: int = 0

    def initial_size(self, slots: int) -> int:
        """Returns how many workers to start in `slots` slots, in complete groups."""
        count = min(self.np or self.max_np, slots)
        return count - count % self.group

    @property
    def uses_blacklist(self) -> bool:
        """Whether the job puts hosts on which workers fail on a blacklist."""
        return bool(self.script) or self.cooldown is not None


def refuse_elastic_options(options: SizeOptions, *, listens: bool) -> None:
    """Raises ValueError if a static job has options of elastic jobs.

    The error names all options that only elastic jobs have. With `listens`, a static
    job may use an elastic timeout, which limits how long ringrun waits for hosts.
    """
    names = options.names
    given = [key for key in _ELASTIC if getattr(options, key) is not None]
    if listens and "elastic_timeout" in given:
        given.remove("elastic_timeout")
    if given:
        raise ValueError(
            f"{', '.join(names[key] for key in given)}: only for elastic jobs; add "
            f"{names['min_np']} or {names['script']}"
        )


def _check_script(options: SizeOptions, hosts: Sequence[HostSlots] | None) -> None:
    names, script = options.names, options.script
    if script is not None and not script.strip():
        raise ValueError(f"{names['script']}: no command given")
    if script is not None and hosts is not None:
        raise ValueError(f"{names['script']}: it finds the hosts; do not give others")
    if script is None and options.slots is not None:
        raise ValueError(f"{names['slots']}: only for hosts that a script finds")


def resolve_settings(
    options: SizeOptions,
    hosts: Sequence[HostSlots] | None = None,
    *,
    listens: bool = False,
    group: int = 1,
) -> ElasticSettings:
    """Checks the options of an elastic job and adds the defaults.

    Args:
        hosts: the hosts that the user or a batch system has given, if any.
        listens: whether hosts join by `ringrun --join`.

    Raises ValueError if some options contradict each other; the text names them.

    Example:
        >>> resolve_settings(SizeOptions(np=4, min_np=2)).max_np
        4
    """
    names, np, script = options.names, options.np, options.script
    min_np, max_np, spares = options.min_np, options.max_np, options.spares or 0
    if spares < 0:
        raise ValueError(f"{names['spares']} {spares}: less than 0")
    _check_script(options, hosts)
    if listens:
        np = np or min_np
    elif script is None and hosts is None:
        if np is None:
            raise ValueError(f"{names['np']}: say how many processes to start")
        hosts = [HostSlots("localhost", max(np, max_np or np) + spares)]
    available = None if hosts is None else sum(host.slots for host in hosts)
    sizes = {"np": np, "min_np": min_np, "max_np": max_np, "spares": spares}
    for name, asked in sizes.items():
        check_group_multiple(asked, group, names[name])
    least = min_np if min_np is not None else np if np is not None else group
    if max_np is not None:
        most = max_np
    elif available is None:
        most = UNBOUNDED
    else:
        most = np if np is not None else available - spares
    most -= most % group
    first = np
    if np is None and available is not None:
        room = available - spares
        first = min(most, room - room % group)
        if first < group:
            raise ValueError(f"a group of {group}: there are {available} slots")
    _check_numbers(np, least, most, available, names)
    _check_spares(spares, most, available, names)
    return ElasticSettings(
        np=first,
        min_np=least,
        max_np=most,
        hosts=hosts,
        script=script or "",
        slots=options.slots or 1,
        reset_limit=options.reset_limit,
        cooldown=_cooldown(options.cooldown_range, names),
        group=group,
        spares=spares,
    )


def check_group_multiple(number: int | None, group: int, name: str) -> None:
    """Raises ValueError if the option `name` is not a multiple of the group size."""
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


def _check_spares(
    spares: int, most: int, slots: int | None, names: Mapping[str, str]
) -> None:
    """Raises ValueError if the ranks would leave no slot for some of the spares."""
    given = f"{names['spares']} {spares}"
    if spares and most >= UNBOUNDED - 1:
        raise ValueError(
            f"{given}: every process would become a rank; give {names['max_np']}"
        )
    if spares and slots is not None and most + spares > slots:
        raise ValueError(
            f"{given}: with {most} ranks more processes than slots; there are {slots}"
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
