"""The command line of ringrun: Horovod's options, and what each means to ringjax.

Every option of horovodrun is accepted. Those without a meaning here are named in one
line. Only reads the command line and a file (option_file.py); the job itself is started
in cli.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from ringjax.config import LOG_LEVELS
from ringjax.run import option_file, rank_options
from ringjax.run.monitor import options as watching
from ringjax.run.option_types import number as _number

# Accepted, without effect: (flags, takes a value).
_WITHOUT_EFFECT: tuple[tuple[tuple[str, ...], bool], ...] = (
    (("--disable-cache",), False),
    (("--hierarchical-allreduce",), False),
    (("--no-hierarchical-allreduce",), False),
    (("--hierarchical-allgather",), False),
    (("--no-hierarchical-allgather",), False),
    (("--torus-allreduce",), False),
    (("--no-torus-allreduce",), False),
    (("--autotune-bayes-opt-max-samples",), True),
    (("--autotune-gaussian-process-noise",), True),
    (("--mpi-threads-disable",), False),
    (("--no-mpi-threads-disable",), False),
    (("--mpi-args",), True),
    (("--binding-args",), True),
    (("--num-nccl-streams",), True),
    (("--thread-affinity",), True),
    (("--log-with-timestamp", "--no-log-hide-timestamp"), False),
    (("--log-without-timestamp", "--log-hide-timestamp"), False),
    (("--gloo",), False),
    (("--mpi",), False),
    (("--jsrun",), False),
)
# What the arguments of an elastic job are called here.
NAMES = {
    "np": "-np",
    "min_np": "--min-np",
    "max_np": "--max-np",
    "slots": "--slots-per-host",
    "elastic_timeout": "--elastic-timeout",
    "reset_limit": "--reset-limit",
    "cooldown_range": "--blacklist-cooldown-range",
    "script": "--host-discovery-script",
}


class _IgnoredOption(argparse.Action):
    """Remembers that an option without effect was given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        namespace.ignored = [*namespace.ignored, option_string]


def build_parser(version: str) -> argparse.ArgumentParser:
    """The parser; everything after the first positional argument is the command."""
    parser = argparse.ArgumentParser(
        prog="ringrun",
        usage="ringrun -np N [options] command [arguments]",
        description="Run a command as the N ranks of one ringjax job.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        # Else argparse takes a word of the command, such as --log, for one of ours.
        allow_abbrev=False,
    )
    parser.set_defaults(ignored=[])
    parser.add_argument("-v", "--version", action="version", version=version)
    _add_basic(parser)
    rank_options.add_options(parser)
    _add_agent(parser)
    _add_handed(parser)
    _add_elastic(parser.add_argument_group("elastic jobs", _ELASTIC))
    _add_tuning(parser.add_argument_group("tuning"))
    watching.add_options(parser.add_argument_group("watching a job", watching.ABOUT))
    _add_limits(parser.add_argument_group("limits and logs"))
    group = parser.add_argument_group("accepted for Horovod's sake, without effect")
    for flags, value in _WITHOUT_EFFECT:
        group.add_argument(
            *flags, action=_IgnoredOption, nargs=None if value else 0, metavar="VALUE"
        )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="the command, with its arguments"
    )
    return parser


def _add_basic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "-np",
        "-n",
        "--num-proc",
        dest="np",
        type=_number(int, 1),
        metavar="N",
        help="number of processes; without it one for every slot of the hosts",
    )
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="where they run (localhost)")
    add(
        "-hostfile",
        "--hostfile",
        metavar="FILE",
        help="the same from a file with lines `host slots=N`",
    )
    add("-p", "--ssh-port", type=_number(int, 1), metavar="PORT")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    add(
        "--network-interfaces",
        "--network-interface",
        metavar="NAME,...",
        help="interfaces that the processes may use between hosts",
    )
    add(
        "--start-timeout",
        type=_number(float, 0.1),
        metavar="SECONDS",
        help="for all processes to call ringjax.init(), from the first one's call on",
    )
    add(
        "--output-filename",
        metavar="DIR",
        help="also write output to DIR/rank.N/stdout and DIR/rank.N/stderr",
    )
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        help="put the time before every line of output",
    )
    add("--verbose", action="store_true", help="say what is started where")
    add(
        "-cb",
        "--check-build",
        action="store_true",
        help="show which frameworks and transports are usable here",
    )
    add(
        "--config-file",
        metavar="FILE",
        help="options from a file: TOML (.toml), or Horovod's YAML if PyYAML is there",
    )


def _add_agent(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--listen",
        default="",
        metavar="[ADDRESS:]PORT",
        help="hosts come by themselves, by ringrun --join there, besides those of -H. "
        "Ranks call the next port. All need the same RINGJAX_SECRET, or _SECRET_FILE. "
        "With --min-np they may come and go, and so may ringrun itself: on SIGTERM or "
        "when it is killed they go on, and look for the next one at its address",
    )
    add(
        "--join",
        default="",
        metavar="HOST:PORT",
        help="be a host of the job that ringrun --listen has at this address, with "
        "--slots; the command is there. Waits for it up to --elastic-timeout",
    )
    add(
        "--agent-command",
        default="",
        metavar="COMMAND",
        help="what starts ringrun's agent on a host, instead of srun, blaunch or qrsh "
        "in an allocation of a batch system and ssh elsewhere; {host} stands for its "
        "name: "
        "'kubectl exec -i {host} --'",
    )


def _add_handed(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "-x",
        dest="handed_on",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="hand this variable on to all ranks, on other hosts too. They get the "
        "whole environment anyhow, but for what belongs to this host and terminal",
    )
    add(
        "--stdin",
        choices=("0", "none"),
        default="none",
        help="0: rank 0, on this machine, reads what you type or pipe into ringrun, "
        "for breakpoint() and the like. The others, and without it all, read nothing",
    )


_ELASTIC = """
With --min-np or --host-discovery-script ranks may be lost and join while the job runs:
the others go on, and a new process starts in the place of each that died, at once the
first time, then after 1, 2, 4 ... 30 s if it goes on to fail soon. A process that gets
a SIGTERM leaves at its next commit, and its place stays empty unless fewer than
--min-np are left. SIGUSR1 to ringrun asks all of them to leave, SIGTERM gives them 25 s
for it. The job ends with 0 if those who are its ranks at the end do. A line
of output has the rank that its process has at the time; with --output-filename the
first -np processes write to DIR/rank.N, later ones to DIR/worker.N.
"""


def _add_elastic(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--min-np",
        "--min-num-proc",
        type=_number(int, 1),
        metavar="N",
        help="go on as long as N processes are left (-np)",
    )
    add(
        "--max-np",
        "--max-num-proc",
        type=_number(int, 1),
        metavar="N",
        help="never have more (-np; with a script: as many as there are slots)",
    )
    add(
        "--host-discovery-script",
        dest="script",
        metavar="COMMAND",
        help="run every second; prints a line HOST or HOST:SLOTS for each host to use. "
        "Hosts that appear get processes, those on hosts that vanish are asked to "
        "leave. A host on which one failed is not used for new ones any more",
    )
    add(
        "--slots-per-host",
        "--slots",
        dest="slots",
        type=_number(int, 1),
        metavar="N",
        help="of hosts that the script prints without a number, and of a host that "
        "joins (1)",
    )
    add(
        "--blacklist-cooldown-range",
        dest="cooldown_range",
        nargs=2,
        type=_number(float, 0),
        metavar=("MIN", "MAX"),
        help="a host on which a process failed is used again after MIN seconds, then "
        "after twice as long each time, at most MAX",
    )
    add(
        "--elastic-timeout",
        type=_number(float, 0.1),
        metavar="SECONDS",
        help="to wait for processes if fewer than --min-np are left (600)",
    )
    add(
        "--reset-limit",
        type=_number(int, 0),
        metavar="N",
        help="end the job when processes were lost or joined more than N times",
    )


def _add_tuning(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--fusion-threshold-mb",
        type=_number(float, 0),
        metavar="MB",
        help="gradients per message (RINGJAX_BUCKET_BYTES, RINGJAX_FUSION_THRESHOLD)",
    )
    add(
        "--cycle-time-ms",
        type=_number(float, 0),
        metavar="MS",
        help="let eager operations wait for more to fuse (RINGJAX_CYCLE_TIME)",
    )
    add(
        "--cache-capacity",
        type=_number(int, 0),
        metavar="N",
        help="eager operations to remember (RINGJAX_CACHE_CAPACITY)",
    )
    for flag, doing in (("--autotune", "store_true"), ("--no-autotune", "store_false")):
        shown = "PyTorch: try bucket sizes in the first steps (RINGJAX_AUTOTUNE)"
        words = shown if doing == "store_true" else argparse.SUPPRESS
        add(flag, dest="autotune", action=doing, default=None, help=words)
    add("--autotune-log-file", metavar="FILE", help="how long steps took, as CSV")
    for what in ("warmup-samples", "steps-per-sample"):
        add(
            f"--autotune-{what}",
            type=_number(int, what.startswith("steps")),
            metavar="N",
            help=f"steps with each setting that {'do not ' * (what[0] == 'w')}count",
        )
    add(
        "--profile",
        metavar="DIR",
        help="what all ranks do when, for ui.perfetto.dev (RINGJAX_PROFILE)",
    )
    add(
        "--timeline-filename",
        metavar="FILE",
        help="where rank 0 writes what it does when (RINGJAX_TIMELINE)",
    )
    add(
        "--timeline-mark-cycles",
        action="store_true",
        default=None,
        help="mark rounds of negotiation in it (RINGJAX_TIMELINE_MARK_CYCLES)",
    )
    add(
        "--no-timeline-mark-cycles",
        dest="timeline_mark_cycles",
        action="store_false",
        help=argparse.SUPPRESS,
    )
    add("--tcp", action="store_true", help="NCCL without InfiniBand")


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--stall-check", action="store_true", default=None, help=argparse.SUPPRESS)
    add(
        "--no-stall-check",
        dest="stall_check",
        action="store_false",
        help="wait for a living rank for ever, without a word",
    )
    add(
        "--stall-check-warning-time-seconds",
        type=_number(float, 0),
        metavar="SECONDS",
        help="warn about a living rank that does not take part (RINGJAX_STALL_WARNING)",
    )
    add(
        "--stall-check-shutdown-time-seconds",
        type=_number(float, 0),
        metavar="SECONDS",
        help="fail because of it (RINGJAX_COLLECTIVE_TIMEOUT)",
    )
    add(
        "--gloo-timeout-seconds",
        type=_number(float, 0.1),
        metavar="SECONDS",
        help="of silence until a rank counts as lost (RINGJAX_FAILURE_TIMEOUT)",
    )
    add(
        "--log-level",
        type=str.lower,
        choices=LOG_LEVELS,
        metavar="LEVEL",
        help=", ".join(LOG_LEVELS),
    )


def parse(argv: Sequence[str], version: str) -> argparse.Namespace:
    """Read the command line and the configuration file; flags win over the file.

    Raises:
        SystemExit: as argparse does, after saying why.
        OptionError: what the configuration file asks for cannot be done.
    """
    args = build_parser(version).parse_args(argv)
    if args.command[:1] == ["--"]:
        del args.command[0]
    if args.config_file is not None:
        option_file.merge(args, args.config_file)
    return args


# Options whose value is the variable's: what they stand for.
_VARIABLES = {
    "cycle_time_ms": "RINGJAX_CYCLE_TIME",
    "cache_capacity": "RINGJAX_CACHE_CAPACITY",
    "stall_check_warning_time_seconds": "RINGJAX_STALL_WARNING",
    "stall_check_shutdown_time_seconds": "RINGJAX_COLLECTIVE_TIMEOUT",
    "gloo_timeout_seconds": "RINGJAX_FAILURE_TIMEOUT",
    "start_timeout": "RINGJAX_START_TIMEOUT",
    "elastic_timeout": "RINGJAX_ELASTIC_TIMEOUT",
    "log_level": "RINGJAX_LOG_LEVEL",
    "network_interfaces": "RINGJAX_NETWORK_INTERFACES",
    "autotune_log_file": "RINGJAX_AUTOTUNE_LOG",
    "autotune_warmup_samples": "RINGJAX_AUTOTUNE_WARMUP_SAMPLES",
    "autotune_steps_per_sample": "RINGJAX_AUTOTUNE_STEPS_PER_SAMPLE",
    **watching.VARIABLES,
    **rank_options.VARIABLES,
    "timeline_filename": "RINGJAX_TIMELINE",
    "profile": "RINGJAX_PROFILE",
}


def handed_on(args: argparse.Namespace, base: Mapping[str, str]) -> dict[str, str]:
    """The variables of -x; those that are not set anywhere are left out.

    Raises:
        ValueError: one has no name.
    """
    found: dict[str, str] = {}
    for item in args.handed_on:
        name, given, value = item.partition("=")
        if not name or "\0" in item:
            raise ValueError(f"-x {item!r}: expected NAME or NAME=VALUE")
        if given or name in base:
            found[name] = value if given else base[name]
    return found


def environment(args: argparse.Namespace) -> dict[str, str]:
    """The variables, nearly all of them of ringjax.config, that the options are for."""
    env: dict[str, str] = {}
    for option, variable in _VARIABLES.items():
        value = getattr(args, option)
        if value not in (None, ""):
            env[variable] = f"{value:g}" if isinstance(value, float) else str(value)
    if args.fusion_threshold_mb is not None:
        threshold = str(int(args.fusion_threshold_mb * (1 << 20)))
        env |= {"RINGJAX_BUCKET_BYTES": threshold}
        env |= {"RINGJAX_FUSION_THRESHOLD": threshold}
    if args.stall_check is False:
        env |= {"RINGJAX_STALL_WARNING": "0", "RINGJAX_COLLECTIVE_TIMEOUT": "0"}
    for option in ("timeline_mark_cycles", "autotune"):
        if (value := getattr(args, option)) is not None:
            env[f"RINGJAX_{option.upper()}"] = str(int(value))
    if args.tcp:
        env["NCCL_IB_DISABLE"] = "1"
    return env
