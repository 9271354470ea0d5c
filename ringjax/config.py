"""The settings of ringjax: one dataclass, read from environment variables.

Only this module reads RINGJAX_* and HOROVOD_* variables. `python -m ringjax.config`
prints a table of them. control/launch_environment.py reads the variables that launchers
such as Open MPI and Slurm set.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ringjax import failpoints as failpoint_setting
from ringjax import stdout
from ringjax.settings import parsers, secret_file
from ringjax.settings.parsers import LOG_LEVELS as LOG_LEVELS
from ringjax.settings.parsers import Parser

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class HorovodVariable:
    """An environment variable of Horovod that sets a field of `Config`."""

    name: str  # the part after HOROVOD_
    parse: Parser  # may return None for a text that does not set the field


def _setting(
    default: _Value,
    parse: Parser,
    meaning: str,
    *horovod: str | HorovodVariable,
    secret: bool = False,
) -> _Value:
    """Makes a field of `Config`. `parse` converts the text of RINGJAX_FIELD.

    docs/reference/settings.md shows `meaning`, the help text. `horovod` are Horovod's
    variables for the field, without HOROVOD_. A `secret` value is never printed.
    """
    variables = tuple(
        name if isinstance(name, HorovodVariable) else HorovodVariable(name, parse)
        for name in horovod
    )
    metadata = {"parse": parse, "meaning": meaning, "horovod": variables}
    metadata["secret"] = secret
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


_RANK, _COUNT = parsers.integer(0, 2**31 - 1), parsers.integer(1, 2**31 - 1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one process. A field FIELD is read from RINGJAX_FIELD.

    Example:
        >>> Config.from_env({"RINGJAX_RING_BYTES": "65536"}).ring_bytes
        65536
    """

    rank: int | None = _setting(None, _RANK, "Rank of this process.", "RANK")
    size: int | None = _setting(None, _COUNT, "Number of processes.", "SIZE")
    local_rank: int | None = _setting(
        None, _RANK, "Index of this process on its host.", "LOCAL_RANK"
    )
    local_size: int | None = _setting(
        None, _COUNT, "Number of processes on this host.", "LOCAL_SIZE"
    )
    cross_rank: int | None = _setting(
        None,
        _RANK,
        "Index of this host among hosts with this local rank.",
        "CROSS_RANK",
    )
    cross_size: int | None = _setting(
        None, _COUNT, "Number of hosts with this local rank.", "CROSS_SIZE"
    )
    rendezvous: str = _setting(
        "", str, "Addresses at which the job's coordinator listens: host:port,..."
    )
    secret: str = _setting(
        "",
        secret_file.parse_secret,
        "Secret of the job, in hexadecimal digits.",
        secret=True,
    )
    secret_file: str = _setting(
        "", str, "File with the secret, which only its owner may read."
    )
    job: str = _setting("", parsers.hexadecimal(16, exactly=True), "Id of the job.")
    elastic: bool = _setting(
        False, parsers.boolean, "Whether ranks may be lost and join; ringrun sets it."
    )
    spread: bool = _setting(
        False,
        parsers.boolean,
        "Whether an elastic job began on several hosts. ringrun sets it.",
    )
    worker: int | None = _setting(
        None, _RANK, "Id of this process in an elastic job; no later process gets it."
    )
    group_size: int = _setting(
        1,
        _COUNT,
        "Number of processes that JAX joins to a group. Gradients are averaged "
        "between groups.",
    )
    jax_collectives: bool | None = _setting(
        None,
        parsers.boolean,
        "Whether ringjax carries the collectives of jax.distributed's CPU programs. "
        "Default: in groups whose processes have one device each.",
    )
    tls: str = _setting(
        "auto",
        parsers.choice("auto", "required", "off"),
        "Encryption of control connections. auto: if both ends have Python 3.13. "
        "required: always, and links that carry tensors between hosts, too.",
    )
    hostname: str = _setting("", str, "Name of this host in the job.", "HOSTNAME")
    start_timeout: float = _setting(
        120.0,
        parsers.seconds(0.1),
        "Seconds within which all ranks must appear and connect.",
        "START_TIMEOUT",
    )
    elastic_timeout: float = _setting(
        600.0,
        parsers.seconds(0.1),
        "Seconds that an elastic job with too few ranks waits for ranks to join.",
        "ELASTIC_TIMEOUT",
    )
    stall_warning: float = _setting(
        10.0,
        parsers.seconds(),
        "Seconds that a call waits for a live rank before a warning; 0 for no warning.",
        HorovodVariable("STALL_CHECK_DISABLE", parsers.if_true(0.0)),
        "STALL_CHECK_TIME_SECONDS",
    )
    collective_timeout: float = _setting(
        60.0,
        parsers.seconds(),
        "Seconds that a call waits for a live rank before an error; 0 for no limit.",
        HorovodVariable("STALL_CHECK_DISABLE", parsers.if_true(0.0)),
        "STALL_SHUTDOWN_TIME_SECONDS",
    )
    failure_timeout: float = _setting(
        5.0,
        parsers.seconds(0.1),
        "Seconds of silence after which a rank counts as lost.",
        "GLOO_TIMEOUT_SECONDS",
    )
    heartbeat: float = _setting(
        1.0, parsers.seconds(0.01), "Seconds between two heartbeats."
    )
    ring_bytes: int = _setting(
        1 << 20,
        parsers.power_of_two(1 << 14, 1 << 28),
        "Bytes of shared memory for each direction of a pair of ranks on one host.",
    )
    tile_bytes: int = _setting(
        1 << 19,
        parsers.multiple_of(1 << 12, 1 << 28),
        "Bytes of a tile in the memory that all ranks of a host share; "
        "0 to use only the ring buffers of pairs.",
    )
    tcp_streams: int = _setting(
        2, parsers.integer(1, 16), "Number of data sockets for a pair of hosts."
    )
    network_interfaces: str = _setting(
        "", str, "Network interfaces to use, and no others: name,...", "GLOO_IFACE"
    )
    shm: bool = _setting(
        True, parsers.boolean, "Whether ranks of one host use shared memory."
    )
    fabric: str = _setting(
        "off",
        parsers.fabric,
        "Provider of libfabric that carries tensors between hosts: verbs, efa, cxi, "
        "opx, psm3 or tcp; efa:DOMAIN names a card. off: TCP without libfabric.",
    )
    fabric_library: str = _setting(
        "", str, "File libfabric.so.1 to load, unless the process has loaded one."
    )
    fabric_slot: int = _setting(
        1 << 18,
        parsers.power_of_two(1 << 13, 1 << 22),
        "Bytes of the longest message on a fabric. A rank pins up to 8 times as many "
        "for a peer with long messages, and 65 KiB for each other peer.",
    )
    algorithm: str = _setting(
        "", str, "Algorithm to use: ring, or allreduce:ring,broadcast:binomial"
    )
    calibrate: str = _setting(
        "auto",
        parsers.choice("auto", "always", "off"),
        "Whether the links are measured at the start. auto: unless the cache has a "
        "measurement.",
    )
    cache_dir: str = _setting(
        "",
        str,
        "Folder for cached measurements. Default: ringjax in the user's cache folder.",
    )
    spin_us: float = _setting(
        50.0, parsers.seconds(), "Microseconds of busy waiting before a thread sleeps."
    )
    bucket_bytes: int = _setting(
        25 << 20,
        parsers.integer(0),
        "Bytes of gradients in one message; 0 for no fusion.",
        "FUSION_THRESHOLD",
    )
    fusion_threshold: int = _setting(
        128 << 20,
        parsers.integer(0),
        "Bytes of eager operations in one message; 0 for no fusion.",
        "FUSION_THRESHOLD",
    )
    group_fusion: bool = _setting(
        True,
        parsers.boolean,
        "Whether grouped eager operations may share a message with other operations.",
        HorovodVariable("DISABLE_GROUP_FUSION", parsers.if_true(False)),
    )
    cycle_time: float = _setting(
        0.0,
        parsers.seconds(unit="milliseconds"),
        "Milliseconds that an eager operation waits for operations to fuse with.",
        "CYCLE_TIME",
    )
    cache_capacity: int = _setting(
        65536,
        parsers.integer(0, 1 << 24),
        "Number of eager operations in the submission cache; 0 for no cache.",
        "CACHE_CAPACITY",
    )
    autotune: bool = _setting(
        False,
        parsers.boolean,
        "Whether PyTorch's optimizers try bucket sizes in their first steps.",
        "AUTOTUNE",
    )
    autotune_log: str = _setting(
        "",
        str,
        "File to which rank 0 writes the step time of each setting that was tried.",
        "AUTOTUNE_LOG",
    )
    autotune_warmup_samples: int = _setting(
        3,
        parsers.integer(0, 1 << 20),
        "Number of steps with each tried setting that are not measured.",
        "AUTOTUNE_WARMUP_SAMPLES",
    )
    autotune_steps_per_sample: int = _setting(
        10,
        parsers.integer(1, 1 << 20),
        "Number of steps with each tried setting that are measured.",
        "AUTOTUNE_STEPS_PER_SAMPLE",
    )
    same_bits: bool = _setting(
        False,
        parsers.boolean,
        "Whether XLA computes with one thread, and on GPUs with deterministic kernels, "
        "as `ringjax.pieces` needs for equal results on every host.",
    )
    check_parameters: int = _setting(
        1000,
        parsers.integer(0, 2**31 - 1),
        "Number of steps between two checks that all ranks have equal parameters; 0 "
        "for no checks. The first check is in the first step (the second step in Keras "
        "and TensorFlow). Further checks are 1, 10 and 100 steps later.",
    )
    overlap_memory: int = _setting(
        40 << 20,
        parsers.integer(0),
        "Maximum number of bytes of gradients in flight, on CPUs.",
    )
    elastic_overlap_memory: int = _setting(
        1 << 30,
        parsers.integer(0),
        "Maximum number of bytes of gradients in flight in an elastic job, in which "
        "all gradients of a step are in flight and are kept twice. Gradients that need "
        "more bytes are sent in one call.",
    )
    gpu: bool = _setting(True, parsers.boolean, "Whether CUDA devices are used.")
    devices_per_rank: int = _setting(
        1,
        parsers.or_all(parsers.integer(1, 16)),
        "Number of CUDA devices that a rank computes on; all: every device it sees.",
    )
    nccl: str = _setting(
        "", str, "File libnccl.so.2 to load, unless JAX has loaded one already."
    )
    fusion: str = _setting(
        "hybrid",
        parsers.choice("hybrid", "pack", "group"),
        "Tensors that are copied into one buffer on CUDA devices. hybrid: the small "
        "ones. pack: all. group: none.",
    )
    fusion_small: int = _setting(
        1 << 20,
        parsers.integer(0),
        "Bytes of the smallest tensor that hybrid fusion does not copy.",
    )
    comm_stream: bool = _setting(
        True,
        parsers.boolean,
        "Whether communication has its own CUDA stream; 0: no overlap with compute.",
    )
    timeline: str = _setting(
        "",
        str,
        "File for the timeline of rank 0. DYNAMIC: no timeline before start_timeline.",
        "TIMELINE",
    )
    timeline_mark_cycles: bool = _setting(
        False,
        parsers.boolean,
        "Whether the timeline shows the rounds of negotiation.",
        "TIMELINE_MARK_CYCLES",
    )
    report: float = _setting(
        0.0,
        parsers.seconds(),
        "Seconds between two reports of what all ranks wait for; 0 for no reports.",
    )
    metrics: str = _setting(
        "", str, "Address at which ringrun serves metrics: PORT or ADDRESS:PORT."
    )
    metrics_token_file: str = _setting(
        "",
        str,
        "File with the token that Prometheus must send, which only its owner may read.",
    )
    metrics_file: str = _setting(
        "", str, "File NAME.prom to which ringrun writes the metrics every few seconds."
    )
    monitor: str = _setting(
        "", str, "Socket to which this rank sends samples. ringrun's agents set it."
    )
    profile: str = _setting("", str, "Folder for a profile of all ranks.")
    record_dir: str = _setting(
        "",
        str,
        "Folder to which a rank writes its last calls when the job fails; off: none. "
        "Default: the system's folder for temporary files.",
    )
    failpoints: str = _setting(
        "",
        failpoint_setting.checked,
        "For tests: points at which a process dies, waits or fails. See failpoints.py.",
    )
    log_level: str = _setting(
        "warning", parsers.level, "Lowest level of messages to print.", "LOG_LEVEL"
    )

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.size is None):
            given, missing = ("rank", "size") if self.size is None else ("size", "rank")
            raise ValueError(
                f"RINGJAX_{given.upper()} is set but RINGJAX_{missing.upper()} is not"
            )
        for rank, size in (("rank", "size"), ("local_rank", "local_size")):
            r, n = getattr(self, rank), getattr(self, size)
            if r is not None and n is not None and r >= n:
                raise ValueError(
                    f"RINGJAX_{rank.upper()} is {r}: expected less than "
                    f"RINGJAX_{size.upper()}, which is {n}"
                )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """Reads all settings from environment variables.

        If a value is wrong, raises a ValueError that names the variable, its value and
        the expected format.
        """
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            for name, parse in _readings(field):
                text = environ.get(name, "").strip()
                if not text:  # an empty variable counts as not set
                    continue
                try:
                    value = parse(text)
                except ValueError as expected:
                    shown = "(hidden)" if field.metadata["secret"] else repr(text)
                    raise ValueError(
                        f"{name} is {shown}: expected {expected}"
                    ) from None
                if value is not None:
                    values[field.name] = value
                    break
        return cls(**values)

    def secret_bytes(self) -> bytes | None:
        """Returns RINGJAX_SECRET, or the secret in RINGJAX_SECRET_FILE, or None."""
        if self.secret:
            return bytes.fromhex(self.secret)
        if self.secret_file:
            return secret_file.read_secret(self.secret_file)
        return None

    def metrics_token(self) -> str:
        """Returns the token in RINGJAX_METRICS_TOKEN_FILE; "" if that is not set."""
        path = self.metrics_token_file
        return secret_file.read_token(path) if path else ""

    def cache_folder(self, environ: Mapping[str, str] = os.environ) -> str:
        """Returns the folder for cached measurements; "" if the user has no home."""
        if self.cache_dir:
            return self.cache_dir
        base = environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # the XDG specification ignores relative paths
            base = os.path.expanduser("~/.cache")
        return os.path.join(base, "ringjax") if os.path.isabs(base) else ""

    def table(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Yields (field, variables, default, current value, meaning) of each field."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata["secret"] and value:
                value = "(hidden)"
            yield (
                field.name,
                " ".join(variables(field)),
                _show(field.default),
                _show(value),
                field.metadata["meaning"],
            )


def variables(field: dataclasses.Field[object]) -> tuple[str, ...]:
    """Returns the environment variables of a field, in the order of precedence."""
    return tuple(name for name, _ in _readings(field))


def _readings(field: dataclasses.Field[object]) -> Iterator[tuple[str, Parser]]:
    yield f"RINGJAX_{field.name.upper()}", field.metadata["parse"]
    for variable in field.metadata["horovod"]:
        yield f"HOROVOD_{variable.name}", variable.parse


def horovod_names(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the names of all HOROVOD_* variables that are set."""
    given = (name for name, text in environ.items() if text.strip())
    return sorted(name for name in given if name.startswith("HOROVOD_"))


def kubeflow_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that Kubeflow sets in the pods of a TrainJob."""
    return {n: text for n, text in environ.items() if n.startswith("KUBEFLOW_TRAINER_")}


def _show(value: object) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Prints the table of all settings with the values of this environment."""
    head = ("field", "variables", "default", "current", "meaning")
    rows = [head, *Config.from_env().table()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    with stdout.until_closed():
        for row in rows:
            cells = (f"{c:<{width}}" for c, width in zip(row, widths, strict=False))
            print("  ".join((*cells, row[4])))


if __name__ == "__main__":
    main()
