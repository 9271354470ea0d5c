"""All Python code that reads untrusted bytes, as functions of these bytes.

The bytes come from unknown programs that connect, from authenticated ranks with a bug,
from files, from the environments of launchers, and from host discovery scripts.
tests/native/fuzz_targets.h has the native parsers.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ringjax.config import Config
from ringjax.control import (
    addresses,
    launch_environment,
    objects,
    slurm,
)
from ringjax.control.handshake import (
    HandshakeRequest,
    Purpose,
    callee_steps,
    caller_steps,
)
from ringjax.control.sealed_messages import MessageOpener, MessageSealer, SessionKeys
from ringjax.control.server import ServerSession
from ringjax.errors import AuthenticationError, StartupError
from ringjax.links import cost_cache
from ringjax.links.control_connection import ControlConnection, MessageType
from ringjax.membership import job_credentials, membership
from ringjax.membership.assembly import MembershipConfig
from ringjax.membership.coordinator import Coordinator
from ringjax.run.hosts import allocations, slots
from ringjax.settings import parsers

from .damage import Target, damage_json

SECRET, JOB = b"s" * 32, "0123456789abcdef"

# -- the handshake ---------------------------------------------------------------------

_REQUEST = HandshakeRequest(JOB, Purpose.DATA, 2, 1, 3, 4, 5).pack(bytes(32))


def _request(data: bytes) -> None:
    message = data.ljust(len(_REQUEST), b"\0")[: len(_REQUEST)]
    read = HandshakeRequest.unpack(message)
    again = HandshakeRequest.unpack(read.pack(bytes(32)))
    assert again == read


def _drive(steps: Any, data: bytes) -> None:
    """Passes `data` to one end of the handshake, which must fail without the secret."""
    _, wants = next(steps)
    while True:
        piece, data = data[:wants].ljust(wants, b"\0"), data[wants:]
        try:
            _, wants = steps.send(piece)
        except StopIteration:
            raise RuntimeError("accepted a peer without the secret") from None


def _callee(data: bytes) -> None:
    _drive(callee_steps(SECRET, JOB, lambda who: ""), data)


def _caller(data: bytes) -> None:
    _drive(caller_steps(SECRET, HandshakeRequest(JOB, Purpose.DATA, 2, 1)), data)


def _control(data: bytes) -> None:
    """Reads a control connection, whose peer cannot announce an epoch."""
    here, there = socket.socketpair()
    connection = ControlConnection(here, SECRET, JOB, 1, 0)
    with there, contextlib.closing(connection):
        there.send(data)
        with contextlib.suppress(OSError):
            connection.read_epoch(3)
        assert connection.peer_epoch == -1


def _announcement() -> bytes:
    here, there = socket.socketpair()
    with there, contextlib.closing(ControlConnection(here, bytes(32), JOB, 0, 1)) as c:
        c.send(MessageType.LEAVE, b"some text")
        c.announce(3)
        return there.recv(1000)


def _sealed(*messages: dict[str, Any]) -> bytes:
    sealer = MessageSealer(b"k" * 32)
    return b"".join(map(sealer.seal, messages))


def _open_sealed(data: bytes) -> None:
    opener = MessageOpener(b"k" * 32, 1 << 16)
    for start in range(0, len(data), 7):
        opener.feed(data[start : start + 7])


def _open_authentic(data: bytes) -> None:
    """Opens a message with any text that was sealed with the right key."""
    import hmac

    head = struct.pack("!QI", 0, len(data))
    mac = hmac.digest(b"k" * 32, head + data, "sha256")
    for message in MessageOpener(b"k" * 32).feed(head[8:] + mac + data):
        assert isinstance(message, dict)


# -- objects and files -----------------------------------------------------------------


def _object(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # damaged input must not cause a warning
        objects.decode(data)


def _encoded_objects() -> list[bytes]:
    return [
        objects.encode(value)
        for value in (
            {"a": [1, 2.5, None, True, 1 << 300], "b": (b"xy", "text", {3})},
            [
                np.arange(6, dtype=np.float32).reshape(2, 3),
                np.int8(3),
                np.zeros((0, 4)),
            ],
            {1: complex(1, 2), (1, 2): float("nan"), frozenset([1]): -0.0},
        )
    ]


_folder = tempfile.TemporaryDirectory(prefix="ringjax-fuzz-")


def _written(data: bytes, name: str) -> str:
    path = os.path.join(_folder.name, name)
    # Use a new file, because some file systems flush truncated files at once.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(fd, data)
    os.close(fd)
    return path


_COST = dict.fromkeys(cost_cache.NAMES, 1e-5)


def _cost(data: bytes) -> None:
    _written(data, os.path.basename(cost_cache.path_of(_folder.name, ["net"])))
    found = cost_cache.read(_folder.name, ["net"])
    assert found is None or cost_cache.is_valid(found)


def _cost_seed() -> bytes:
    cost_cache.write(_folder.name, ["net"], _COST)
    with open(cost_cache.path_of(_folder.name, ["net"]), "rb") as file:
        return file.read()


def _credentials_file(data: bytes) -> None:
    file = object.__new__(job_credentials.CredentialsFile)
    file.path = _written(data, "credentials file")
    found = file.read()
    assert found is None or isinstance(found, job_credentials.JobCredentials)


# -- input from people, launchers and scripts ------------------------------------------


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


_PARSERS = (
    *(parsers.integer(0), parsers.integer(1, 9), parsers.seconds(), parsers.boolean),
    *(parsers.multiple_of(4096, 1 << 20), parsers.power_of_two(1, 64), parsers.level),
    *(parsers.hexadecimal(16, exactly=True), parsers.choice("a", "b")),
)


def _setting(data: bytes) -> None:
    number, text = data[0] if data else 0, _text(data[1:])
    _PARSERS[number % len(_PARSERS)](text)


def _hostfile(data: bytes) -> None:
    slots.parse_hostfile(_written(data, "hosts"))


_ENVIRONMENT_WORDS = (
    *("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
    *("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_RESV_PORTS"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_MCA_orte_hnp_uri"),
    *("PMI_RANK", "PMI_SIZE", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "RINGJAX_RANK", "RINGJAX_SIZE"),
    *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_SIZE"),
    *("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"),
    *("PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR"),
    *("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
    *("PMIX_RANK", "PMIX_NAMESPACE", "JOB_COMPLETION_INDEX"),
)


def _environment(data: bytes) -> dict[str, str]:
    """Parses lines NAME=value. A number as NAME is an index into a list of names."""
    found = {}
    for line in _text(data).split("\n"):
        name, _, value = line.partition("=")
        if name.isascii() and name.isdecimal() and len(name) < 4:
            name = _ENVIRONMENT_WORDS[int(name) % len(_ENVIRONMENT_WORDS)]
        found[name] = value
    return found


def _launcher(data: bytes) -> None:
    environ = _environment(data)
    launch_environment.detect_launch(Config.from_env(environ), environ)


def _slurm(data: bytes) -> None:
    allocations.find({"SLURM_JOB_ID": "7", **_environment(data)})


_LAUNCHER_ENVIRONMENTS = [
    b"3=1\n4=0\n5=4\n2=n[1-2,05]\n6=4\n7=0\n8=2(x2)\n9=17000-17003",
    b"10=1\n11=2\n12=1.0;tcp://10.0.0.1,127.0.0.1:4000",
    b"13=0\n14=4\nMPI_LOCALRANKID=0\nMPI_LOCALNRANKS=4",
    b"15=job\n16=1\n17=2\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\n18=host\n19=29500",
    b"20=1\n21=2\nRINGJAX_LOCAL_RANK=1\nRINGJAX_RENDEZVOUS=127.0.0.1:5\nRINGJAX_JOB="
    + JOB.encode(),
    b"22=1\n23=4\n24=4\n35=1",
    b"25=1\n26=2\n27=[::1]:29500",
    b"28=0\n29=2\n30=1\n31=node-0",
    b"32=1\n33=2\n34=10.0.0.4 10.0.0.5\n37=1",
]

# -- authenticated members with bugs ---------------------------------------------------


class _NullSocket:
    """A socket that discards all data."""

    def send(self, data: bytes) -> int:
        return len(data)

    def close(self) -> None:
        pass


class _NullSelector:
    """A selector that ignores all registrations."""

    def modify(self, *what: object) -> None:
        pass

    unregister = close = modify


_STATIC_MESSAGES: list[dict[str, Any]] = [
    {"type": "hello", "hello": {"size": 2, "addresses": "127.0.0.1:5"}},
    {"type": "exchange", "epoch": 0, "number": 0, "seconds": 1.0, "value": [1, 2]},
    {"type": "missing"},
    {"type": "failure", "text": "it hurts"},
    {"type": "leave", "epoch": 0, "lines": {}},
]


def _coordinator(data: bytes) -> None:
    """Sends damaged messages of ranks to the coordinator of a static job."""
    rng = random.Random(data)
    server = Coordinator(SECRET, JOB, np=2, on_loss="stop", log=lambda text: None)
    server.selector.close()
    server.selector = _NullSelector()  # type: ignore[assignment]
    keys = SessionKeys(b"k" * 32, b"k" * 32)
    sock: Any = _NullSocket()
    sessions = [ServerSession(server, sock, rank, "here", keys) for rank in (0, 1)]
    server._sessions.update(sessions)
    try:
        for _ in range(8):
            session = rng.choice(sessions)
            damaged = damage_json(rng.choice(_STATIC_MESSAGES), rng)
            message = _as_received(damaged)
            with contextlib.suppress(AuthenticationError):  # the server refused
                server.on_message(session, message)
            server.after_round()
    finally:
        server.close()


def _as_received(message: Any) -> dict[str, Any]:
    """Encodes and decodes a message; returns {} if it is no JSON object."""
    try:
        read = json.loads(json.dumps(message))
    except ValueError:  # a lone surrogate cannot be sent
        read = {}
    return read if isinstance(read, dict) else {}


_LINES = {"0": [3, 4, True], "1": [1, 1, False]}
_ELASTIC_MESSAGES: list[dict[str, Any]] = [
    {
        "type": "report",
        "epoch": 0,
        "lines": _LINES,
        "sets": {"1": [[0, 2, 1]]},
        "next_set": 2,
    },
    {"type": "suspect", "epoch": 0, "rank": 0, "text": "silent"},
    {
        "type": "pause",
        "epoch": 0,
        "number": 1,
        "lines": _LINES,
        "sets": {},
        "next_set": 1,
    },
    {"type": "restart", "epoch": 0, "text": "ValueError"},
    {"type": "failure", "text": "it hurts"},
    {"type": "leaving"},
    {"type": "leave", "lines": _LINES},
    {"type": "ready"},
]


def _members(data: bytes) -> None:
    """Sends damaged messages of worker 1 to the rules of an elastic job."""
    rng = random.Random(data)
    rules = MembershipConfig(np=3, min_np=1, max_np=4)
    job, now = membership.JobMembership(rules), 0.0
    for worker in range(3):
        job.on_hello(worker, "127.0.0.1", {}, None, now)
    for _ in range(24):
        now += rng.random()
        epoch = job.epoch.number
        event = rng.randrange(8)
        if event == 0:
            worker = rng.choice((0, 2, 5))
            with _suppress():
                job.on_hello(worker, "127.0.0.1", {}, None, now)
        elif event == 1:
            report = {"type": "report", "epoch": epoch, "lines": _LINES}
            job.on_message(rng.choice((0, 2)), report, now)
        elif event == 2:
            job.process_ended(rng.choice((0, 2, 7)), "killed", now)
        elif event == 3:
            job.tick(now)
        else:
            damaged = damage_json(rng.choice(_ELASTIC_MESSAGES), rng)
            message = _as_received(damaged)
            if message.get("epoch") == 0:
                message["epoch"] = epoch
            with _suppress():
                job.on_message(1, message, now)
        job.drain()


def _suppress() -> Any:
    import contextlib

    return contextlib.suppress(ValueError)


# -- all targets -----------------------------------------------------------------------


def _of_text(function: Callable[[str], object], data: bytes) -> None:
    function(_text(data))


def targets() -> list[Target]:
    """Returns all targets, each with valid inputs."""
    value, refused = (ValueError,), (AuthenticationError,)
    deep = b'{"cost":' * 300 + b"[" * 1500
    boxed = b"RJO1" + struct.pack("<I", len(deep)) + deep
    noise = [bytes(range(64)), b"\0" * 8, b"abcdefgh" * 4]
    message: Mapping[str, Any] = {"type": "exchange", "number": 1, "value": [1, "x"]}
    return [
        Target("request", _request, [_REQUEST], refused),
        Target("callee", _callee, [_REQUEST, _REQUEST + bytes(32)], refused),
        Target("caller", _caller, [bytes(96), bytes(range(96))], refused),
        Target("control", _control, [_announcement()], refused),
        Target(
            "sealed", _open_sealed, [_sealed(dict(message), {"type": "leave"})], refused
        ),
        Target(
            "authentic",
            _open_authentic,
            [*(json.dumps(m).encode() for m in _STATIC_MESSAGES), deep],
            refused,
        ),
        Target("object", _object, [*_encoded_objects(), boxed], value),
        Target("cost", _cost, [_cost_seed(), deep]),
        Target("credentials file", _credentials_file, [_credentials_seed(), deep]),
        Target(
            "setting",
            _setting,
            [b"\0" + b"12", b"\x02" + b"1.5", b"\x07" + JOB.encode()],
            value,
        ),
        Target(
            "addresses",
            partial(_of_text, addresses.parse),
            [b"10.0.0.1:80,[::1]:9"],
            value,
        ),
        Target(
            "hosts",
            partial(_of_text, slots.parse_hosts),
            [b"a:2,b:1,[::1]:3,u@c"],
            value,
        ),
        Target("hostfile", _hostfile, [b"a slots=2\nb:3 # c\n\nd\n"], value),
        Target(
            "discovered",
            lambda data: slots.parse_discovered(_text(data), 2),
            [b"a:2\nb\n[::1]:4\n"],
            value,
        ),
        Target(
            "nodes",
            partial(_of_text, slurm.hosts_of),
            [b"gpu[08-10,12]-ib,login"],
            value,
        ),
        Target(
            "launcher", _launcher, _LAUNCHER_ENVIRONMENTS, (StartupError, ValueError)
        ),
        Target("slurm", _slurm, [b"0=n[1-3,08]\n1=2(x3),1"], value),
        Target("coordinator", _coordinator, noise),
        Target("members", _members, noise),
    ]


def _credentials_seed() -> bytes:
    found = {"addresses": "127.0.0.1:5", "secret": "00" * 32, "job": JOB}
    return json.dumps(found).encode()
