"""What a job does, as metrics with Prometheus's names, units and conventions.

Labels are bounded: collectives, two lanes, the process sets of a job (32 of them, then
"other"), ranks. Who serves them: run/monitor/ for a job, observe/ for a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ringjax.monitor.picture import OTHER, OfRank, Picture
from ringjax.monitor.sample import BUCKETS, Key, Sums
from ringjax.monitor.view import View

Labels = Mapping[str, str]
TEXT = "text/plain; version=0.0.4; charset=utf-8"
_PAIR = '{}="{}"'
# Upper ends of the histograms' buckets in seconds: powers of two of a microsecond.
_ENDS = (*(2**bucket * 1e-6 for bucket in range(BUCKETS - 1)), math.inf)


@dataclass(slots=True)
class Family:
    """A metric: a sample is what comes behind its name, labels, and a number."""

    name: str
    kind: str
    about: str
    samples: list[tuple[str, Labels, float]] = field(default_factory=list)

    def add(self, value: float, **labels: object) -> None:
        """A sample under the metric's own name."""
        given = {name: str(label) for name, label in labels.items()}
        self.samples.append(("", given, value))


def text(families: Iterable[Family]) -> str:
    r"""In Prometheus's text format.

    Example:
        >>> family = Family("ringjax_ranks", "gauge", "Ranks of the job.")
        >>> family.add(4)
        >>> print(text([family]), end="")
        # HELP ringjax_ranks Ranks of the job.
        # TYPE ringjax_ranks gauge
        ringjax_ranks 4
    """
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {family.about}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for suffix, labels, value in family.samples:
            pairs = ",".join(_PAIR.format(k, _escaped(v)) for k, v in labels.items())
            name = f"{family.name}{suffix}" + (f"{{{pairs}}}" if pairs else "")
            lines.append(f"{name} {number(value)}")
    return "\n".join([*lines, ""])


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def number(value: float) -> str:
    """As Prometheus reads it, without a loss.

    Example:
        >>> number(3), number(0.25), number(math.inf)
        ('3', '0.25', '+Inf')
    """
    if value == math.inf:
        return "+Inf"
    whole = value == int(value) and abs(value) < 2**53
    return str(int(value)) if whole else repr(float(value))


def build(version: str) -> Family:
    """Which ringjax this is."""
    family = Family("ringjax_build_info", "gauge", "1; the version of ringjax.")
    family.add(1, version=version)
    return family


def collectives(sums: Mapping[Key, Sums]) -> Iterator[Family]:
    """What was exchanged, by collective, lane and process set."""
    of = {key: _labels(key) for key in sorted(sums)}
    for name, what in (
        ("wait", "from a call until all ranks had come"),
        ("move", "from then on until the result was there"),
    ):
        family = Family(
            f"ringjax_collective_{name}_seconds", "histogram", f"Time {what}."
        )
        for key, labels in of.items():
            seconds = getattr(sums[key], f"{name}_seconds")
            _histogram(family, labels, getattr(sums[key], name), seconds)
        yield family
    for name, about in (
        ("bytes", "Bytes of the ranks' tensors in collectives."),
        ("failures", "Collectives that failed."),
    ):
        family = Family(f"ringjax_collective_{name}_total", "counter", about)
        for key, labels in of.items():
            family.add(getattr(sums[key], name), **labels)
        yield family


def _labels(key: Key) -> dict[str, str]:
    op, named, process_set = key
    return {
        "op": op,
        "lane": "named" if named else "compiled",
        "process_set": "other" if process_set == OTHER else str(process_set),
    }


def _histogram(
    family: Family, labels: Labels, counts: Iterable[int], seconds: float
) -> None:
    total = 0
    for end, count in zip(_ENDS, counts, strict=True):
        total += count
        family.samples.append(("_bucket", {**labels, "le": number(end)}, total))
    family.samples.append(("_sum", labels, seconds))
    family.samples.append(("_count", labels, total))


def of_job(picture: Picture, view: View, version: str) -> list[Family]:
    """All of a job; `view` is of the last seconds, for what is no sum."""
    epoch = max(picture.epoch, 0)
    return [
        build(version),
        one("ranks", "gauge", "Ranks of the job now.", picture.size),
        one("hosts", "gauge", "Hosts that have ranks now.", view.hosts),
        one("epoch", "gauge", "Which membership of an elastic job it is.", epoch),
        one("joins_total", "counter", "Processes that joined later.", picture.joins),
        one("losses_total", "counter", "Processes that were lost.", picture.losses),
        one("step_seconds", "gauge", "From step to step, by calls.", view.step),
        one(
            *("bus_bandwidth_bytes_per_second", "gauge"),
            "Over the busiest link while data moves, of the slowest rank.",
            view.busbw,
        ),
        *_ranks(picture, view),
        *collectives(picture.sums),
    ]


def one(name: str, kind: str, about: str, value: float) -> Family:
    """A metric that is one number."""
    family = Family(f"ringjax_{name}", kind, about)
    family.add(value)
    return family


def _ranks(picture: Picture, view: View) -> Iterator[Family]:
    info = Family("ringjax_rank_info", "gauge", "1; the host of a rank.")
    for row in view.rows:
        info.add(1, rank=row.rank, host=row.host)
    yield info
    for name, about, field_name in (
        (
            "lateness_seconds",
            "How late a rank usually is, if it is last.",
            "late_by",
        ),
        ("memory_bytes", "Memory of a rank's process.", "memory"),
        ("silence_seconds", "Time since a rank told something.", "silent"),
    ):
        family = Family(f"ringjax_rank_{name}", "gauge", about)
        for row in view.rows:
            family.add(getattr(row, field_name), rank=row.rank)
        yield family
    known = sorted(rank for rank in picture.ranks if rank < picture.size)
    for name, (_, read) in _OF_RANK.items():
        family = of_rank(name)
        for rank in known:
            family.add(read(picture.ranks[rank]), rank=rank)
        yield family


_OF_RANK: dict[str, tuple[str, Callable[[OfRank], float]]] = {
    "calls": ("Calls of a rank.", lambda one: one.share.calls),
    "wait_seconds": (
        "Time in which some call waited for ranks.",
        lambda one: one.share.waiting,
    ),
    "move_seconds": (
        "Time in which some call moved data.",
        lambda one: one.share.moving,
    ),
    "exposed_seconds": (
        "Time that overlapping did not hide.",
        lambda one: one.share.exposed,
    ),
    "last": ("Calls in which a rank came last, of those looked at.", lambda o: o.last),
    "delay_seconds": ("Time that others waited for a rank in those.", lambda o: o.lost),
}


def of_rank(name: str) -> Family:
    """A sum that each rank has, by its name; without samples."""
    return Family(f"ringjax_rank_{name}_total", "counter", _OF_RANK[name][0])
