"""Tests of metrics: their text, endpoint, and file, and misbehaving clients."""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import leaks
from support.launch import ROOT
from support.waiting import LONG, until

from ringjax.config import Config
from ringjax.monitor import metrics, view
from ringjax.monitor.aggregator import Aggregator
from ringjax.monitor.job_time import PROGRESS
from ringjax.monitor.metrics import MetricFamily
from ringjax.monitor.sample import BUCKETS, CollectiveSums, Sample
from ringjax.run.monitor.options import MonitorOptions, monitor_options
from ringjax.run.monitor.prometheus import PrometheusEndpoint, PrometheusTextFile

BOARD = json.loads((ROOT / "examples/grafana/dashboard.json").read_text())


def _job(ranks: int = 3) -> str:
    aggregator = Aggregator()
    window = aggregator.open_window(0.0)
    counts = [0] * BUCKETS
    counts[0], counts[10], counts[-1] = 2, 5, 1
    for when in (1.0, 2.0):
        for rank in range(ranks):
            one = CollectiveSums(8, 800, 1, 30.5, 0.25, counts, counts)
            sums = {("allreduce", "named", 0): one, ("allgather", "compiled", 40): one}
            host = 'no"de\\a\n'
            told = Sample(rank, ranks, 2, host, 16, 61.0, 0.5, 0.125, sums=sums)
            told.faults = rank * int(when)
            aggregator.add_sample(rank, told, when)
    aggregator.spares = [(7, "n1", True), (8, "n1", False), (9, "n2", True)]
    seen = view.make_view(aggregator, window, 2.0)
    families = metrics.job_metrics(aggregator, seen, "1.2.3")
    families += metrics.time_metrics({PROGRESS: 0.75, "start": 0.25})
    return metrics.format_metrics(families)


def test_prometheuss_own_parser_reads_it() -> None:
    families = {f.name: f for f in text_string_to_metric_families(_job())}
    assert families["ringjax_ranks"].samples[0].value == 3
    assert families["ringjax_epoch"].samples[0].value == 2
    spares = families["ringjax_spares"].samples
    assert {s.labels["state"]: s.value for s in spares} == {"asleep": 2, "starting": 1}
    assert families["ringjax_build_info"].samples[0].labels == {"version": "1.2.3"}
    lost = families["ringjax_lost_time_ratio"].samples
    assert [(s.labels, s.value) for s in lost] == [({"part": "start"}, 0.25)]
    info = families["ringjax_rank_info"].samples
    assert {s.labels["host"] for s in info} == {'no"de\\a\n'}
    failures = families["ringjax_collective_failures"]
    assert failures.type == "counter" and failures.samples[0].value == 3
    faults = families["ringjax_rank_faults"]
    assert faults.type == "counter" and [s.value for s in faults.samples] == [0, 2, 4]
    waits = families["ringjax_collective_wait_seconds"]
    assert waits.type == "histogram"
    named = [s for s in waits.samples if s.labels["lane"] == "named"]
    buckets = [s for s in named if s.name.endswith("_bucket")]
    ends = [float(s.labels["le"]) for s in buckets]
    assert ends == sorted(ends) and ends[-1] == math.inf and len(ends) == BUCKETS
    values = [s.value for s in buckets]
    assert values == sorted(values) and values[0] == 6 and values[-1] == 24
    assert {s.name: s.value for s in named if "bucket" not in s.name} == {
        "ringjax_collective_wait_seconds_sum": 91.5,
        "ringjax_collective_wait_seconds_count": 24,
    }
    for family in families.values():
        assert family.documentation
        labels = [(s.name, *sorted(s.labels.items())) for s in family.samples]
        assert len(labels) == len(set(labels)), family.name


def test_names_follow_prometheuss_conventions() -> None:
    text = _job()
    for name, kind in re.findall(r"(?m)^# TYPE (\w+) (\w+)$", text):
        assert re.fullmatch(r"ringjax_[a-z_]+", name)
        assert (kind == "counter") == name.endswith("_total"), name
        assert not re.search(r"_(ms|us|kb|mb|percent)(_|$)", name)
        if kind == "histogram":
            assert name.endswith("_seconds")


def test_metrics_before_the_first_sample() -> None:
    aggregator = Aggregator()
    seen = view.make_view(aggregator, aggregator.open_window(0.0), 1.0)
    text = metrics.format_metrics(metrics.job_metrics(aggregator, seen, "1"))
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert families["ringjax_ranks"].samples[0].value == 0
    assert "ringjax_spares" not in families  # the job has no --spares
    assert "ringjax_collective_wait_seconds" not in families


@pytest.mark.parametrize("value", [0, 1, 2**53 + 2.0, 1e-9, 0.1, 1e300, -1.5])
def test_numbers_keep_their_value(value: float) -> None:
    family = MetricFamily("x", "gauge", "y")
    family.add(value)
    (read,) = text_string_to_metric_families(metrics.format_metrics([family]))
    assert read.samples[0].value == value


def test_the_documentation_lists_all_metrics() -> None:
    page = (ROOT / "docs/operate/monitoring.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `ringjax_")]
    listed: dict[str, str] = {}
    for row in rows:
        names, kind, *_ = row.strip("|").split("|")
        for name in re.findall(r"ringjax_\w+", names):
            listed[name] = kind.strip()
    assert listed == dict(re.findall(r"# TYPE (\w+) (\w+)", _job()))


# The dashboard.


def _queries() -> Iterator[str]:
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


@pytest.mark.parametrize("query", sorted(set(_queries())))
def test_dashboard_queries_use_existing_metrics(query: str) -> None:
    text = _job()
    known = dict(re.findall(r"# TYPE (\w+) (\w+)", text))
    for name, function in _uses(query):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        kind = known[name] if name in known else known[base]
        # Only the growth of a counter is meaningful.
        grows = function in ("rate", "increase")
        assert grows == (kind != "gauge") or name in ("ringjax_losses_total",), query
    lists = r"(?:by|without|on|ignoring|group_left) \(([^)]*)\)"
    for labels in re.findall(lists, query):
        named = set(re.findall(r"\w+", labels))
        assert named <= {"instance", "rank", "host", "op", "lane", "le"}


def _uses(query: str) -> Iterator[tuple[str, str]]:
    """Yields each metric of a query, and the function that it is an argument of."""
    found = list(re.finditer(r"(?:(\w+)\()?(ringjax_\w+)", query))
    assert found
    for match in found:
        yield match[2], match[1] or ""


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    assert BOARD["title"] == "ringjax" and BOARD["schemaVersion"] >= 36
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    places: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        x, y, w, h = (panel["gridPos"][name] for name in "xywh")
        cells = {(x + dx, y + dy) for dx in range(w) for dy in range(h)}
        assert not cells & places and x + w <= 24, panel["title"]
        places |= cells


# Access to the metrics.


@pytest.mark.parametrize(
    ("given", "host", "port"),
    [
        ("9400", "127.0.0.1", 9400),
        ("127.0.0.5:9400", "127.0.0.5", 9400),
        ("[::1]:9400", "::1", 9400),
        ("localhost:0", "localhost", 0),
    ],
)
def test_loopback_addresses_need_no_token(given: str, host: str, port: int) -> None:
    found = monitor_options(Config(metrics=given))
    assert (found.host, found.port, found.token) == (host, port, "")


@pytest.mark.parametrize("given", ["", ":", "x", ":9400", "h:", "h:x", "65536", "-1"])
def test_bad_addresses_are_refused(given: str) -> None:
    if given:
        with pytest.raises(ValueError, match="--metrics"):
            monitor_options(Config(metrics=given))
    else:
        assert not monitor_options(Config(metrics=given)).needs_samples


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "[::]", "node-a", "localhos"])
def test_other_hosts_need_a_token(host: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a token is needed"):
        monitor_options(Config(metrics=f"{host}:9400"))
    file = tmp_path / "token"
    file.write_text("a1" * 16 + "\n")
    file.chmod(0o644)
    config = Config(metrics=f"{host}:9400", metrics_token_file=str(file))
    with pytest.raises(ValueError, match="others may use it"):
        monitor_options(config)
    file.chmod(0o600)
    assert monitor_options(config).token == "a1" * 16
    file.write_text("short")
    with pytest.raises(ValueError, match="at least 16 letters and digits"):
        monitor_options(config)


def test_the_metrics_file_must_end_in_prom() -> None:
    with pytest.raises(ValueError, match="expected NAME.prom"):
        monitor_options(Config(metrics_file="/tmp/metrics.txt"))


Serve = Callable[..., PrometheusEndpoint]


@pytest.fixture
def serve() -> Iterator[Serve]:
    before = leaks.Snapshot.take()
    with contextlib.ExitStack() as stack:

        def begin(token: str = "", host: str = "127.0.0.1") -> PrometheusEndpoint:
            endpoint = PrometheusEndpoint(
                MonitorOptions(host=host, token=token), lambda: "ringjax_x 1\n"
            )
            stack.callback(endpoint.close)
            return endpoint

        yield begin
    assert not leaks.settle(before.leaked_since, 10)


def _get(url: str, **headers: str) -> tuple[int, str, str]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=LONG) as answer:
            kind = answer.headers["Content-Type"]
            return answer.status, kind, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", error.read().decode()


def test_metrics_are_served(serve: Serve) -> None:
    url = serve().url
    assert _get(url) == (200, metrics.CONTENT_TYPE, "ringjax_x 1\n")
    assert _get(url.removesuffix("metrics"))[0] == 404
    assert _get(url + "?x=1")[0] == 200


def test_metrics_are_served_over_ipv6(serve: Serve) -> None:
    url = serve(host="::1").url
    assert url.startswith("http://[::1]:") and _get(url)[0] == 200


def test_a_token_is_required(serve: Serve) -> None:
    url = serve("secret0123456789").url
    for wrong in ("", "Bearer", "Bearer x", "Basic secret0123456789", "Bearer \xe4"):
        assert _get(url, **({"Authorization": wrong} if wrong else {}))[0] == 401
    assert _get(url, Authorization="Bearer secret0123456789")[0] == 200


def test_a_port_that_is_taken(serve: Serve) -> None:
    taken = serve()
    port = int(taken.url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: .* in use"):
        PrometheusEndpoint(MonitorOptions(host="127.0.0.1", port=port), str)


def _address(endpoint: PrometheusEndpoint) -> tuple[str, int]:
    host, _, port = (
        endpoint.url.removeprefix("http://").partition("/")[0].partition(":")
    )
    return host, int(port)


GARBAGE = [
    b"",
    b"\x16\x03\x01\x02\x00\x01\x00",  # TLS
    b"\0" * 70_000,
    b"GET /metrics\r\n\r\n",
    b"GET " + b"/" * 70_000,
    b"GET /metrics HTTP/9.9\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 10\r\n\r\nxxxxxxxxxx",
    b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
    b"GET /../../etc/passwd HTTP/1.0\r\n\r\n",
    b"GET /metrics HTTP/1.0\r\nAuthorization: \xff\xfe\r\n\r\n",
]


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_requests_are_served_after_garbage(
    serve: Serve, data: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    endpoint = serve()
    sock = socket.create_connection(_address(endpoint), LONG)
    with sock, contextlib.suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    assert _get(endpoint.url)[0] == 200
    assert capfd.readouterr() == ("", "")


def _serving() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if "process_request" in t.name]


def test_silent_clients_do_not_block_others(serve: Serve) -> None:
    """More clients connect than are served. Each sends half a request or nothing."""
    endpoint = serve()
    with contextlib.ExitStack() as stack:
        for number in range(30):
            sock = socket.create_connection(_address(endpoint), LONG)
            stack.callback(sock.close)
            if number % 2:
                sock.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
        for _ in range(3):
            assert _get(endpoint.url)[0] == 200
        until(lambda: len(_serving()) <= 9)


def test_a_client_that_does_not_read_does_not_block_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "ringjax.run.monitor.prometheus._PrometheusHandler.timeout", 3600.0
    )
    endpoint = PrometheusEndpoint(
        MonitorOptions(host="127.0.0.1"), lambda: "x" * (32 << 20)
    )
    with (
        contextlib.closing(endpoint),
        socket.create_connection(_address(endpoint), LONG) as sock,
    ):
        sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert sock.recv(1, socket.MSG_PEEK)  # the rest exceeds the buffers
        endpoint.close()
        until(lambda: not _serving())


def test_the_file_is_replaced_atomically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringjax.run.monitor.prometheus._WRITE_INTERVAL", 0.001)
    count = iter(range(1_000_000))

    def render() -> str:
        return f"ringjax_x {next(count)}\n" * 20_000

    path = tmp_path / "job.prom"
    file = PrometheusTextFile(str(path), render, print)
    try:
        seen = set()
        while len(seen) < 20:
            lines = path.read_text().splitlines()
            assert len(lines) == 20_000 and len(set(lines)) == 1
            seen.add(lines[0])
        assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444
        assert {p.name for p in tmp_path.glob("*.prom")} == {"job.prom"}
    finally:
        file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="--metrics-file .*job.prom: No such file"):
        PrometheusTextFile(str(tmp_path / "missing" / "job.prom"), str, print)


def test_a_removed_folder_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringjax.run.monitor.prometheus._WRITE_INTERVAL", 0.05)
    folder, said = tmp_path / "folder", list[str]()
    folder.mkdir()
    file = PrometheusTextFile(str(folder / "job.prom"), str, said.append)
    try:
        (folder / "job.prom").unlink()
        folder.rmdir()
        until(lambda: said)
        until(lambda: not file._thread.is_alive())
    finally:
        file.close()
    assert len(said) == 1 and "No such file" in said[0]
