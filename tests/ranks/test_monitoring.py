"""Monitoring of running jobs: metrics, `ringjax top`, and faulty or hostile clients."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import leaks
from support.launch import ROOT, StartJob, environment
from support.monitored_job import ELASTIC, STATIC, MonitoredJob
from support.waiting import LONG

from ringjax.monitor import sockets
from ringjax.top.job_connection import JobConnection, JobStatus


@pytest.fixture
def watched(start_job: StartJob, tmp_path: Path) -> MonitoredJob:
    return MonitoredJob(start_job, tmp_path)


DASHBOARD = json.loads((ROOT / "examples/grafana/dashboard.json").read_text())


def _statuses(job: JobConnection, seconds: float = 20.0) -> Iterator[JobStatus]:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if (status := job.read(left)) is not None:
            yield status


def _until(job: JobConnection, done: Callable[[JobStatus], bool]) -> JobStatus:
    last: JobStatus | None = None
    for last in _statuses(job):
        if done(last):
            return last
    pytest.fail(f"the condition never held; the last status: {last}")


def test_metrics_of_a_job_on_two_hosts(watched: MonitoredJob) -> None:
    hosts = ["-H", "localhost:1,other:2", "--agent-command", "env X={host}"]
    watched.start(3, STATIC, "--metrics", "0", *hosts)
    seen = watched.wait_for(
        lambda m: (
            len(m.get("ringjax_rank_calls_total", ())) == 3
            and min(m["ringjax_rank_last_total"].values()) >= 0
            and sum(m["ringjax_rank_last_total"].values()) > 60
        )
    )
    assert seen["ringjax_ranks"] == {"": 3} and seen["ringjax_hosts"] == {"": 2}
    assert set(seen["ringjax_rank_info"]) == {"0,localhost", "1,other", "2,other"}
    delay = seen["ringjax_rank_delay_seconds_total"]
    assert delay["1"] > 2 * max(delay["0"], delay["2"])
    waits = seen["ringjax_rank_wait_seconds_total"]
    assert waits["1"] < min(waits["0"], waits["2"])
    size = seen["ringjax_collective_bytes_total"]
    assert list(size) == ["allreduce,named,0"]
    calls = seen["ringjax_collective_wait_seconds_count"]["allreduce,named,0"]
    assert abs(size["allreduce,named,0"] - calls / 2 * 200_008) <= 3 * 200_008
    assert min(seen["ringjax_rank_memory_bytes"].values()) > 1 << 20
    watched.end()


def test_metrics_of_a_job_with_losses_and_joins(watched: MonitoredJob) -> None:
    words = ("--min-np", "2", "--spares", "1", "--metrics", "0")
    watched.start(3, ELASTIC, *words)
    before = watched.wait_for(
        lambda m: (
            len(m.get("ringjax_rank_calls_total", ())) == 3
            and m["ringjax_spares"] == {"asleep": 1, "starting": 0}
        )
    )
    assert (before["ringjax_losses_total"], before["ringjax_epoch"]) == ({"": 0},) * 2
    (watched.folder / "lose").touch()
    after = watched.wait_for(
        lambda m: (
            m["ringjax_joins_total"][""] == 1
            and len(m["ringjax_rank_memory_bytes"]) == 3
        )
    )
    assert after["ringjax_losses_total"][""] == 1 and after["ringjax_epoch"][""] >= 2
    for name in ("ringjax_rank_calls_total", "ringjax_collective_bytes_total"):
        for labels, value in before[name].items():
            assert after[name][labels] >= value, name  # lost workers keep their sums
    watched.end()


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed"
)
def test_prometheus_scrapes_a_job(watched: MonitoredJob) -> None:
    token = watched.folder / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef")
    options = ("--metrics", "0", "--metrics-token-file", str(token))
    watched.start(2, STATIC, *options)
    address = urllib.parse.urlsplit(watched.url()).netloc
    config = watched.folder / "prometheus.yml"
    scrape = {
        "job_name": "ringjax",
        "scrape_interval": "1s",
        "static_configs": [{"targets": [address]}],
        "authorization": {"credentials_file": str(token)},
    }
    config.write_text(json.dumps({"scrape_configs": [scrape]}))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen(
        [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={watched.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as prometheus:
        try:
            delay = "rate(ringjax_rank_delay_seconds_total[20s])"
            (late,) = _query(port, f"topk(1, {delay} > 0)")
            assert late["metric"]["rank"] == "1" and float(late["value"][1]) < 1
            quantile = (
                "histogram_quantile(0.5, sum by (le)"
                "(rate(ringjax_collective_move_seconds_bucket[20s])))"
            )
            (median,) = _query(port, quantile)
            assert float(median["value"][1]) > 1e-6
            (up,) = _query(port, 'up{job="ringjax"}')
            assert up["value"][1] == "1"
            for panel in DASHBOARD["panels"]:
                for target in panel["targets"]:
                    query = target["expr"].replace("$__rate_interval", "20s")
                    assert _query(port, query.replace("$instance", ".*")), query
        finally:
            prometheus.terminate()
    watched.end()


def _query(port: int, query: str) -> list[dict[str, Any]]:
    """Queries Prometheus until the result is not empty, and returns the result."""
    url = f"http://127.0.0.1:{port}/api/v1/query?"
    found: list[list[dict[str, Any]]] = [[]]

    def send_query() -> list[str]:
        with contextlib.suppress(OSError):
            encoded = urllib.parse.urlencode({"query": query})
            with urllib.request.urlopen(url + encoded, timeout=5) as response:
                result = json.load(response)["data"]["result"]
                found[0] = [one for one in result if one["value"][1] != "NaN"]
        return [] if found[0] else ["no result"]

    assert not leaks.settle(send_query, 30), query
    return found[0]


def test_top_of_a_job_started_without_monitoring_options(
    watched: MonitoredJob,
) -> None:
    watched.start(3, ELASTIC, "--min-np", "2")
    with contextlib.closing(watched.attach()) as job:
        seen = _until(job, lambda s: s.view.culprit == 1 and s.view.step > 0)
        assert [row.rank for row in seen.view.rows] == [0, 1, 2]
        assert seen.view.step > 0.02
        assert 0.5 < seen.view.step * seen.view.rate < 8  # a step has two calls
        assert seen.view.rows[1].place.endswith(("in load", "in step"))
        assert seen.view.rows[0].waits > 2 * seen.view.rows[1].waits
        assert seen.events == [] and seen.elastic and seen.pid == watched.job.pid
        (watched.folder / "lose").touch()
        seen = _until(job, lambda s: s.joins == 1 and len(s.view.rows) == 3)
        assert seen.losses == 1 and len(seen.events) == 2
        assert "killed by signal 9" in seen.events[0][1]
        assert "joined as rank 2" in seen.events[1][1]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ringjax", "top", "--once"],
        env=environment("top", {"TMPDIR": str(watched.temporary)}),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert "3 ranks on 1 host" in done.stdout and "1 joined, 1 lost" in done.stdout
    watched.end()


def test_top_shows_a_stopped_rank(watched: MonitoredJob) -> None:
    watched.start(2, STATIC)
    with contextlib.closing(watched.attach()) as job:
        _until(job, lambda s: len(s.view.rows) == 2)
        watched.job.kill(0, signal.SIGSTOP)
        try:
            _until(job, lambda s: s.view.rows[0].silent > s.view.rows[1].silent + 2)
        finally:
            watched.job.kill(0, signal.SIGCONT)
    watched.end()


def test_no_samples_are_sent_without_a_client(watched: MonitoredJob) -> None:
    """Ranks send samples only while a client is connected."""
    watched.start(2, STATIC)
    path = watched.path()
    watched.wait_until_started()
    traffic = _Traffic(watched)
    assert not leaks.settle(lambda: ["sent"] * (traffic.since(1.5) > 0), 15)
    with contextlib.closing(JobConnection(path)) as job:
        _until(job, lambda s: len(s.view.rows) == 2)
        assert traffic.since() > 0
    assert not leaks.settle(lambda: ["sent"] * (traffic.since(0.5) > 0), 10)
    watched.end()


class _Traffic:
    """The bytes that ringrun has read in system calls, which include all samples."""

    def __init__(self, watched: MonitoredJob) -> None:
        self._pid = watched.job.pid
        self._before = self._read()

    def _read(self) -> int:
        text = Path(f"/proc/{self._pid}/io").read_text()
        return int(re.findall(r"rchar: (\d+)", text)[0])

    def since(self, seconds: float = 0.0) -> int:
        """Returns the bytes read since the last call, or in the next `seconds`."""
        if seconds:
            self._before = self._read()
            time.sleep(seconds)
        before, self._before = self._before, self._read()
        return self._before - before


VIEWERS = (b"\0" * 100_000, b"{" * 100_000, b"", sockets.HELLO, sockets.HELLO + b"x\n")
CLIENTS = (b"\xff" * 1000, b"GET /met", b"GET /metrics HTTP/1.0\r\n\r\n")


def test_bad_monitoring_clients_do_not_disturb_the_job(
    watched: MonitoredJob,
) -> None:
    """More clients connect than the monitor admits, and most of them send garbage."""
    watched.start(2, STATIC, "--metrics", "0")
    path, url = watched.path(), urllib.parse.urlsplit(watched.url())
    top = subprocess.Popen(
        [sys.executable, "-P", "-m", "ringjax", "top"],
        env=environment("top", {"TMPDIR": str(watched.temporary)}),
        stdout=subprocess.PIPE,
        text=True,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(top.wait)
        stack.callback(top.kill)
        assert top.stdout is not None
        stack.callback(top.stdout.close)
        assert top.stdout.readline().startswith("job ")
        os.kill(top.pid, signal.SIGSTOP)
        assert url.hostname and url.port
        for data in VIEWERS * 3:
            sock = stack.enter_context(sockets.connect(path))
            with contextlib.suppress(OSError):
                sock.sendall(data)
        for data in CLIENTS * 10:
            address = url.hostname, url.port
            sock = stack.enter_context(socket.create_connection(address, 5))
            sock.sendall(data)
        before = watched.metrics()["ringjax_rank_calls_total"]
        # Meanwhile the job continues, and correct clients receive metrics.
        watched.wait_for(
            lambda m: m["ringjax_rank_calls_total"]["0"] > before.get("0", 0) + 100
        )
    with contextlib.closing(watched.attach()) as job:
        _until(job, lambda s: len(s.view.rows) == 2)
    watched.end()
    lines = watched.job.launcher_output().splitlines()
    usual = ("ringrun: metrics", "ringrun: goodput")
    assert [line for line in lines if not line.startswith(usual)] == []


BAD_SAMPLES = """
import os, socket, threading
garbage = [
    b"",
    b"nonsense\\n",
    b'{"id":99}\\n',
    b'{"id":0}\\n' + b"[" * 100_000 + b"\\n",
    b'{"id":0}\\n' + b'{"rank":0,"size":-1}\\n' * 100,
    b'{"id":1}\\n' + b"x" * 400_000,
    b'{"id":0}\\n{"rank":1e999,"size":2}\\n\\xff\\xfe\\n',
    b'{"id":1}\\n{"time":{"age":-1}}\\n{"time":[]}\\n',
    b'{"id":1}\\n{"time":' + b"[" * 100_000 + b"\\n",
    b'{"id":' + b"9" * 5000 + b"}\\n",
]
open_sockets = []

def send_garbage():
    for data in garbage * 5:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\\0" + os.environ["RINGJAX_MONITOR"])
        open_sockets.append(sock)
        try:
            sock.sendall(data)
        except OSError:
            pass

threading.Thread(target=send_garbage).start()
"""


def test_bad_samples_do_not_disturb_the_job(watched: MonitoredJob) -> None:
    watched.start(2, BAD_SAMPLES + STATIC, "--metrics", "0", "--report", "1")
    watched.wait_for(
        lambda m: min(m.get("ringjax_rank_calls_total", {"": 0}).values()) > 100
    )
    output = watched.job.launcher_output
    assert not leaks.settle(
        lambda: ["no report"] * ("<- all wait for it" not in output()), LONG
    )
    watched.end()
    assert "nothing more is told" not in output()


def test_errors_in_the_monitor_are_logged_and_the_job_continues(
    watched: MonitoredJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plants an error into the monitor of ringrun."""
    # A new Python imports sitecustomize.py, but a process forked by warm.py does not.
    monkeypatch.setenv("RINGJAX_TEST_COLD", "1")
    broken = watched.folder / "sitecustomize.py"
    broken.write_text(
        "import sys\n"
        "if sys.argv[0] == '-m' and 'ringjax.run' in sys.orig_argv:\n"
        "    from ringjax.monitor import view\n"
        "    def fail(*_):\n"
        "        raise ZeroDivisionError('a mistake')\n"
        "    view.make_view = fail\n"
    )
    path = f"{watched.folder}:{environment('', {})['PYTHONPATH']}"
    watched.start(2, STATIC, "--report", "1", PYTHONPATH=path)
    logged = "nothing more is told of the ranks: ZeroDivisionError: a mistake"
    assert not leaks.settle(
        lambda: [] if logged in watched.job.launcher_output() else ["no"], 20
    ), watched.job.logs()
    time.sleep(1)
    watched.end()
    assert watched.job.launcher_output().count("nothing more is told") == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ["--metrics", "nonsense"],
            "--metrics nonsense: expected PORT or ADDRESS:PORT",
        ),
        (["--metrics", "0.0.0.0:1"], "a token is needed"),
        (
            ["--metrics", "192.0.2.1:0", "--metrics-token-file", "TOKEN"],
            "cannot listen",
        ),
        (
            ["--metrics-file", "/nowhere/x.prom"],
            "--metrics-file /nowhere/x.prom: No su",
        ),
        (["--metrics-file", "x.txt"], "expected NAME.prom"),
    ],
)
def test_bad_options_are_refused_before_the_job_starts(
    watched: MonitoredJob, options: list[str], why: str
) -> None:
    token = watched.folder / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef")
    words = [str(token) if word == "TOKEN" else word for word in options]
    job = watched.start(1, "print('it has started')", *words)
    assert job.wait(20) in (1, 2)
    assert why in job.launcher_output()
    assert "it has started" not in job.output(0)
    assert not watched.path_is_left()
