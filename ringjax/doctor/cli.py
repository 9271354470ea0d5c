"""`ringjax doctor`: the command line, and what happens in which order."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from ringjax import stderr, stdout
from ringjax.doctor import report
from ringjax.doctor.checks import CHECKS
from ringjax.doctor.findings import FAIL, JobContext
from ringjax.doctor.report import Row
from ringjax.doctor.survey import HostSurvey, spec_of
from ringjax.errors import RingjaxError
from ringjax.run import environ
from ringjax.run.hosts import allocations, slots
from ringjax.run.hosts.job_spec import check_agent_command
from ringjax.run.job_setup import requested_hosts
from ringjax.run.option_types import devices

_EPILOG = """
Looks at every host in the way in which ringrun would start ranks there, and tells what
would keep a job from starting or from being fast: ok, warn or FAIL, and the command
that mends it. It ends with a real job of three seconds. The exit code is 1 if there is
a FAIL, 2 if nothing could be looked at.
"""


def parser() -> argparse.ArgumentParser:
    """The options; those that ringrun has are ringrun's."""
    found = argparse.ArgumentParser(
        prog="ringjax doctor",
        description="What would keep a job from running well here?",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    add = found.add_argument
    add("-np", "-n", "--num-proc", dest="np", type=int, metavar="N", help="ranks")
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="where they would run (here)")
    add("-hostfile", "--hostfile", metavar="FILE", help="the same from a file")
    add("-p", "--ssh-port", type=int, metavar="PORT")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    add("--network-interfaces", "--network-interface", metavar="NAME,...")
    add("--devices-per-rank", type=devices, metavar="N", help="of CUDA")
    add("--agent-command", default="", metavar="COMMAND", help="see ringrun --help")
    add("--no-trial", action="store_true", help="without the job at the end")
    add("--json", action="store_true", help="for programs")
    return found


def _places(args: argparse.Namespace) -> list[slots.HostSlots]:
    """The hosts, with as many ranks as they would have."""
    variables = environ.inherited()
    found = requested_hosts(args.hosts, args.hostfile, variables, args.np)
    if found is None:
        # As many as a first job would have.
        usual = max(1, min(2, len(os.sched_getaffinity(0))))
        return [slots.HostSlots("localhost", args.np or usual)]
    if args.np is None:
        return found
    ranks = [slot.host for slot in slots.assign_slots(found, args.np)]
    return [
        slots.HostSlots(h.name, ranks.count(h.name)) for h in found if h.name in ranks
    ]


def _words(args: argparse.Namespace, places: Sequence[slots.HostSlots]) -> list[str]:
    """How ringrun is told the same."""
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
    """Asks all hosts, runs all checks and, if nothing has failed, the job."""
    variables, places = environ.inherited(), _places(args)
    changes = {}
    if args.network_interfaces:
        changes["RINGJAX_NETWORK_INTERFACES"] = args.network_interfaces
    if args.devices_per_rank:
        changes["RINGJAX_DEVICES_PER_RANK"] = args.devices_per_rank
    spec = spec_of(
        variables,
        changes,
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
    if not args.no_trial and report.worst(rows) != FAIL:
        from ringjax.doctor import trial  # numpy and the native core, if they load

        rows += [("trial", "", f) for f in trial.run(words, variables)]
    return rows, job


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: 0, 1 if something fails, 2 if nothing could be looked at."""
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
            print(json.dumps(report.as_dict(rows, job), indent=1))
        else:
            colour = sys.stdout.isatty() and environ.wants_colour()
            print(report.table(rows, job, colour=colour))
    return int(report.worst(rows) == FAIL)


if __name__ == "__main__":
    sys.exit(main())
