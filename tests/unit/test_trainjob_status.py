"""Tests of the progress that ringrun tells Kubeflow, with a server of the test."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.launch import StartJob, environment
from support.waiting import LONG, until

from ringjax.monitor import trainjob_status
from ringjax.monitor.time_report import Progress
from ringjax.monitor.trainjob_status import TrainJobStatus

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/a/trainjobs/b/status"
MINUTE = 60.0


class ControlPlane:
    """Stands in for Kubeflow's server. `received` has the headers and the bodies."""

    def __init__(self, folder: Path) -> None:
        self.received: list[tuple[Mapping[str, str], Any]] = []
        self.answer = 200
        self.token = folder / "token"
        self.token.write_text("first\n")
        plane = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                body = json.loads(self.rfile.read(size))
                assert self.path == PATH
                plane.received.append((dict(self.headers), body["trainerStatus"]))
                self.send_response(plane.answer)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.env = {
            "KUBEFLOW_TRAINER_SERVER_URL": self.url(self._server.server_port),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(self.token),
        }

    @staticmethod
    def url(port: int) -> str:
        return f"http://127.0.0.1:{port}{PATH}"

    @property
    def statuses(self) -> list[dict[str, Any]]:
        return [body for _, body in self.received]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(LONG)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    made = ControlPlane(tmp_path)
    yield made
    made.close()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainjob_status, "_INTERVAL", 0.01)


@pytest.mark.usefixtures("fast")
def test_the_server_receives_what_the_proposal_says(plane: ControlPlane) -> None:
    notes: list[str] = []
    status = TrainJobStatus(plane.env, notes.append)
    status.update(Progress(10, 100), MINUTE)
    until(lambda: len(plane.received) == 1)
    plane.token.write_text("second\n")  # Kubernetes replaces tokens before they expire
    status.update(Progress(30, 100, {"loss": 0.25}), 2 * MINUTE)
    until(lambda: len(plane.received) == 2)
    status.update(Progress(30, 100), 3 * MINUTE)  # nothing new
    status.close()
    assert notes == []
    (first, begin), (second, later) = plane.received
    assert first["Authorization"] == "Bearer first"
    assert second["Authorization"] == "Bearer second"
    assert second["Content-Type"] == "application/json"
    assert begin["progressPercentage"] == 10 and begin["metrics"] == []
    assert "estimatedRemainingSeconds" not in begin  # one moment shows no speed
    # 20 steps a minute, so 70 steps need 3.5 minutes.
    assert later["estimatedRemainingSeconds"] == 210
    assert later["metrics"] == [{"name": "loss", "value": "0.25"}]
    assert time.strptime(later["lastUpdatedTime"], "%Y-%m-%dT%H:%M:%SZ")


def test_the_last_progress_is_sent_at_the_end(plane: ControlPlane) -> None:
    """The interval is 5 s, so the second message is sent because of `close`."""
    status = TrainJobStatus(plane.env, pytest.fail)
    status.update(Progress(1, 2), 0.0)
    until(lambda: plane.received)
    status.update(Progress(2, 2), 1.0)
    status.close()
    assert [each["progressPercentage"] for each in plane.statuses] == [50, 100]


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("broken", ["refused", "denied", "no token", "no URL"])
def test_one_warning_if_the_server_does_not_take_it(
    plane: ControlPlane, broken: str
) -> None:
    notes: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    if broken == "refused":
        plane.env["KUBEFLOW_TRAINER_SERVER_URL"] = plane.url(port)
    elif broken == "denied":
        plane.answer = 403
    elif broken == "no token":
        plane.token.unlink()
    else:
        plane.env["KUBEFLOW_TRAINER_SERVER_URL"] = "nonsense"
    status = TrainJobStatus(plane.env, notes.append)
    for step in range(5):
        status.update(Progress(step, 5), step)
        until(lambda: status._latest is None)
    until(lambda: notes)
    status.close()
    (note,) = notes
    assert note.startswith("no progress is told to Kubeflow: ")
    assert note.endswith("; the job goes on")


def test_a_server_that_never_answers_does_not_keep_the_job(
    monkeypatch: pytest.MonkeyPatch, plane: ControlPlane
) -> None:
    """The message waits for its answer for longer than `close` waits for the thread."""
    monkeypatch.setattr(trainjob_status, "_TIMEOUT", 10 * LONG)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(LONG)
        url = plane.url(silent.getsockname()[1])
        env = {**plane.env, "KUBEFLOW_TRAINER_SERVER_URL": url}
        status = TrainJobStatus(env, lambda text: None)
        status.update(Progress(1, 2), 0.0)
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(1)  # so the message has its timeout already
            monkeypatch.setattr(trainjob_status, "_TIMEOUT", 0.01)
            status.close()
            assert status._thread.is_alive()
    status._thread.join(LONG)
    assert not status._thread.is_alive()


PROGRAM = """
import time
import numpy as np
import ringjax
from support import numpy_only

ringjax.init()
for step in range(1, 51):
    time.sleep(0.01)
    ringjax.eager.allreduce(np.ones(4, "f4"), name="x")
    ringjax.progress(step, 50, loss=1 / step)
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_trainjob_ends_at_100_percent(
    start_job: StartJob, plane: ControlPlane, ranks: int
) -> None:
    job = start_job(ranks, PROGRAM, plane.env)
    assert job.wait() == 0, job.logs()
    assert plane.statuses[-1]["progressPercentage"] == 100
    assert plane.statuses[-1]["metrics"] == [{"name": "loss", "value": "0.02"}]
    assert "Kubeflow" not in job.launcher_output()


def test_a_trainjob_without_its_server_trains(
    start_job: StartJob, plane: ControlPlane
) -> None:
    plane.close()
    job = start_job(2, PROGRAM, plane.env)
    assert job.wait() == 0, job.logs()
    assert job.launcher_output().count("no progress is told to Kubeflow") == 1


def test_rank_0_reports_in_a_trainjob_without_ringrun(plane: ControlPlane) -> None:
    """Kubeflow's runtime starts the ranks itself, here as a job of one process."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        env=environment("trainjob", plane.env),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0 and done.stderr == ""
    assert plane.statuses[-1]["progressPercentage"] == 100


def test_progress_without_kubeflow_is_told_to_nobody(
    start_job: StartJob, plane: ControlPlane
) -> None:
    job = start_job(2, PROGRAM)
    assert job.wait() == 0, job.logs()
    assert plane.received == []
