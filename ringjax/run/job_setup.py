"""Makes a `Job` from the options of ringrun or the arguments of `ringjax.run`.

Chooses the hosts and the number of ranks, and decides whether the job is elastic.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping

from ringjax.run.console import Console
from ringjax.run.elastic.elastic_settings import (
    SizeOptions,
    check_group_multiple,
    refuse_elastic_options,
    resolve_settings,
)
from ringjax.run.hosts import allocations
from ringjax.run.hosts import slots as places
from ringjax.run.hosts.job_spec import JobSpec
from ringjax.run.job import Job

# Rank 0 of ringjax.bench prints one table for all ranks, so it needs no prefix.
_RINGJAX_BENCH = ("-m", "ringjax.bench")


def requested_hosts(
    host_list: str | None,
    hostfile: str | None,
    variables: Mapping[str, str],
    np: int | None,
) -> list[places.HostSlots] | None:
    """Returns the hosts that the user or a batch system has listed, or None.

    If the allocation in `variables` has one host, that host gets `np` slots, because
    one host may run more processes than it has slots.

    Raises ValueError if a list, a file or a variable cannot be read.
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
    """Returns the slots of a static job on the requested hosts.

    Raises:
        ValueError: a list, a file or a variable cannot be read, or has too few slots.
    """
    found = requested_hosts(host_list, hostfile, variables, np)
    if found is None:
        if np is None:
            raise ValueError("-np: say how many processes to start")
        found = [places.HostSlots("localhost", np)]
    return places.assign_slots(found, np or sum(host.slots for host in found))


def _with_static_hosts(spec: JobSpec, options: SizeOptions) -> JobSpec:
    """Adds the hosts of -H to the options of --listen.

    Raises ValueError if an option cannot be used with --listen.
    """
    assert spec.listening is not None
    if options.script is not None:
        raise ValueError("--listen: hosts come by themselves; give no script")
    if spec.stdin:
        raise ValueError("--stdin 0: not with --listen, nobody knows where rank 0 is")
    static = requested_hosts(options.hosts, options.hostfile, {}, None) or ()
    return dataclasses.replace(
        spec, listening=dataclasses.replace(spec.listening, static_hosts=static)
    )


def make_job(
    spec: JobSpec,
    options: SizeOptions,
    make_console: Callable[..., Console] = Console,
    variables: Mapping[str, str] | None = None,
) -> Job:
    """Makes a job without starting it.

    Args:
        spec: the specification, without the hosts.
        make_console: makes a `Console` from the number of ranks. variables: the
        environment, which may describe a batch system's allocation.

    Raises ValueError if some options contradict each other; the text names them.
    """
    config = spec.config
    # If ringrun prints reports, the ranks must not print them again.
    quiet = {"RINGJAX_REPORT": "0"} if config.report else {}
    spec = dataclasses.replace(spec, env={**spec.env, **quiet})
    if spec.stdin and options.elastic:
        raise ValueError("--stdin 0: not in an elastic job, where rank 0 may be lost")
    listens = spec.listening is not None
    if listens:
        spec = _with_static_hosts(spec, options)
    np, hosts, hostfile = options.np, options.hosts, options.hostfile
    group, name = config.group_size, options.names["np"]
    if not options.elastic:
        refuse_elastic_options(options, listens=listens)
        if not listens:
            ranks = requested_slots(np, hosts, hostfile, variables or {})
            check_group_multiple(len(ranks), group, name)
            if spec.stdin and not places.is_local(ranks[0].host):
                where = ranks[0].host
                raise ValueError(f"--stdin 0: rank 0 is on another host, {where}")
            plain = _RINGJAX_BENCH in itertools.pairwise(spec.command)
            spec = dataclasses.replace(spec, slots=ranks)
            return Job(spec, make_console(len(ranks), plain=plain))
        if np is None:
            raise ValueError("--listen: say how many processes to start: -np")
        check_group_multiple(np, group, name)
        return Job(spec, make_console(np), np)
    given = None
    if not listens and not (options.script is not None and hosts is hostfile is None):
        most = options.max_np or np
        # The spares need slots, too, if one host may run more processes than it has.
        count = most and most + (options.spares or 0)
        given = requested_hosts(hosts, hostfile, variables or {}, count)
    elastic = resolve_settings(options, given, listens=listens, group=group)
    return Job(spec, make_console(elastic.np or elastic.min_np), elastic=elastic)
