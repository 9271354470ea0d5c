"""Every setting of ringjax: one frozen dataclass, one table of environment variables.

The only reader of RINGJAX_* and HOROVOD_*. `python -m ringjax.config` prints the table.
Not for what engines (Open MPI, Slurm, ...) put into the environment: see
control/launch_environment.py.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ringjax import failpoints as fail
from ringjax import stdout
from ringjax.settings import parsers, secret_file
from ringjax.settings.parsers import LOG_LEVELS as LOG_LEVELS
from ringjax.settings.parsers import Parser


@dataclass(frozen=True)
class HorovodVariable:
    """A variable of Horovod for a setting of ours, in other words or units.

    Attributes:
        name: without HOROVOD_.
        parse: to our value; None: this variable says nothing about it.
    """

    name: str
    parse: Parser


def _setting(
    default: Any,
    parse: Parser,
    meaning: str,
    *horovod: str | HorovodVariable,
    secret: bool = False,
) -> Any:
    """A field with how to read it; `horovod` are the names Horovod has for it."""
    aliases = tuple(
        a if isinstance(a, HorovodVariable) else HorovodVariable(a, parse)
        for a in horovod
    )
    about = {"parse": parse, "meaning": meaning, "horovod": aliases, "secret": secret}
    return dataclasses.field(default=default, metadata=about, repr=not secret)


_RANK, _COUNT = parsers.integer(0, 2**31 - 1), parsers.integer(1, 2**31 - 1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one process. A field FIELD is read from RINGJAX_FIELD.

    Example:
        >>> Config.from_env({"RINGJAX_RING_BYTES": "65536"}).ring_bytes
        65536
    """

    rank: int | None = _setting(None, _RANK, "this process's rank", "RANK")
    size: int | None = _setting(None, _COUNT, "processes of the job", "SIZE")
    local_rank: int | None = _setting(None, _RANK, "rank on this host", "LOCAL_RANK")
    local_size: int | None = _setting(
        None, _COUNT, "processes on this host", "LOCAL_SIZE"
    )
    cross_rank: int | None = _setting(
        None, _RANK, "this host among the hosts with my local rank", "CROSS_RANK"
    )
    cross_size: int | None = _setting(
        None, _COUNT, "hosts that have a process with my local rank", "CROSS_SIZE"
    )
    rendezvous: str = _setting(
        "", str, "where the coordinator of the job listens: host:port,..."
    )
    secret: str = _setting(
        "",
        secret_file.SECRET,
        "the job's secret in hexadecimal digits",
        secret=True,
    )
    secret_file: str = _setting(
        "", str, "a file that holds the secret, readable by its owner only"
    )
    job: str = _setting("", parsers.hexadecimal(16, exactly=True), "the job's id")
    elastic: bool = _setting(
        False, parsers.boolean, "ranks may be lost and join; ringrun --min-np sets it"
    )
    spread: bool = _setting(
        False,
        parsers.boolean,
        "an elastic job that began on several hosts; ringrun sets it",
    )
    worker: int | None = _setting(
        None, _RANK, "number of this process in an elastic job, never used again"
    )
    group_size: int = _setting(
        1, _COUNT, "processes that JAX joins to one; averages are between such groups"
    )
    tls: str = _setting(
        "auto",
        parsers.choice("auto", "required", "off"),
        "encrypt control connections; auto: if both ends have Python 3.13; required: "
        "links between hosts, too",
    )
    hostname: str = _setting("", str, "this host's name in the job", "HOSTNAME")
    start_timeout: float = _setting(
        120.0,
        parsers.seconds(0.1),
        "for all ranks to appear and connect",
        "START_TIMEOUT",
    )
    elastic_timeout: float = _setting(
        600.0,
        parsers.seconds(0.1),
        "of waiting for ranks to join when too few are left",
        "ELASTIC_TIMEOUT",
    )
    stall_warning: float = _setting(
        10.0,
        parsers.seconds(),
        "of waiting for a living rank until a warning, 0 = never",
        HorovodVariable("STALL_CHECK_DISABLE", parsers.if_true(0.0)),
        "STALL_CHECK_TIME_SECONDS",
    )
    collective_timeout: float = _setting(
        60.0,
        parsers.seconds(),
        "of waiting for a living rank until an error, 0 = never",
        HorovodVariable("STALL_CHECK_DISABLE", parsers.if_true(0.0)),
        "STALL_SHUTDOWN_TIME_SECONDS",
    )
    failure_timeout: float = _setting(
        5.0,
        parsers.seconds(0.1),
        "of silence until a rank counts as lost",
        "GLOO_TIMEOUT_SECONDS",
    )
    heartbeat: float = _setting(1.0, parsers.seconds(0.01), "between two signs of life")
    ring_bytes: int = _setting(
        1 << 20,
        parsers.power_of_two(1 << 14, 1 << 28),
        "shared memory per direction of a pair on one host",
    )
    tile_bytes: int = _setting(
        1 << 19,
        parsers.multiple_of(1 << 12, 1 << 28),
        "sums on one host pass through shared memory in such tiles, 0 = "
        "through the rings",
    )
    tcp_streams: int = _setting(
        2, parsers.integer(1, 16), "data sockets per pair of hosts"
    )
    network_interfaces: str = _setting(
        "", str, "use these interfaces only: name,...", "GLOO_IFACE"
    )
    shm: bool = _setting(
        True, parsers.boolean, "shared memory between ranks of one host"
    )
    algorithm: str = _setting(
        "", str, "force one: ring, or allreduce:ring,broadcast:binomial"
    )
    calibrate: str = _setting(
        "auto",
        parsers.choice("auto", "always", "off"),
        "measure the links at start; auto: unless the cache remembers them",
    )
    cache_dir: str = _setting(
        "", str, "for what is remembered; default: ringjax in the user's cache folder"
    )
    spin_us: float = _setting(
        50.0, parsers.seconds(), "microseconds of busy waiting before sleeping"
    )
    bucket_bytes: int = _setting(
        25 << 20,
        parsers.integer(0),
        "gradients per message, 0 = no fusion",
        "FUSION_THRESHOLD",
    )
    fusion_threshold: int = _setting(
        128 << 20,
        parsers.integer(0),
        "bytes of eager operations in one message, 0 = no fusion",
        "FUSION_THRESHOLD",
    )
    group_fusion: bool = _setting(
        True,
        parsers.boolean,
        "grouped eager operations may share a message with others",
        HorovodVariable("DISABLE_GROUP_FUSION", parsers.if_true(False)),
    )
    cycle_time: float = _setting(
        0.0,
        parsers.seconds(unit="milliseconds"),
        "milliseconds that an eager operation waits for more to fuse with",
        "CYCLE_TIME",
    )
    cache_capacity: int = _setting(
        65536,
        parsers.integer(0, 1 << 24),
        "eager operations that ranks remember, 0 = none",
        "CACHE_CAPACITY",
    )
    autotune: bool = _setting(
        False,
        parsers.boolean,
        "PyTorch's optimizers try bucket sizes in their first steps",
        "AUTOTUNE",
    )
    autotune_log: str = _setting(
        "",
        str,
        "file in which rank 0 writes how long steps took with what was tried",
        "AUTOTUNE_LOG",
    )
    autotune_warmup_samples: int = _setting(
        3,
        parsers.integer(0, 1 << 20),
        "steps with each setting that do not count",
        "AUTOTUNE_WARMUP_SAMPLES",
    )
    autotune_steps_per_sample: int = _setting(
        10,
        parsers.integer(1, 1 << 20),
        "steps with each setting that count",
        "AUTOTUNE_STEPS_PER_SAMPLE",
    )
    check_parameters: int = _setting(
        1000,
        parsers.integer(0, 2**31 - 1),
        "steps between two looks whether all ranks have the same parameters, beginning "
        "with the first, in Keras and TensorFlow the second, and 1, 10 and 100 steps "
        "after it, too; 0 = never",
    )
    overlap_memory: int = _setting(
        40 << 20,
        parsers.integer(0),
        "most bytes of gradients that are on their way, on CPUs",
    )
    elastic_overlap_memory: int = _setting(
        1 << 30,
        parsers.integer(0),
        "the same in an elastic job, where all of a step are, each one twice; if that "
        "is not enough they go in one call",
    )
    gpu: bool = _setting(
        True, parsers.boolean, "CUDA devices; 0: as if there were none"
    )
    devices_per_rank: int = _setting(
        1,
        parsers.or_all(parsers.integer(1, 16)),
        "CUDA devices that a rank computes on; all: every one that it sees",
    )
    nccl: str = _setting(
        "", str, "libnccl.so.2 to load, unless JAX has loaded one already"
    )
    fusion: str = _setting(
        "hybrid",
        parsers.choice("hybrid", "pack", "group"),
        "on CUDA: copy small tensors, all, or none into one buffer",
    )
    fusion_small: int = _setting(
        1 << 20,
        parsers.integer(0),
        "bytes of a tensor that is not small to hybrid fusion",
    )
    comm_stream: bool = _setting(
        True,
        parsers.boolean,
        "a CUDA stream of its own for communication; 0: no overlap",
    )
    timeline: str = _setting(
        "",
        str,
        "file for a timeline of rank 0; DYNAMIC: none before start_timeline",
        "TIMELINE",
    )
    timeline_mark_cycles: bool = _setting(
        False,
        parsers.boolean,
        "mark the rounds of negotiation in it",
        "TIMELINE_MARK_CYCLES",
    )
    report: float = _setting(
        0.0,
        parsers.seconds(),
        "between two reports of what all ranks wait for, 0 = none",
    )
    metrics: str = _setting(
        "", str, "where ringrun serves metrics: PORT of this host, or ADDRESS:PORT"
    )
    metrics_token_file: str = _setting(
        "", str, "a file that holds what Prometheus must show there, its owner's only"
    )
    metrics_file: str = _setting(
        "", str, "a file where ringrun writes the same every few seconds, NAME.prom"
    )
    monitor: str = _setting(
        "", str, "where this rank tells how it is; ringrun's agents set it"
    )
    profile: str = _setting("", str, "folder for a profile of all ranks")
    record_dir: str = _setting(
        "",
        str,
        "where a rank writes its last calls when the job fails; off: nowhere; "
        "default: the system's folder for temporary files",
    )
    failpoints: str = _setting(
        "", fail.checked, "for tests: where to die, wait or fail, see failpoints.py"
    )
    log_level: str = _setting(
        "warning", parsers.level, "least level to print", "LOG_LEVEL"
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
        """Reads every setting.

        Raises:
            ValueError: naming the variable, its value and what is expected.
        """
        values = {}
        for field in dataclasses.fields(cls):
            for name, parse in _readings(field):
                text = environ.get(name, "").strip()
                if not text:  # an empty variable is an unset one
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
        """The job's secret from RINGJAX_SECRET or RINGJAX_SECRET_FILE; None if unset.

        Raises:
            ValueError: the file cannot be read, others may read it, or it holds no
                secret.
        """
        if self.secret:
            return bytes.fromhex(self.secret)
        if self.secret_file:
            return secret_file.read(self.secret_file)
        return None

    def metrics_token(self) -> str:
        """What RINGJAX_METRICS_TOKEN_FILE holds; raises as secret_bytes."""
        path = self.metrics_token_file
        return secret_file.read_token(path) if path else ""

    def cache_folder(self, environ: Mapping[str, str] = os.environ) -> str:
        """Where to remember something for later jobs; nothing if there is no place."""
        if self.cache_dir:
            return self.cache_dir
        base = environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # its specification says so
            base = os.path.expanduser("~/.cache")
        return os.path.join(base, "ringjax") if os.path.isabs(base) else ""

    def table(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Rows of (field, variables, default, current value, meaning)."""
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


def variables(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """The environment variables of a field, the strongest first."""
    return tuple(name for name, _ in _readings(field))


def _readings(field: dataclasses.Field[Any]) -> Iterator[tuple[str, Parser]]:
    yield f"RINGJAX_{field.name.upper()}", field.metadata["parse"]
    for alias in field.metadata["horovod"]:
        yield f"HOROVOD_{alias.name}", alias.parse


def horovod_names(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The variables of Horovod that are set, known to us or not."""
    given = (name for name, text in environ.items() if text.strip())
    return sorted(name for name in given if name.startswith("HOROVOD_"))


def _show(value: object) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Prints the table of all settings as this environment sets them."""
    head = ("field", "variables", "default", "current", "meaning")
    rows = [head, *Config.from_env().table()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    with stdout.until_closed():
        for row in rows:
            cells = (f"{c:<{width}}" for c, width in zip(row, widths, strict=False))
            print("  ".join((*cells, row[4])))


if __name__ == "__main__":
    main()
