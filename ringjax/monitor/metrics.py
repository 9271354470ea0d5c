"""What a job does, as metrics with Prometheus's names, units and conventions.

Labels are bounded: collectives, two lanes, the process sets of a job (32 of them, then
"other"), ranks. Who serves them: run/monitor/ for a job, observe/ for a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ringjax.monitor.aggregator import OTHER_SETS, Aggregator, RankTotals
from ringjax.monitor.sample import BUCKETS, CollectiveKey, CollectiveSums
from ringjax.monitor.view import View

Labels = Mapping[str, str]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PAIR = '{}="{}"'
# Upper ends of the histograms' buckets in seconds: powers of two of a microsecond.
_ENDS = (*(2**bucket * 1e-6 for bucket in range(BUCKETS - 1)), math.inf)


@dataclass(slots=True)
class MetricFamily:
    """A metric: a sample is what comes behind its name, labels, and a number."""

    name: str
    kind: str
    about: str
    samples: list[tuple[str, Labels, float]] = field(default_factory=list)

    def add(self, value: float, **labels: object) -> None:
        """A sample under the metric's own name."""
        given = {name: str(label) for name, label in labels.items()}
        self.samples.append(("", given, value))


def format_metrics(families: Iterable[MetricFamily]) -> str:
    r"""In Prometheus's text format.

    Example:
        >>> family = MetricFamily("ringjax_ranks", "gauge", "Ranks of the job.")
        >>> family.add(4)
        >>> print(format_metrics([family]), end="")
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
            lines.append(f"{name} {format_number(value)}")
    return "\n".join([*lines, ""])


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def format_number(value: float) -> str:
    """As Prometheus reads it, without a loss.

    Example:
        >>> format_number(3), format_number(0.25), format_number(math.inf)
        ('3', '0.25', '+Inf')
    """
    if value == math.inf:
        return "+Inf"
    whole = value == int(value) and abs(value) < 2**53
    return str(int(value)) if whole else repr(float(value))


def build_info(version: str) -> MetricFamily:
    """Which ringjax this is."""
    family = MetricFamily("ringjax_build_info", "gauge", "1; the version of ringjax.")
    family.add(1, version=version)
    return family


def collective_metrics(
    sums: Mapping[CollectiveKey, CollectiveSums],
) -> Iterator[MetricFamily]:
    """What was exchanged, by collective, lane and process set."""
    of = {key: _labels(key) for key in sorted(sums)}
    for name, what in (
        ("wait", "from a call until all ranks had come"),
        ("move", "from then on until the result was there"),
    ):
        family = MetricFamily(
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
        family = MetricFamily(f"ringjax_collective_{name}_total", "counter", about)
        for key, labels in of.items():
            family.add(getattr(sums[key], name), **labels)
        yield family


def _labels(key: CollectiveKey) -> dict[str, str]:
    op, named, process_set = key
    return {
        "op": op,
        "lane": "named" if named else "compiled",
        "process_set": "other" if process_set == OTHER_SETS else str(process_set),
    }


def _histogram(
    family: MetricFamily, labels: Labels, counts: Iterable[int], seconds: float
) -> None:
    total = 0
    for end, count in zip(_ENDS, counts, strict=True):
        total += count
        family.samples.append(("_bucket", {**labels, "le": format_number(end)}, total))
    family.samples.append(("_sum", labels, seconds))
    family.samples.append(("_count", labels, total))


def job_metrics(aggregator: Aggregator, view: View, version: str) -> list[MetricFamily]:
    """All of a job; `view` is of the last seconds, for what is no sum."""
    epoch = max(aggregator.epoch, 0)
    return [
        build_info(version),
        single_metric("ranks", "gauge", "Ranks of the job now.", aggregator.size),
        single_metric("hosts", "gauge", "Hosts that have ranks now.", view.hosts),
        single_metric(
            "epoch", "gauge", "Which membership of an elastic job it is.", epoch
        ),
        single_metric(
            "joins_total", "counter", "Processes that joined later.", aggregator.joins
        ),
        single_metric(
            "losses_total", "counter", "Processes that were lost.", aggregator.losses
        ),
        single_metric(
            "step_seconds", "gauge", "From step to step, by calls.", view.step
        ),
        single_metric(
            *("bus_bandwidth_bytes_per_second", "gauge"),
            "Over the busiest link while data moves, of the slowest rank.",
            view.busbw,
        ),
        *_ranks(aggregator, view),
        *collective_metrics(aggregator.sums),
    ]


def single_metric(name: str, kind: str, about: str, value: float) -> MetricFamily:
    """A metric that is one number."""
    family = MetricFamily(f"ringjax_{name}", kind, about)
    family.add(value)
    return family


def _ranks(aggregator: Aggregator, view: View) -> Iterator[MetricFamily]:
    info = MetricFamily("ringjax_rank_info", "gauge", "1; the host of a rank.")
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
        family = MetricFamily(f"ringjax_rank_{name}", "gauge", about)
        for row in view.rows:
            family.add(getattr(row, field_name), rank=row.rank)
        yield family
    known = sorted(rank for rank in aggregator.ranks if rank < aggregator.size)
    for name, (_, read) in _OF_RANK.items():
        family = rank_counter(name)
        for rank in known:
            family.add(read(aggregator.ranks[rank]), rank=rank)
        yield family


_OF_RANK: dict[str, tuple[str, Callable[[RankTotals], float]]] = {
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


def rank_counter(name: str) -> MetricFamily:
    """A sum that each rank has, by its name; without samples."""
    return MetricFamily(f"ringjax_rank_{name}_total", "counter", _OF_RANK[name][0])
