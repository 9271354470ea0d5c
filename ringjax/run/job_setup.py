"""A job from what somebody asked for, on the command line or in Python.

Which hosts, how many ranks, elastic or not: decided here, run by job.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

from ringjax.config import Config
from ringjax.run.console import Console
from ringjax.run.elastic import elastic_settings
from ringjax.run.hosts import allocations
from ringjax.run.hosts import slots as places
from ringjax.run.hosts.job_spec import JobSpec
from ringjax.run.job import Job
from ringjax.run.monitor.wanted import monitor_options

# A program of ours in which rank 0 prints what all ranks have measured.
_RINGJAX_BENCH = ("-m", "ringjax.bench")
# What the arguments are called in Python.
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
    """The hosts that were asked for or that we have been given; None: this one.

    An allocation of one host may have more processes than slots, if `np` says so.

    Raises:
        ValueError: saying what cannot be read.
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
    """The slots of a job, from what was asked for or from the allocation.

    Raises:
        ValueError: saying what cannot be read or does not fit.
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
    """Hosts come by themselves; those that are named are there besides.

    Raises:
        ValueError: it is asked for what does not go together.
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
    directory: str | None = None,
    timestamps: bool = False,
    python: bool = False,
    variables: Mapping[str, str] | None = None,
    names: Mapping[str, str] = _NAMES,
    **elastic: Any,
) -> Job:
    """The job, not started yet.

    Args:
        spec: what to run.
        config: what the environment and the options say.
        np: number of ranks.
        hosts, hostfile, script: where they run, one of these.
        min_np: makes the job elastic, as a script does.
        max_np: the most ranks of an elastic job.
        directory, timestamps, python: see `Console`.
        variables: the environment that may tell of an allocation.
        names: what the arguments of elastic jobs are called where they were given.
        elastic: the others of them, see `elastic_settings.resolve_settings`.

    Raises:
        ValueError: saying what does not fit together.
    """
    # Where ringrun reports, no rank does.
    quiet = {"RINGJAX_REPORT": "0"} if config.report else {}
    spec = dataclasses.replace(
        spec, monitor=monitor_options(config), env={**spec.env, **quiet}
    )
    if spec.stdin and (min_np is not None or script is not None):
        raise ValueError("--stdin 0: not in an elastic job, where rank 0 may be lost")
    waits = elastic.pop("elastic_timeout", None)
    listens = spec.listening is not None
    if listens:
        spec = _with_static_hosts(spec, script, hosts, hostfile)
        hosts = hostfile = None
    console = partial(Console, directory=directory, timestamps=timestamps)
    if min_np is None and script is None:
        refused = {**elastic, "max_np": max_np}
        elastic_settings.refuse_elastic_options(
            {**refused, "elastic_timeout": None if listens else waits}, names
        )
        if not listens:
            slots = requested_slots(np, hosts, hostfile, variables or {})
            elastic_settings.check_group_multiple(
                len(slots), config.group_size, names["np"]
            )
            if spec.stdin and not places.is_local(slots[0].host):
                where = slots[0].host
                raise ValueError(f"--stdin 0: rank 0 is on another host, {where}")
            plain = _RINGJAX_BENCH in itertools.pairwise(spec.command)
            spec = dataclasses.replace(spec, slots=slots)
            return Job(spec, console(len(slots), python=python, plain=plain))
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
        names=names,
        **elastic,
    )
    return Job(
        spec,
        console(change.np or change.min_np, python=python),
        elastic=change,
        elastic_timeout=config.elastic_timeout,
        failure_timeout=config.failure_timeout,
    )
