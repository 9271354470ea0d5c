"""`ringrun`: starts the ranks of a job, shows their output, and returns an exit code.

This module makes a `Job` from the command line, and job.py runs the job. No module of
ringrun imports jax, so that ringrun starts quickly.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from ringjax import stderr, stdout
from ringjax.config import Config
from ringjax.control import addresses
from ringjax.errors import RingjaxError
from ringjax.run import environ, options
from ringjax.run.console import Console
from ringjax.run.hosts import allocations, profile_files, slots
from ringjax.run.hosts.job_spec import JobSpec, ListenOptions, check_agent_command
from ringjax.run.job_setup import make_job
from ringjax.run.shutdown import ShutdownSignals
from ringjax.settings import version as package


def launch(args: argparse.Namespace) -> int:
    """Runs the job that the options describe. Returns the exit code for ringrun.

    Raises ValueError or RingjaxError if the job cannot be started.
    """
    base = environ.inherited()
    given = options.forwarded_variables(args, base)
    changes = options.environment(args) | given
    config = Config.from_env({**base, **changes})
    if config.profile:
        changes["RINGJAX_PROFILE"] = profile_files.prepare_folder(config.profile)
    spec = JobSpec(
        command=args.command,
        env=environ.for_ranks(base, changes),
        config=config,
        ssh_port=args.ssh_port,
        ssh_identity_file=args.ssh_identity_file,
        verbose=args.verbose,
        forwarded=frozenset(given),
        stdin=args.stdin == "0",
        allocation=allocations.find_readable(base),
        agent_command=args.agent_command and check_agent_command(args.agent_command),
        listening=_listening(args.listen, config) if args.listen else None,
    )
    make_console = functools.partial(
        Console,
        directory=args.output_filename,
        timestamps=args.prefix_output_with_timestamp,
    )
    job = make_job(spec, options.sizes(args), make_console, base)
    if args.ignored:
        job.console.note(
            "accepted for Horovod's sake, without effect here: "
            + ", ".join(dict.fromkeys(args.ignored))
        )
    for name in (item for item in args.forwarded if "=" not in item):
        if name not in given:
            job.console.note(f"-x {name}: it is not set, so the ranks do not get it")
    if args.command[-1] == "-" and not spec.stdin:
        job.console.note("ranks read nothing from -: --stdin 0 gives it to rank 0")
    signals = ShutdownSignals(job.shutdown, job.forward_signal, job.detach)
    signals.install()
    outcome = job.run()
    if config.profile and not outcome.left:
        profile_files.merge_profiles(changes["RINGJAX_PROFILE"], job.console.note)
    if job.goodput:
        job.console.note(job.goodput)
    if outcome.reason:  # show it last, because users read the last line first
        job.console.note(outcome.reason)
    signals.ignore_alarm()
    if outcome.left and (text := allocations.requeue(base)):
        job.console.note(text)
    return outcome.exit_code


# The job id that all jobs of --listen use without RINGJAX_JOB. Their secrets differ.
_JOB = b"ringrun!".hex()


def _secret(config: Config, option: str) -> bytes:
    secret = config.secret_bytes()
    if secret is None:
        raise ValueError(
            f"{option}: no secret; give all hosts the same one in a file that "
            "RINGJAX_SECRET_FILE names, or in RINGJAX_SECRET: openssl rand -hex 32"
        )
    return secret


def _listening(where: str, config: Config) -> ListenOptions:
    """Parses the value of --listen. Raises ValueError if the value is wrong."""
    host, colon, port = where.rpartition(":")
    number = int(port) if port.isdecimal() and len(port) <= 5 else 0
    if not 0 < number < 65535 or (colon and not host):
        raise ValueError(f"--listen {where!r}: expected PORT or ADDRESS:PORT")
    found = [host.removeprefix("[").removesuffix("]")]
    return ListenOptions(
        addresses=found if host else addresses.of_interfaces(config.network_interfaces),
        port=number,
        secret=_secret(config, "--listen"),
        job=config.job or _JOB,
    )


def join(args: argparse.Namespace) -> NoReturn:
    """Runs the agent of --join, and exits when the job ends.

    Raises ValueError if an option is not valid, or cannot be used with --join.
    """
    from ringjax.run.hosts import joining_agent

    if args.command or args.listen:
        raise ValueError("--join: the command is given to ringrun --listen")
    config = Config.from_env({**environ.inherited(), **options.environment(args)})
    if len(addresses.parse(args.join)) != 1:
        raise ValueError(f"--join {args.join!r}: expected HOST:PORT")
    joining_agent.join(
        joining_agent.JoinOptions(
            address=args.join,
            secret=_secret(config, "--join"),
            job=config.job or _JOB,
            host=slots.check_host_name(config.hostname or socket.gethostname()),
            slots=args.slots or 1,
            config=config,
        )
    )


def _open_standard_streams() -> None:
    """Opens standard streams that are closed when ringrun starts.

    Otherwise the next socket would get the descriptor of a standard stream, and ringrun
    would write the output of ranks into that socket.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # open returns the lowest free number: fd


def main(argv: Sequence[str] | None = None) -> int:
    _open_standard_streams()
    arguments = sys.argv[1:] if argv is None else list(argv)
    wants_version = any(word in ("-v", "--version") for word in arguments)
    try:
        version = f"ringrun {package.version()}" if wants_version else ""
        args = options.parse(arguments, version)
        if args.check_build:
            from ringjax.run.check_build import report

            with stdout.until_closed():
                print(report(), end="")
            return 0
        if args.join:
            join(args)
        if not args.command:
            raise ValueError("no command given; try: ringrun -np 2 python train.py")
        return launch(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        stderr.line(f"ringrun: {error}")
        return 1
    except (ValueError, RingjaxError) as error:
        stderr.line(f"ringrun: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
