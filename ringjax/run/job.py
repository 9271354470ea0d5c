"""One job, seen from ringrun: its agents, its rendezvous server, its end.

A single loop reads what the agents report and decides when the job is over. When a rank
fails the others are given a second to fail with a clear error of their own, then
SIGTERM, then SIGKILL. Starts no rank itself: that is agent.py, one on each host.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ringjax.run import environ
from ringjax.run.channel import Channel, Message
from ringjax.run.hosts import is_local, own_addresses
from ringjax.run.order import Agent, Spec, agent_command, ssh_command
from ringjax.run.output import Console, OutputClosed
from ringjax.run.verdict import Verdict

if TYPE_CHECKING:
    from ringjax.rendezvous import Server

_TICK = 0.1  # seconds between two looks at the rendezvous server
# (seconds to wait before, signal): None gives up on whoever is left.
_Plan = tuple[tuple[float, int | None], ...]
_AFTER_FAILURE: _Plan = (
    (1.0, signal.SIGTERM),
    (2.0, signal.SIGKILL),
    (1.0, None),
)
_AFTER_SIGINT: _Plan = (
    (0.0, signal.SIGINT),
    (0.6, signal.SIGTERM),
    (0.5, signal.SIGKILL),
    (0.3, None),
)
_AFTER_SIGTERM: _Plan = ((0.0, signal.SIGTERM), (1.1, signal.SIGKILL), (0.3, None))
_AT_ONCE: _Plan = ((0.0, signal.SIGKILL), (0.2, None))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended; `rank` is the one to blame, -1 if there is none."""

    exit_code: int
    rank: int = -1
    reason: str = ""
    results: dict[int, bytes] = field(default_factory=dict)


class Job:
    """A running job. `run` starts it, returns when nothing of it is left."""

    def __init__(self, spec: Spec, console: Console) -> None:
        self._spec = spec
        self._console = console
        self._size = len(spec.slots)
        self._selector = selectors.DefaultSelector()
        self._verdict = Verdict([slot.host for slot in spec.slots], console.last_error)
        self._results: dict[int, bytearray] = {}
        self._pids: dict[int, int] = {}
        self._guardian: subprocess.Popen[bytes] | None = None
        self._local = Agent("localhost", [])
        self._remote: list[Agent] = []
        self._server: Server | None = None
        self._reports = 0
        self._joined = False
        self._plan: deque[tuple[float, int | None]] = deque()
        self._next = 0.0
        self._given_up = False
        self._ended_by: int | None = None
        self._start_failure = ""

    def run(self) -> Outcome:
        """Start everything, wait for the end, leave nothing behind."""
        try:
            self._start_agents()
            self._start_ranks()
            while not (self._verdict.over or self._given_up):
                self._turn()
        finally:
            self._end()
        return self._outcome()

    def interrupt(self, number: int) -> None:
        """End the job because ringrun got a signal; a second one ends it at once."""
        again = self._ended_by is not None
        self._ended_by = self._ended_by or number
        if again:
            self._begin(_AT_ONCE)
        else:
            plan = _AFTER_SIGINT if number == signal.SIGINT else _AFTER_SIGTERM
            self._begin(plan)

    @property
    def stopping(self) -> bool:
        """Whether the ranks have been told to end."""
        return self._verdict.is_stopping

    # Starting.

    def _start_agents(self) -> None:
        hosts: dict[str, Agent] = {}
        for slot in self._spec.slots:
            if slot.host not in hosts:
                hosts[slot.host] = Agent(slot.host, [])
            hosts[slot.host].slots.append(slot)
        for host, agent in hosts.items():
            if is_local(host):
                self._local.slots += agent.slots
            else:
                self._remote.append(agent)
        theirs: list[int] = []
        for agent in self._remote:
            stdin, ours = os.pipe()
            mine, stdout = os.pipe()
            theirs += [stdin, stdout]
            agent.channel = self._open(agent, mine, ours)
        self._guardian = subprocess.Popen(
            agent_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environ.inherited(), "PYTHONPATH": environ.agent_path()},
            pass_fds=theirs,
            start_new_session=True,  # a Ctrl-C on the terminal is for ringrun alone
        )
        assert self._guardian.stdin is not None and self._guardian.stdout is not None
        self._local.channel = self._open(
            self._local,
            os.dup(self._guardian.stdout.fileno()),
            os.dup(self._guardian.stdin.fileno()),
        )
        self._guardian.stdin.close()
        self._guardian.stdout.close()
        orders = []
        for index, agent in enumerate(self._remote):
            stdin, stdout = theirs[2 * index : 2 * index + 2]
            self._console.labels[-1 - index] = agent.host
            order = {
                "id": -1 - index,
                "argv": ssh_command(agent.host, self._spec),
                "env": {},
            }
            orders.append({**order, "stdin": stdin, "stdout": stdout})
            os.close(stdin)
            os.close(stdout)
        self._local.channel.send({"do": "watch", "pid": os.getpid()})
        if orders:
            self._spawn(self._local, orders, environ.inherited())

    def _open(self, agent: Agent, reader: int, writer: int) -> Channel:
        return Channel(
            self._selector,
            reader,
            writer,
            lambda message: self._heard(agent, message),
            lambda: self._lost(agent),
        )

    def _start_ranks(self) -> None:
        from ringjax import rendezvous

        secret = secrets.token_bytes(32)
        job = secrets.token_hex(8)
        self._server = rendezvous.Server(
            secret,
            job,
            self._size,
            hosts=own_addresses(
                [agent.host for agent in self._remote], self._spec.interfaces
            ),
            start_timeout=self._spec.start_timeout,
        )
        self._server.start()
        shared = {
            "RINGJAX_RENDEZVOUS": ",".join(self._server.addresses),
            "RINGJAX_SECRET": secret.hex(),
            "RINGJAX_JOB": job,
        }
        if self._spec.verbose:
            self._console.note(
                f"job {job}: {self._size} ranks, rendezvous at "
                + shared["RINGJAX_RENDEZVOUS"]
            )
        for agent in (self._local, *self._remote):
            orders = [
                {
                    "id": slot.rank,
                    "argv": list(self._spec.command),
                    "env": {**slot.environment(), **shared},
                }
                for slot in agent.slots
            ]
            env = self._spec.env
            self._spawn(
                agent,
                orders,
                env if agent is self._local else environ.portable(env),
                self._spec.payload,
            )

    def _spawn(
        self,
        agent: Agent,
        orders: list[Message],
        env: Mapping[str, str],
        payload: bytes | None = None,
    ) -> None:
        message: Message = {
            "do": "spawn",
            "cwd": os.getcwd(),
            "env": dict(env),
            "children": orders,
        }
        if payload is not None:
            message["payload"] = base64.b64encode(payload).decode()
        assert agent.channel is not None
        agent.channel.send(message)

    # While it runs.

    def _turn(self) -> None:
        """One round of the loop: events, the server, the plan."""
        timeout = _TICK
        if self._plan:
            timeout = min(timeout, max(0.0, self._next - time.monotonic()))
        events = self._selector.select(timeout)
        self._ask_server()
        try:
            for key, _ in events:
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
            if not events:
                self._console.idle()
        except OutputClosed:
            # As if SIGPIPE had ended us: nobody wants to know any more.
            self._ended_by = self._ended_by or signal.SIGPIPE
            self._begin(_AFTER_SIGTERM)
        self._advance()

    def _ask_server(self) -> None:
        """Take note of who joined and who reported a failure, before who exited."""
        if self._server is None:
            return
        joined = self._server.joined
        self._joined = self._joined or bool(joined)
        failures = self._server.failures[self._reports :]
        self._reports += len(failures)
        for failure in failures:
            if failure.rank >= 0:
                self._verdict.reported(failure.rank, failure.text, time.monotonic())
            elif not self._plan:
                self._no_start(failure.text)
        absent = self._verdict.succeeded() - joined
        if absent and not self._plan and 0 < len(joined) < self._size:
            # Nobody has to wait for the timeout to learn this.
            self._no_start(
                f"rank {min(absent)} ended without an error while others wait for it "
                "in ringjax.init()"
            )

    def _no_start(self, why: str) -> None:
        self._start_failure = f"the job did not start: {why}"
        self._begin(_AFTER_FAILURE)

    def _advance(self) -> None:
        if self._verdict.failed and not self._plan and not self._given_up:
            self._begin(_AFTER_FAILURE)
        while self._plan and time.monotonic() >= self._next:
            number = self._plan.popleft()[1]
            if self._plan:
                self._next = time.monotonic() + self._plan[0][0]
            if number is None:
                self._given_up = True
                return
            self._verdict.stopping()
            for agent in (self._local, *self._remote):
                if agent.channel is not None:
                    agent.channel.send({"do": "signal", "signal": int(number)})

    def _begin(self, plan: _Plan) -> None:
        """Begin to end the job."""
        self._plan = deque(plan)
        # Ranks that never met have no clear error of their own to wait for.
        wait = 0.0 if plan is _AFTER_FAILURE and not self._joined else plan[0][0]
        self._next = time.monotonic() + wait

    def _heard(self, agent: Agent, message: Message) -> None:
        match message.get("is"):
            case "output":
                self._output(
                    message["id"],
                    message["stream"],
                    base64.b64decode(message["data"]),
                )
            case "started":
                self._pids[message["id"]] = message["pid"]
                if self._spec.verbose and message["id"] >= 0:
                    pid = message["pid"]
                    where = self._spec.slots[message["id"]].host
                    self._console.note(
                        f"rank {message['id']}: process {pid} on {where}"
                    )
            case "exited":
                self._exited(message)
            case "bye":
                agent.ended = True

    def _output(self, name: int, stream: str, data: bytes) -> None:
        if stream == "result":
            self._results.setdefault(name, bytearray()).extend(data)
        else:
            self._console.write(name, stream, data)

    def _exited(self, message: Message) -> None:
        name, now = message["id"], time.monotonic()
        if name >= 0:
            text = message.get("text", "")
            self._verdict.exited(name, message["code"], now, text)
            return
        agent = self._remote[-1 - name]
        if not agent.ended:
            self._lost_ranks(agent, f"lost its host, ssh ended ({message['code']})")

    def _lost(self, agent: Agent) -> None:
        if agent.ended:
            return
        if agent is not self._local:
            return  # the exit of ssh follows, and says more
        self._lost_ranks(agent, "its agent on this host died")
        for pid in self._pids.values():  # its children got SIGKILL, theirs may live
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        for other in self._remote:
            self._lost_ranks(other, "the agent on the first host died")

    def _lost_ranks(self, agent: Agent, text: str) -> None:
        for slot in agent.slots:
            self._verdict.exited(slot.rank, 255, time.monotonic(), text)

    # The end.

    def _end(self) -> None:
        """Have every agent kill what is left, read the last output, close."""
        limit = 0.3 if self._ended_by is not None else 2.0
        for agents in (self._remote, [self._local]):  # the local one holds the ssh
            deadline = time.monotonic() + limit
            for agent in agents:
                if agent.channel is not None:
                    agent.channel.send({"do": "end"})
            while time.monotonic() < deadline and not all(
                agent.done for agent in agents
            ):
                for key, _ in self._selector.select(0.05):
                    if self._selector.get_map().get(key.fd) is key:
                        with contextlib.suppress(OutputClosed):
                            key.data()
            for agent in agents:
                if agent.channel is not None:
                    agent.channel.close()
        self._ask_server()
        if self._server is not None:
            self._server.close()
        if self._guardian is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guardian.wait(timeout=limit)
            # If it is still at work it ends by itself; it is not ours to wait for.
            self._guardian.returncode = self._guardian.returncode or 0
        with contextlib.suppress(OutputClosed):
            self._console.close()
        self._selector.close()

    def _outcome(self) -> Outcome:
        results = {rank: bytes(data) for rank, data in self._results.items()}
        if self._ended_by is not None:
            name = signal.Signals(self._ended_by).name
            code = 128 + self._ended_by
            reason = "" if name == "SIGPIPE" else f"ended by {name}"
            return Outcome(code, reason=reason, results=results)
        blame = self._verdict.first()
        if self._start_failure:
            return Outcome(1, reason=self._start_failure, results=results)
        if blame is not None:
            return Outcome(blame.exit_code, blame.rank, blame.reason, results)
        return Outcome(0, results=results)
