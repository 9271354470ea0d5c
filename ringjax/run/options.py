"""The command line of ringrun: horovodrun's options, and options of ringjax.

Most options set a variable of ringjax.config. Some options of horovodrun have no effect
here; ringrun prints which of these options the user has given. option_file.py reads the
configuration file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ringjax.config import LOG_LEVELS, Config
from ringjax.run import option_file
from ringjax.run.elastic.elastic_settings import SizeOptions

ValueT = TypeVar("ValueT", int, float)

# (names of an option without effect, whether the option takes a value).
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
# Fields of `SizeOptions` -> ringrun's options, for error texts.
_NAMES = {
    "np": "-np",
    "min_np": "--min-np",
    "max_np": "--max-np",
    "spares": "--spares",
    "slots": "--slots-per-host",
    "elastic_timeout": "--elastic-timeout",
    "reset_limit": "--reset-limit",
    "cooldown_range": "--blacklist-cooldown-range",
    "script": "--host-discovery-script",
}


def _number(kind: type[ValueT], low: float) -> Callable[[str], ValueT]:
    """Returns an argparse type for numbers that are not less than `low`.

    Example:
        >>> _number(int, 1)("3")
        3
    """

    def parse(text: str) -> ValueT:
        value = kind(text)
        if not value >= low:
            raise argparse.ArgumentTypeError(f"{text} is less than {low:g}")
        return value

    # argparse prints this name in errors: "invalid whole number value: 'x'".
    parse.__name__ = "whole number" if kind is int else "number"
    return parse


def devices(text: str) -> str:
    """Checks a count of CUDA devices per rank. Returns the text for the setting."""
    try:
        Config.from_env({"RINGJAX_DEVICES_PER_RANK": text})
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


# Keyword arguments of `add_argument` that several options share.
_POSITIVE_COUNT: dict[str, Any] = {"type": _number(int, 1), "metavar": "N"}
_COUNT: dict[str, Any] = {"type": _number(int, 0), "metavar": "N"}
_POSITIVE_SECONDS: dict[str, Any] = {"type": _number(float, 0.1), "metavar": "SECONDS"}
_SECONDS: dict[str, Any] = {"type": _number(float, 0), "metavar": "SECONDS"}


class _IgnoredOption(argparse.Action):
    """Records that the user has given an option without effect."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        namespace.ignored = [*namespace.ignored, option_string]


def build_parser(version: str) -> argparse.ArgumentParser:
    """Makes the parser. The first positional argument begins the ranks' command."""
    parser = argparse.ArgumentParser(
        prog="ringrun",
        usage="ringrun -np N [options] command [arguments]",
        description="Run a command as the N ranks of one ringjax job.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        # If abbreviations were allowed, argparse would read an option of the ranks'
        # command, such as --log, as an option of ringrun.
        allow_abbrev=False,
    )
    parser.set_defaults(ignored=[])
    parser.add_argument("-v", "--version", action="version", version=version)
    _add_basic(parser)
    _add_processes(parser)
    _add_elastic(parser.add_argument_group("elastic jobs", _ELASTIC))
    _add_tuning(parser.add_argument_group("tuning"))
    _add_monitoring(parser.add_argument_group("watching a job", _MONITORING))
    _add_limits(parser.add_argument_group("limits and logs"))
    group = parser.add_argument_group("options of Horovod that have no effect")
    for flags, value in _WITHOUT_EFFECT:
        group.add_argument(
            *flags, action=_IgnoredOption, nargs=None if value else 0, metavar="VALUE"
        )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="the command, with its arguments"
    )
    return parser


def _add_switch(
    group: argparse._ActionsContainer,
    name: str,
    on: str = argparse.SUPPRESS,
    off: str = argparse.SUPPRESS,
) -> None:
    """Adds the options --NAME and --no-NAME. Without both, the value is None."""
    dest = name.replace("-", "_")
    add = group.add_argument
    add(f"--{name}", dest=dest, action="store_true", default=None, help=on)
    add(f"--no-{name}", dest=dest, action="store_false", default=None, help=off)


def _add_basic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "-np",
        "-n",
        "--num-proc",
        dest="np",
        **_POSITIVE_COUNT,
        help="start N processes; by default one for every slot of the hosts",
    )
    add(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,...",
        help="run the processes on these hosts, at most SLOTS on each (localhost)",
    )
    add(
        "-hostfile",
        "--hostfile",
        metavar="FILE",
        help="read the hosts from a file with lines `host slots=N`",
    )
    add(
        "-p",
        "--ssh-port",
        type=_number(int, 1),
        metavar="PORT",
        help="connect to this port of other hosts by ssh",
    )
    add(
        "-i", "--ssh-identity-file", metavar="FILE", help="use this private key for ssh"
    )
    add(
        "--network-interfaces",
        "--network-interface",
        metavar="NAME,...",
        help="use only these network interfaces between hosts",
    )
    add(
        "--start-timeout",
        **_POSITIVE_SECONDS,
        help="fail if not all processes have called ringjax.init() within SECONDS "
        "after the first one",
    )
    add(
        "--output-filename",
        metavar="DIR",
        help="also write the output of rank N to DIR/rank.N/stdout and "
        "DIR/rank.N/stderr",
    )
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        help="put the time before every line of output",
    )
    add(
        "--verbose", action="store_true", help="show which process starts on which host"
    )
    add(
        "-cb",
        "--check-build",
        action="store_true",
        help="show which frameworks and transports are usable here",
    )
    add(
        "--config-file",
        metavar="FILE",
        help="read options from a file: TOML (.toml), or Horovod's YAML if PyYAML is "
        "installed",
    )


def _add_processes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--group-size",
        type=_number(int, 1),
        metavar="K",
        help="join every K processes by jax.distributed into one JAX program that "
        "shards over their devices; ringjax averages between these groups, and with "
        "--min-np groups are lost and join as a whole (1)",
    )
    _add_switch(
        parser,
        "jax-collectives",
        on="carry psum and the other collectives of jax.distributed's CPU programs by "
        "ringjax, and not by Gloo (RINGJAX_JAX_COLLECTIVES)",
        off="leave them to Gloo",
    )
    add(
        "--devices-per-rank",
        type=devices,
        metavar="N",
        help="give each rank N CUDA devices, over which JAX shards; ringjax averages "
        "between the devices of the same index on all ranks. `all` gives a rank every "
        "device that it sees, for one rank on each host (1)",
    )
    add(
        "--same-bits",
        action="store_true",
        help="give XLA one thread in each rank (NPROC=1), and on GPUs deterministic "
        "kernels, so that programs of ringjax.pieces compute the same bits on every "
        "number and kind of hosts with one kind of CPU (RINGJAX_SAME_BITS)",
    )
    add(
        "--listen",
        default="",
        metavar="[ADDRESS:]PORT",
        help="accept hosts that join by themselves with ringrun --join, in addition to "
        "those of -H. Ranks connect to PORT + 1. All hosts need the same "
        "RINGJAX_SECRET or RINGJAX_SECRET_FILE. With --min-np hosts may join and leave "
        "while the job runs. If ringrun gets SIGTERM or is killed, the ranks of hosts "
        "that joined continue and connect to the next ringrun at the same address",
    )
    add(
        "--join",
        default="",
        metavar="HOST:PORT",
        help="join the job of the ringrun --listen at this address as a host with "
        "--slots slots. Pass the command to ringrun --listen only. ringrun --join "
        "tries to connect for --elastic-timeout",
    )
    add(
        "--agent-command",
        default="",
        metavar="COMMAND",
        help="start ringrun's agent on other hosts by COMMAND, in which {host} stands "
        "for the name of the host, as in 'kubectl exec -i {host} --'. By default the "
        "command is srun, blaunch or qrsh in an allocation of a batch system, and ssh "
        "elsewhere",
    )
    add(
        "-x",
        dest="forwarded",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="pass this variable to all ranks. Ranks get the whole environment anyway, "
        "except that variables of this host and terminal are not passed to other hosts",
    )
    add(
        "--stdin",
        choices=("0", "none"),
        default="none",
        help="0: rank 0, which must be on this machine, reads the standard input of "
        "ringrun, for example for breakpoint(). All other ranks read nothing, and "
        "without this option no rank reads anything",
    )


_ELASTIC = """
With --min-np or --host-discovery-script ranks may be lost and join while the job runs.
If a rank is lost, the other ranks go on, and a new process starts in its place. The
first new process starts at once. If the new processes go on failing soon, the next ones
start after 1, 2, 4 ... 30 s. A process that gets SIGTERM leaves at its next commit, and
its place stays empty unless fewer than --min-np processes are left. SIGUSR1 to ringrun
asks all processes to leave, and SIGTERM to ringrun gives them 25 s to do so. The exit
code of the job is 0 if it is 0 for all processes that are ranks at the end. Each line
of output has the rank that its process has at the time. With --output-filename the
first -np processes write to DIR/rank.N, and later processes to DIR/worker.N.
"""


def _add_elastic(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--min-np",
        "--min-num-proc",
        **_POSITIVE_COUNT,
        help="continue the job while at least N processes are left (-np)",
    )
    add(
        "--max-np",
        "--max-num-proc",
        **_POSITIVE_COUNT,
        help="run at most N processes (-np, or all slots that the script prints)",
    )
    add(
        "--spares",
        **_COUNT,
        help="keep N more processes ready, in slots of their own. They have called "
        "init() and warm_up, and then sleep. If a rank is lost, one of them takes its "
        "place at the next commit, and a new process becomes a spare (0)",
    )
    add(
        "--host-discovery-script",
        dest="script",
        metavar="COMMAND",
        help="run COMMAND every second; COMMAND prints a line HOST or HOST:SLOTS for "
        "each host to use. ringrun starts processes on new hosts, and asks processes "
        "on hosts that are no longer printed to leave. A host on which a process has "
        "failed gets no new processes",
    )
    add(
        "--slots-per-host",
        "--slots",
        dest="slots",
        **_POSITIVE_COUNT,
        help="slots of a host for which the script prints no SLOTS, and of the host of "
        "ringrun --join (1)",
    )
    add(
        "--blacklist-cooldown-range",
        dest="cooldown_range",
        nargs=2,
        type=_number(float, 0),
        metavar=("MIN", "MAX"),
        help="start processes again on a host on which a process has failed, after MIN "
        "seconds at first, and after each failure twice as long, up to MAX seconds",
    )
    add(
        "--elastic-timeout",
        **_POSITIVE_SECONDS,
        help="end the job if fewer than --min-np processes are left for SECONDS (600)",
    )
    add(
        "--reset-limit",
        **_COUNT,
        help="end the job if processes were lost or joined more than N times",
    )


def _add_tuning(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--fusion-threshold-mb",
        type=_number(float, 0),
        metavar="MB",
        help="put MB of gradients into one message (RINGJAX_BUCKET_BYTES, "
        "RINGJAX_FUSION_THRESHOLD)",
    )
    add(
        "--cycle-time-ms",
        type=_number(float, 0),
        metavar="MS",
        help="let eager operations wait MS milliseconds for others to fuse with "
        "(RINGJAX_CYCLE_TIME)",
    )
    add(
        "--cache-capacity",
        **_COUNT,
        help="cache the submissions of N eager operations (RINGJAX_CACHE_CAPACITY)",
    )
    tune = "try bucket sizes in the first steps, with PyTorch (RINGJAX_AUTOTUNE)"
    _add_switch(group, "autotune", on=tune)
    add(
        "--autotune-log-file",
        metavar="FILE",
        help="write the times of the tried steps to FILE, as CSV",
    )
    add(
        "--autotune-warmup-samples",
        **_COUNT,
        help="do not count the first N steps with each bucket size",
    )
    add(
        "--autotune-steps-per-sample",
        **_POSITIVE_COUNT,
        help="count N steps with each bucket size",
    )
    add(
        "--profile",
        metavar="DIR",
        help="write a profile of all ranks for ui.perfetto.dev to DIR "
        "(RINGJAX_PROFILE)",
    )
    add(
        "--timeline-filename",
        metavar="FILE",
        help="write a timeline of the operations of rank 0 to FILE (RINGJAX_TIMELINE)",
    )
    mark = "mark rounds of negotiation in the timeline (RINGJAX_TIMELINE_MARK_CYCLES)"
    _add_switch(group, "timeline-mark-cycles", on=mark)
    add("--tcp", action="store_true", help="make NCCL use TCP and not InfiniBand")


_MONITORING = """
Ranks send samples only if one of these options is given, or while `ringjax top` runs.
"""


def _add_monitoring(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--report",
        **_SECONDS,
        help="print every SECONDS for which rank all others wait, and which line of "
        "Python that rank executes (RINGJAX_REPORT)",
    )
    add(
        "--quiet",
        dest="report",
        action="store_const",
        const=0.0,
        help="print no reports, even if RINGJAX_REPORT is set",
    )
    add(
        "--metrics",
        metavar="[ADDRESS:]PORT",
        help="serve metrics to Prometheus at /metrics; without ADDRESS only this host "
        "reaches them (RINGJAX_METRICS)",
    )
    add(
        "--metrics-token-file",
        metavar="FILE",
        help="the file with the token that Prometheus must send; only its owner may "
        "have access to it (RINGJAX_METRICS_TOKEN_FILE)",
    )
    add(
        "--metrics-file",
        metavar="FILE",
        help="write the metrics to FILE, named NAME.prom, for node_exporter "
        "(RINGJAX_METRICS_FILE)",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    off = "wait for a live rank for ever, without a warning"
    _add_switch(group, "stall-check", off=off)
    add(
        "--stall-check-warning-time-seconds",
        **_SECONDS,
        help="warn after waiting SECONDS for a live rank (RINGJAX_STALL_WARNING)",
    )
    add(
        "--stall-check-shutdown-time-seconds",
        **_SECONDS,
        help="fail after waiting SECONDS for a live rank (RINGJAX_COLLECTIVE_TIMEOUT)",
    )
    add(
        "--gloo-timeout-seconds",
        **_POSITIVE_SECONDS,
        help="declare a rank lost that has been silent for SECONDS "
        "(RINGJAX_FAILURE_TIMEOUT)",
    )
    add(
        "--log-level",
        type=str.lower,
        choices=LOG_LEVELS,
        metavar="LEVEL",
        help=f"log messages of at least this level: {', '.join(LOG_LEVELS)}",
    )


def parse(argv: Sequence[str], version: str) -> argparse.Namespace:
    """Reads the command line, and the configuration file that the command line names.

    Raises:
        SystemExit: argparse has printed an error or the help.
        OptionError: the configuration file is not valid.
    """
    args = build_parser(version).parse_args(argv)
    if args.command[:1] == ["--"]:
        del args.command[0]
    if args.config_file is not None:
        option_file.merge(args, args.config_file)
    return args


# Option -> the variable of ringjax.config that gets the option's value.
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
    "group_size": "RINGJAX_GROUP_SIZE",
    "devices_per_rank": "RINGJAX_DEVICES_PER_RANK",
    "report": "RINGJAX_REPORT",
    "metrics": "RINGJAX_METRICS",
    "metrics_token_file": "RINGJAX_METRICS_TOKEN_FILE",
    "metrics_file": "RINGJAX_METRICS_FILE",
    "timeline_filename": "RINGJAX_TIMELINE",
    "profile": "RINGJAX_PROFILE",
}


def forwarded_variables(
    args: argparse.Namespace, base: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables of -x. `base` contains the values for -x NAME.

    Omits a variable that has no value in `base` either.

    Raises ValueError if a variable has no name.
    """
    found: dict[str, str] = {}
    for item in args.forwarded:
        name, given, value = item.partition("=")
        if not name or "\0" in item:
            raise ValueError(f"-x {item!r}: expected NAME or NAME=VALUE")
        if given or name in base:
            found[name] = value if given else base[name]
    return found


def sizes(args: argparse.Namespace) -> SizeOptions:
    given = {key: getattr(args, key) for key in (*_NAMES, "hosts", "hostfile")}
    return SizeOptions(names=_NAMES, **given)


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Converts options to environment variables, most of which are settings."""
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
    for option in ("timeline_mark_cycles", "autotune", "jax_collectives"):
        if (value := getattr(args, option)) is not None:
            env[f"RINGJAX_{option.upper()}"] = str(int(value))
    if args.same_bits:
        env["RINGJAX_SAME_BITS"] = "1"
    if args.tcp:
        env["NCCL_IB_DISABLE"] = "1"
    return env
