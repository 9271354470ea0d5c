"""Makes a `Job` from the options of ringrun or the arguments of `ringjax.run`.

Decides on the hosts, on the number of ranks, and whether the job is elastic.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import partial

from ringjax.config import Config
from ringjax.run.console import Console
from ringjax.run.elastic import elastic_settings
from ringjax.run.hosts import allocations
from ringjax.run.hosts import slots as places
from ringjax.run.hosts.job_spec import JobSpec
from ringjax.run.job import Job
from ringjax.run.monitor.options import monitor_options

# In this program rank 0 prints one table for all ranks, so the table gets no prefix.
_RINGJAX_BENCH = ("-m", "ringjax.bench")
# Names of the arguments in Python, for error texts.
_NAMES = {
    **{
        key: key
        for key in ("np", "min_np", "max_np", *elastic_settings.ELASTIC_OPTIONS)
    },
    "script": "host_discovery_script",
}


def requested_hosts(
    host_list: str | None,
    hostfile: str | None,
    variables: Mapping[str, str],
    np: int | None,
) -> list[places.HostSlots] | None:
    """Returns the hosts that the user or a batch system has given, or None.

    Args:
        variables: the environment, which may describe an allocation.
        np: number of ranks. If the allocation has one host, that host gets `np` slots,
            because more processes than slots are allowed on one host.

    Raises:
        ValueError: a list, a file or a variable cannot be read.
    """
    if host_list is not None and hostfile is not None:
        raise ValueError("-H and --hostfile: give only one of them")
    if host_list is not None:
        return places.merge_aliases(places.parse_hosts(host_list))
    if hostfile is not None:
        return places.merge_aliases(places.parse_hostfile(hostfile))
    found = allocations.find(variables)
    if found is None or len(found.hosts) > 1:
        return None if found is None else list(found.hosts)
    return [places.HostSlots(found.hosts[0].name, np or found.hosts[0].slots)]


def requested_slots(
    np: int | None,
    host_list: str | None,
    hostfile: str | None,
    variables: Mapping[str, str],
) -> list[places.SlotInfo]:
    """Returns the slots of a static job, see `requested_hosts`.

    Raises:
        ValueError: a list, a file or a variable cannot be read, or has too few slots.
    """
    found = requested_hosts(host_list, hostfile, variables, np)
    if found is None:
        if np is None:
            raise ValueError("-np: say how many processes to start")
        found = [places.HostSlots("localhost", np)]
    return places.assign_slots(found, np or sum(host.slots for host in found))


def _with_static_hosts(
    spec: JobSpec, script: str | None, host_list: str | None, hostfile: str | None
) -> JobSpec:
    """Puts the hosts of -H into the options of --listen.

    Raises:
        ValueError: an option cannot be used with --listen.
    """
    assert spec.listening is not None
    if script is not None:
        raise ValueError("--listen: hosts come by themselves; give no script")
    if spec.stdin:
        raise ValueError("--stdin 0: not with --listen, nobody knows where rank 0 is")
    static = requested_hosts(host_list, hostfile, {}, None) or ()
    return dataclasses.replace(
        spec, listening=dataclasses.replace(spec.listening, static_hosts=static)
    )


def make_job(
    spec: JobSpec,
    config: Config,
    *,
    np: int | None,
    hosts: str | None = None,
    hostfile: str | None = None,
    script: str | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    slots: int | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    directory: str | None = None,
    timestamps: bool = False,
    python: bool = False,
    variables: Mapping[str, str] | None = None,
    names: Mapping[str, str] = _NAMES,
) -> Job:
    """Makes a job and does not start it.

    Args:
        spec: the specification, without the hosts.
        config: the settings, from the environment and the options.
        np: number of ranks.
        hosts, hostfile, script: at most one of these gives the hosts.
        min_np: the least number of ranks. This argument, or a script, makes the job
            elastic.
        max_np: the most ranks of an elastic job.
        slots, elastic_timeout, reset_limit, cooldown_range: options of elastic jobs,
            see `elastic_settings.resolve_settings`.
        directory, timestamps, python: see `Console`.
        variables: the environment, which may describe an allocation.
        names: names of the arguments of elastic jobs for the user.

    Raises:
        ValueError: some arguments contradict each other; the text names them.
    """
    # If ringrun prints reports, the ranks must not print reports, too.
    quiet = {"RINGJAX_REPORT": "0"} if config.report else {}
    spec = dataclasses.replace(
        spec, monitor=monitor_options(config), env={**spec.env, **quiet}
    )
    if spec.stdin and (min_np is not None or script is not None):
        raise ValueError("--stdin 0: not in an elastic job, where rank 0 may be lost")
    listens = spec.listening is not None
    if listens:
        spec = _with_static_hosts(spec, script, hosts, hostfile)
        hosts = hostfile = None
    console = partial(Console, directory=directory, timestamps=timestamps)
    if min_np is None and script is None:
        refused = {
            "max_np": max_np,
            "slots": slots,
            "elastic_timeout": None if listens else elastic_timeout,
            "reset_limit": reset_limit,
            "cooldown_range": cooldown_range,
        }
        elastic_settings.refuse_elastic_options(refused, names)
        if not listens:
            ranks = requested_slots(np, hosts, hostfile, variables or {})
            elastic_settings.check_group_multiple(
                len(ranks), config.group_size, names["np"]
            )
            if spec.stdin and not places.is_local(ranks[0].host):
                where = ranks[0].host
                raise ValueError(f"--stdin 0: rank 0 is on another host, {where}")
            plain = _RINGJAX_BENCH in itertools.pairwise(spec.command)
            spec = dataclasses.replace(spec, slots=ranks)
            return Job(spec, console(len(ranks), python=python, plain=plain))
        if np is None:
            raise ValueError("--listen: say how many processes to start: -np")
        elastic_settings.check_group_multiple(np, config.group_size, names["np"])
        return Job(spec, console(np), np, elastic_timeout=config.elastic_timeout)
    given = None
    named = script is None or hosts is not None or hostfile is not None
    if named and not listens:
        given = requested_hosts(hosts, hostfile, variables or {}, max_np or np)
    change = elastic_settings.resolve_settings(
        np=np,
        min_np=min_np,
        max_np=max_np,
        hosts=given,
        script=script,
        listens=listens,
        group=config.group_size,
        slots=slots,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        names=names,
    )
    return Job(
        spec,
        console(change.np or change.min_np, python=python),
        elastic=change,
        elastic_timeout=config.elastic_timeout,
        failure_timeout=config.failure_timeout,
    )
