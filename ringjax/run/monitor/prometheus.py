"""Exports metrics of a job to Prometheus over HTTP, or in a file for node_exporter.

This module and monitor/metrics.py write the text format themselves, so that the base
installation does not depend on prometheus_client. Separate threads serve the metrics,
so a slow client does not block ringrun's loop. If there are too many connections, the
server closes the oldest connection.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import socketserver
import threading
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ringjax.control import addresses
from ringjax.monitor import metrics
from ringjax.run.monitor.options import MonitorOptions

_MAX_CONNECTIONS = 8
_CLIENT_TIMEOUT = 5.0  # seconds until a connection without progress is closed
_WRITE_INTERVAL = 10.0  # seconds between two versions of the file
Render = Callable[[], str]


class PrometheusEndpoint:
    """Serves metrics over HTTP at /metrics, until `close` is called.

    Args:
        options: the address and the token of the server. render: returns the current
        metrics as text. Any thread may call it.

    Raises OSError if the server cannot listen at the address.
    """

    def __init__(self, options: MonitorOptions, render: Render) -> None:
        self._server = _PrometheusServer(options, render)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="ringrun-metrics", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        where = addresses.show(*self._server.socket.getsockname()[:2])
        return f"http://{where}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)


class _PrometheusServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, options: MonitorOptions, render: Render) -> None:
        self.options, self.render = options, render
        self._lock = threading.Lock()
        self._sockets: deque[socket.socket] = deque()
        if ":" in options.host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((options.host, options.port), _PrometheusHandler)
        except OSError as error:
            where = addresses.show(options.host, options.port)
            why = f"--metrics: cannot listen on {where}: {error.strerror or error}"
            raise OSError(why) from None

    def server_bind(self) -> None:
        # HTTPServer.server_bind would look up the name of this host, which may take
        # long.
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._sockets.append(request)
            while len(self._sockets) > _MAX_CONNECTIONS:
                self._shut_down(self._sockets.popleft())
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._sockets.remove(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        with self._lock:
            while self._sockets:
                self._shut_down(self._sockets.popleft())

    @staticmethod
    def _shut_down(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # the thread of the connection closes it

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores errors of clients, which must not appear in the job's output."""


class _PrometheusHandler(BaseHTTPRequestHandler):
    timeout = _CLIENT_TIMEOUT
    server: _PrometheusServer

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._reply(404, "only /metrics is here\n")
        elif not self._is_authorized():
            self._reply(401, "a token is needed\n", **{"WWW-Authenticate": "Bearer"})
        else:
            self._reply(200, self.server.render(), metrics.CONTENT_TYPE)

    def _is_authorized(self) -> bool:
        token = self.server.options.token
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        right = f"Bearer {token}".encode()
        return not token or hmac.compare_digest(given, right)

    def _reply(
        self, code: int, text: str, kind: str = "text/plain", **headers: str
    ) -> None:
        data = text.encode()
        self.send_response(code)
        given = {"Content-Type": kind, "Content-Length": str(len(data)), **headers}
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def version_string(self) -> str:
        """Returns a server name that reveals nothing about this machine."""
        return "ringrun"

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, because the terminal shows the output of the job."""


class PrometheusTextFile:
    """Writes metrics to a file for node_exporter, until `close` is called.

    Args:
        render: returns the current metrics as text. A thread calls it. note: prints a
        line if the file cannot be written any more.

    Raises OSError if the file cannot be written.
    """

    def __init__(self, path: str, render: Render, note: Callable[[str], None]) -> None:
        self._path, self._render, self._note = path, render, note
        folder, name = os.path.split(path)
        # The temporary file is in the folder of `path`, so that the rename is atomic.
        # Its name does not end in .prom, so that node_exporter does not read an
        # incomplete file.
        self._temporary = os.path.join(folder, f".{name}.{os.getpid()}")
        self._stop = threading.Event()
        try:
            self._write()
        except OSError as error:
            raise OSError(f"--metrics-file {path}: {error.strerror}") from None
        self._thread = threading.Thread(
            target=self._run, name="ringrun-metrics-file", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Removes the file, because a finished job has no metrics."""
        self._stop.set()
        self._thread.join(1.0)
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _run(self) -> None:
        try:
            while not self._stop.wait(_WRITE_INTERVAL):
                self._write()
        except OSError as error:
            self._note(f"no more metrics in {self._path}: {error.strerror}")

    def _write(self) -> None:
        try:
            with open(self._temporary, "w", encoding="utf-8") as file:
                file.write(self._render())
            os.rename(self._temporary, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            raise
