"""`ringrun`: start the ranks of a job, show their output, end with their exit code.

Turns a command line into a job and signals into its end; the work is in job.py. Imports
no jax, so that it starts in a moment.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from ringjax.config import Config
from ringjax.errors import RingjaxError
from ringjax.run import environ, hosts, options
from ringjax.run.job import Job
from ringjax.run.order import Spec
from ringjax.run.output import Console

_HEARD = 0.5  # seconds for the loop to notice a signal, it may hang in a write
_LIMIT = 1.9  # seconds from the first signal to the end, whatever happens


def find_hosts(
    np: int | None,
    host_list: str | None,
    hostfile: str | None,
    environ: Mapping[str, str],
) -> list[hosts.Slot]:
    """The slots of a job, from what was asked for or from the Slurm allocation.

    Raises:
        ValueError: saying what cannot be read or does not fit.
    """
    if host_list is not None and hostfile is not None:
        raise ValueError("-H and --hostfile: give only one of them")
    found: list[hosts.Host] | None
    if host_list is not None:
        found = hosts.parse_hosts(host_list)
    elif hostfile is not None:
        found = hosts.parse_hostfile(hostfile)
    else:
        found = hosts.slurm_hosts(environ)
    if found is None:
        if np is None:
            raise ValueError("-np: say how many processes to start")
        found = [hosts.Host("localhost", np)]
    return hosts.assign(found, np or sum(host.slots for host in found))


class _Signals:
    """SIGINT, SIGTERM and SIGHUP end the job; a second one at once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._first: int | None = None
        self._late = False

    def install(self) -> None:
        """Take over the signals."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            signal.signal(number, self._handle)
        signal.signal(signal.SIGALRM, self._expire)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._late = self._first is not None
        self._first = self._first or number
        self._job.interrupt(number)
        signal.setitimer(signal.ITIMER_REAL, 0.4 if self._late else _HEARD)

    def _expire(self, number: int, frame: FrameType | None) -> None:
        # The loop may hang in a write to a terminal that nobody reads. Then we just
        # die: the agents see it and end the ranks.
        if self._late or not self._job.stopping:
            os._exit(128 + (self._first or number))
        self._late = True
        signal.setitimer(signal.ITIMER_REAL, _LIMIT - _HEARD)


def launch(args: argparse.Namespace) -> int:
    """Run the job that the options describe; returns the exit code.

    Raises:
        ValueError, RingjaxError: it cannot be started.
    """
    base = environ.inherited()
    slots = find_hosts(args.np, args.hosts, args.hostfile, base)
    changes = options.environment(args)
    config = Config.from_env({**base, **changes})
    spec = Spec(
        slots=slots,
        command=args.command,
        env=environ.for_ranks(base, changes),
        start_timeout=config.start_timeout,
        interfaces=[name for name in config.network_interfaces.split(",") if name],
        ssh_port=args.ssh_port,
        ssh_identity_file=args.ssh_identity_file,
        verbose=args.verbose,
    )
    console = Console(
        len(slots),
        directory=args.output_filename,
        timestamps=args.prefix_output_with_timestamp,
    )
    if args.ignored:
        console.note(
            "accepted for Horovod's sake, without effect here: "
            + ", ".join(dict.fromkeys(args.ignored))
        )
    job = Job(spec, console)
    _Signals(job).install()
    outcome = job.run()
    if outcome.reason:
        console.note(outcome.reason)
    return outcome.exit_code


def version() -> str:
    """ringjax's version, as --version prints it."""
    import ringjax

    return f"ringrun {ringjax.__version__}"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    wants_version = any(word in ("-v", "--version") for word in arguments)
    try:
        args = options.parse(arguments, version() if wants_version else "")
        if args.check_build:
            from ringjax.run.check import report

            print(report(), end="")
            return 0
        if not args.command:
            raise ValueError("no command given; try: ringrun -np 2 python train.py")
        return launch(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        print(f"ringrun: {error}", file=sys.stderr)
        return 1
    except (ValueError, RingjaxError) as error:
        print(f"ringrun: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
