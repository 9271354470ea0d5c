"""The command line of `ringjax doctor`, which also decides the order of the checks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from ringjax import stderr, stdout
from ringjax.config import Config
from ringjax.doctor.checks import CHECKS
from ringjax.doctor.findings import FAIL, JobContext, Row, as_dict, table, worst
from ringjax.doctor.survey import HostSurvey
from ringjax.errors import RingjaxError
from ringjax.run import environ
from ringjax.run.hosts import allocations, slots
from ringjax.run.hosts.job_spec import JobSpec, check_agent_command
from ringjax.run.job_setup import requested_hosts
from ringjax.run.options import devices

_EPILOG = """
ringjax doctor starts checks on every host in the way in which ringrun would start ranks
there. For each check it prints ok, warn (a job would be slow) or FAIL (a job would not
start), and a command that mends the problem. At the end it runs a real job for three
seconds. The exit code is 1 if there is a FAIL, and 2 if no check could run.
"""


def parser() -> argparse.ArgumentParser:
    """Makes the parser. Options that ringrun has, too, have ringrun's meaning."""
    found = argparse.ArgumentParser(
        prog="ringjax doctor",
        description="Check whether a job would start and run well here.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    add = found.add_argument
    ringrun = "see ringrun --help"
    add("-np", "-n", "--num-proc", dest="np", type=int, metavar="N", help=ringrun)
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="check these hosts (localhost)")
    add("-hostfile", "--hostfile", metavar="FILE", help="read the hosts from a file")
    add("-p", "--ssh-port", type=int, metavar="PORT", help=ringrun)
    add("-i", "--ssh-identity-file", metavar="FILE", help=ringrun)
    interfaces = ("--network-interfaces", "--network-interface")
    add(*interfaces, metavar="NAME,...", help=ringrun)
    add("--devices-per-rank", type=devices, metavar="N", help=ringrun)
    add("--agent-command", default="", metavar="COMMAND", help=ringrun)
    add("--no-trial", action="store_true", help="do not run the job at the end")
    add("--json", action="store_true", help="print JSON, for programs")
    return found


def _places(args: argparse.Namespace) -> list[slots.HostSlots]:
    """Returns the hosts of the job, each with the number of ranks it would run."""
    variables = environ.inherited()
    found = requested_hosts(args.hosts, args.hostfile, variables, args.np)
    if found is None:
        # A user's first job probably has two ranks, if this machine has two CPUs.
        usual = max(1, min(2, len(os.sched_getaffinity(0))))
        return [slots.HostSlots("localhost", args.np or usual)]
    if args.np is None:
        return found
    ranks = [slot.host for slot in slots.assign_slots(found, args.np)]
    return [
        slots.HostSlots(h.name, ranks.count(h.name)) for h in found if h.name in ranks
    ]


def _words(args: argparse.Namespace, places: Sequence[slots.HostSlots]) -> list[str]:
    """Returns the options of the ringrun command that starts the trial job."""
    words = ["-np", str(sum(host.slots for host in places))]
    if args.hosts or args.hostfile:
        each = (f"[{h.name}]" if ":" in h.name else h.name for h in places)
        pairs = zip(each, places, strict=True)
        words += ["-H", ",".join(f"{name}:{h.slots}" for name, h in pairs)]
    for option in (
        "ssh_port",
        "ssh_identity_file",
        "network_interfaces",
        "devices_per_rank",
        "agent_command",
    ):
        value = getattr(args, option)
        if value:
            words += [f"--{option.replace('_', '-')}", str(value)]
    return words


def examine(args: argparse.Namespace) -> tuple[list[Row], JobContext]:
    """Runs the checks of hosts and of the job, then a trial job if no check failed."""
    variables, places = environ.inherited(), _places(args)
    changes = {}
    if args.network_interfaces:
        changes["RINGJAX_NETWORK_INTERFACES"] = args.network_interfaces
    if args.devices_per_rank:
        changes["RINGJAX_DEVICES_PER_RANK"] = args.devices_per_rank
    spec = JobSpec(
        command=(),
        env=environ.for_ranks(variables, changes),
        config=Config(start_timeout=10.0),
        ssh_port=args.ssh_port,
        ssh_identity_file=args.ssh_identity_file,
        allocation=allocations.find_readable(variables),
        agent_command=args.agent_command and check_agent_command(args.agent_command),
    )
    survey = HostSurvey(places, spec)
    words = _words(args, places)
    local = survey.is_local()
    job = JobContext(reports=survey.run(), is_local=local)
    rows: list[Row] = []
    for check in CHECKS:
        for found in job.reports.values():
            rows += [
                (check.name, found.name, f) for f in found.findings.get(check.name, ())
            ]
        if check.of_job is not None:
            rows += [(check.name, host, f) for host, f in check.of_job(job)]
    if not args.no_trial and worst(rows) != FAIL:
        from ringjax.doctor import trial  # the import needs numpy and the native core

        rows += [("trial", "", f) for f in trial.run(words, variables)]
    return rows, job


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `ringjax doctor`. Returns 0, 1 after a FAIL, or 2 if no check could run."""
    args = parser().parse_args(argv)
    try:
        rows, job = examine(args)
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError, RingjaxError) as error:
        stderr.line(f"ringjax doctor: {error}")
        return 2
    with stdout.until_closed():
        if args.json:
            print(json.dumps(as_dict(rows, job), indent=1))
        else:
            colour = sys.stdout.isatty() and environ.wants_colour()
            print(table(rows, job, colour=colour))
    return int(worst(rows) == FAIL)


if __name__ == "__main__":
    sys.exit(main())
