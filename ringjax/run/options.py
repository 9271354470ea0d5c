"""The command line of ringrun: Horovod's options, and what each means to ringjax.

Every option of horovodrun is accepted. Those without a meaning here are named in one
line, those of elastic jobs are refused. Only reads the command line and a file; the job
itself is started in cli.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringjax.config import LOG_LEVELS

# Accepted, without effect: (flags, takes a value).
_WITHOUT_EFFECT: tuple[tuple[tuple[str, ...], bool], ...] = (
    (("--disable-cache",), False),
    (("--hierarchical-allreduce",), False),
    (("--no-hierarchical-allreduce",), False),
    (("--hierarchical-allgather",), False),
    (("--no-hierarchical-allgather",), False),
    (("--torus-allreduce",), False),
    (("--no-torus-allreduce",), False),
    (("--autotune",), False),
    (("--no-autotune",), False),
    (("--autotune-log-file",), True),
    (("--autotune-warmup-samples",), True),
    (("--autotune-steps-per-sample",), True),
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
_ELASTIC = (
    ("--min-np", "--min-num-proc"),
    ("--max-np", "--max-num-proc"),
    ("--slots-per-host",),
    ("--elastic-timeout",),
    ("--reset-limit",),
    ("--blacklist-cooldown-range",),
    ("--host-discovery-script",),
)
# Horovod's keys of a configuration file, and the option that each stands for.
_FILE_KEYS = {
    "params.fusion_threshold_mb": "fusion_threshold_mb",
    "params.cycle_time_ms": "cycle_time_ms",
    "params.cache_capacity": "cache_capacity",
    "timeline.filename": "timeline_filename",
    "timeline.mark_cycles": "timeline_mark_cycles",
    "stall_check.enabled": "stall_check",
    "stall_check.warning_time_seconds": "stall_check_warning_time_seconds",
    "stall_check.shutdown_time_seconds": "stall_check_shutdown_time_seconds",
    "library_options.gloo_timeout_seconds": "gloo_timeout_seconds",
    "logging.level": "log_level",
}
_WHOLE = ("cache_capacity",)  # of these, numbers without a fraction


class OptionError(ValueError):
    """The command line asks for something that cannot be done."""


class _Ignore(argparse.Action):
    """Remembers that an option without effect was given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        namespace.ignored = [*namespace.ignored, option_string]


class _Refuse(argparse.Action):
    """Ends with a clear sentence for options of elastic jobs."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        parser.error(
            f"{option_string}: elastic jobs are not available in this version; "
            "start a fixed number of processes with -np"
        )


def _number(kind: type, low: float) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not value >= low:
            raise argparse.ArgumentTypeError(f"{text} is less than {low:g}")
        return value

    parse.__name__ = "whole number" if kind is int else "number"  # in argparse's error
    return parse


def build_parser(version: str) -> argparse.ArgumentParser:
    """The parser; everything after the first positional argument is the command."""
    parser = argparse.ArgumentParser(
        prog="ringrun",
        usage="ringrun -np N [options] command [arguments]",
        description="Run a command as the N ranks of one ringjax job.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    parser.set_defaults(ignored=[])
    parser.add_argument("-v", "--version", action="version", version=version)
    _add_basic(parser)
    _add_tuning(parser.add_argument_group("tuning"))
    _add_limits(parser.add_argument_group("limits and logs"))
    group = parser.add_argument_group("accepted for Horovod's sake, without effect")
    for flags, value in _WITHOUT_EFFECT:
        group.add_argument(
            *flags, action=_Ignore, nargs=None if value else 0, metavar="VALUE"
        )
    group = parser.add_argument_group("elastic jobs, not available in this version")
    for flags in _ELASTIC:
        many = "+" if flags[0] == "--blacklist-cooldown-range" else None
        group.add_argument(*flags, action=_Refuse, nargs=many, metavar="VALUE")
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
    add(
        "--timeline-filename",
        metavar="FILE",
        help="where rank 0 writes what eager operations do (RINGJAX_TIMELINE)",
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
        _merge(args, _flatten(_load(args.config_file)), args.config_file)
    return args


def _load(path: str) -> Mapping[str, Any]:
    try:
        values = _load_toml(path) if path.endswith(".toml") else _load_yaml(path)
    except OptionError:
        raise
    except OSError as error:
        raise OptionError(f"--config-file {path}: {error.strerror}") from error
    except ValueError as error:
        raise OptionError(f"--config-file {path}: {error}") from error
    if not isinstance(values, Mapping):
        raise OptionError(f"--config-file {path}: it holds no table of options")
    return values


def _load_toml(path: str) -> Any:
    import tomllib

    with open(path, "rb") as file:
        return tomllib.load(file)


def _load_yaml(path: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise OptionError(
            f"--config-file {path}: reading YAML needs PyYAML (pip install pyyaml); a "
            "file with the same keys as TOML, named *.toml, needs nothing"
        ) from error
    with open(path, encoding="utf-8") as file:
        try:
            return yaml.safe_load(file) or {}
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _merge(args: argparse.Namespace, values: Mapping[str, Any], path: str) -> None:
    """Give the options of a file to `args` where the command line says nothing."""
    for key, value in values.items():
        name = _FILE_KEYS.get(key)
        if name is None:
            args.ignored = [*args.ignored, f"{key} in {path}"]
        elif getattr(args, name) is None:
            setattr(args, name, _checked(key, name, value, path))


def _checked(key: str, name: str, value: Any, path: str) -> Any:
    where = f"--config-file {path}: {key}"
    if name == "timeline_filename":
        if not isinstance(value, str):
            raise OptionError(f"{where} is {value!r}: expected a path")
        return value
    if name in ("stall_check", "timeline_mark_cycles"):
        if not isinstance(value, bool):
            raise OptionError(f"{where} is {value!r}: expected true or false")
        return value
    if name == "log_level":
        if str(value).lower() not in LOG_LEVELS:
            expected = ", ".join(LOG_LEVELS)
            raise OptionError(f"{where} is {value!r}: expected one of {expected}")
        return str(value).lower()
    kinds = (int,) if name in _WHOLE else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or value < 0:
        kind = "a whole number" if name in _WHOLE else "a number"
        raise OptionError(f"{where} is {value!r}: expected {kind}, at least 0")
    return value


# Options whose value is the variable's: what they stand for.
_VARIABLES = {
    "cycle_time_ms": "RINGJAX_CYCLE_TIME",
    "cache_capacity": "RINGJAX_CACHE_CAPACITY",
    "stall_check_warning_time_seconds": "RINGJAX_STALL_WARNING",
    "stall_check_shutdown_time_seconds": "RINGJAX_COLLECTIVE_TIMEOUT",
    "gloo_timeout_seconds": "RINGJAX_FAILURE_TIMEOUT",
    "start_timeout": "RINGJAX_START_TIMEOUT",
    "log_level": "RINGJAX_LOG_LEVEL",
    "network_interfaces": "RINGJAX_NETWORK_INTERFACES",
    "timeline_filename": "RINGJAX_TIMELINE",
}


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
    if args.timeline_mark_cycles is not None:
        env["RINGJAX_TIMELINE_MARK_CYCLES"] = str(int(args.timeline_mark_cycles))
    if args.tcp:
        env["NCCL_IB_DISABLE"] = "1"
    return env
