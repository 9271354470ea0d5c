"""Reports the progress of a job to Kubeflow, if it runs in a TrainJob (KEP-2779).

Kubeflow names its server, a certificate and a token in the environment of all pods. A
thread of ringrun, or of rank 0 in a job without ringrun, sends the newest progress, at
most every `_INTERVAL` seconds. The job never waits for the server, and goes on without
it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ringjax.monitor.time_report import Progress

_URL = "KUBEFLOW_TRAINER_SERVER_URL"
_CERTIFICATE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"  # the path of a file
_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # the path of a file, whose text may change
_INTERVAL = 5.0  # seconds between two messages
_TIMEOUT = 5.0  # seconds for one message, and for the last one at the end of the job
_MAX_SECONDS = 2**31 - 1  # the largest number of seconds that the API accepts


class TrainJobStatus:
    """Sends the progress of a job to Kubeflow until `close` is called.

    Args:
        env: the environment of this process, in which Kubeflow has set variables.
        note: prints a line, the first time that the server cannot be reached.
    """

    def __init__(self, env: Mapping[str, str], note: Callable[[str], None]) -> None:
        self._env, self._note = env, note
        self._changed = threading.Condition()
        self._latest: dict[str, Any] | None = None
        self._first: tuple[int, float] | None = None  # the first step, and its time
        self._step = -1
        self._closing = self._warned = False
        self._thread = threading.Thread(
            target=self._run, name="ringrun-trainjob", daemon=True
        )
        self._thread.start()

    def update(self, progress: Progress, now: float) -> None:
        """Sends a progress that a rank has told at the time `now`, if it is new."""
        if progress.step == self._step:
            return
        self._step = progress.step
        if self._first is None or progress.step < self._first[0]:
            self._first = progress.step, now
        done, seconds = progress.step - self._first[0], now - self._first[1]
        remaining = None
        if done > 0:
            remaining = seconds / done * max(0, progress.total - progress.step)
        with self._changed:
            self._latest = trainer_status(progress, remaining)
            self._changed.notify_all()

    def close(self) -> None:
        """Sends the last progress. Waits at most `_TIMEOUT` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_TIMEOUT)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._latest or self._closing)
                status, self._latest = self._latest, None
            if status is None:
                return
            self._send(status)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, _INTERVAL)

    def _send(self, status: dict[str, Any]) -> None:
        try:
            self._post(json.dumps({"trainerStatus": status}).encode())
        except Exception as error:  # OSError, or ValueError because of a bad URL
            if not self._warned:
                self._warned = True
                why = f"{type(error).__name__}: {error}"
                self._note(
                    f"no progress is told to Kubeflow: {why:.200}; the job goes on"
                )

    def _post(self, body: bytes) -> None:
        # These modules are imported only here, because their import takes long.
        import ssl
        from urllib import request

        with open(self._env.get(_TOKEN, ""), encoding="ascii") as file:
            token = file.read().strip()
        headers = {"Authorization": f"Bearer {token}"}
        headers["Content-Type"] = "application/json"
        trusted = ssl.create_default_context(cafile=self._env.get(_CERTIFICATE) or None)
        asked = request.Request(self._env[_URL], body, headers, method="POST")
        with contextlib.closing(
            request.urlopen(asked, timeout=_TIMEOUT, context=trusted)
        ) as answer:
            answer.read()


def runs_in_trainjob(env: Mapping[str, str]) -> bool:
    """Returns whether Kubeflow wants to be told about the progress of the job."""
    return bool(env.get(_URL))


def trainer_status(
    progress: Progress, remaining: float | None, now: float | None = None
) -> dict[str, Any]:
    """Returns Kubeflow's TrainJobTrainerStatus, as values that JSON can hold.

    Example:
        >>> status = trainer_status(Progress(1, 4, {"loss": 0.5}), 60.2, now=0.0)
        >>> status["progressPercentage"], status["estimatedRemainingSeconds"]
        (25, 60)
        >>> status["metrics"], status["lastUpdatedTime"]
        ([{'name': 'loss', 'value': '0.5'}], '1970-01-01T00:00:00Z')
    """
    moment = time.gmtime(now)
    percent = 100 * progress.step // max(progress.total, 1)
    status: dict[str, Any] = {
        "progressPercentage": min(percent, 100),
        "metrics": [
            {"name": name, "value": f"{value:g}"}
            for name, value in progress.metrics.items()
            if name
        ],
        "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", moment),
    }
    if remaining is not None:
        status["estimatedRemainingSeconds"] = min(round(remaining), _MAX_SECONDS)
    return status
