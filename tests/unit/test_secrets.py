"""Tests that no repr contains a secret, because reprs get into logs and tracebacks."""

from __future__ import annotations

import socket
from typing import Any, cast

import pytest

from ringjax.config import Config
from ringjax.control.listener import AcceptedConnection
from ringjax.control.sealed_messages import SessionKeys
from ringjax.links.descriptors import LinkDescriptors
from ringjax.links.factory import LinkFactory
from ringjax.membership.job_credentials import JobCredentials
from ringjax.membership.joined_job import JoinedJob
from ringjax.run.hosts.job_spec import ListenOptions
from ringjax.run.hosts.joining_agent import JoinOptions

SECRET = b"\xabtell nobody"
JOB = "0123456789abcdef"
NOTHING = cast(Any, None)


@pytest.mark.parametrize(
    "holder",
    [
        Config(secret=SECRET.hex()),
        JobCredentials("127.0.0.1:1", SECRET, JOB),
        JoinedJob(NOTHING, SECRET, JOB),
        SessionKeys(send=SECRET, receive=SECRET, link=SECRET),
        AcceptedConnection(cast(socket.socket, None), SECRET),
        LinkDescriptors(links=[(1, [3], [SECRET])], control_keys=[SECRET]),
        LinkFactory(
            rank=0,
            members=(),
            hosts=(),
            epoch=0,
            job=JOB,
            secret=SECRET,
            config=Config(secret=SECRET.hex()),
            listener=NOTHING,
            loss_monitor=NOTHING,
            locate=NOTHING,
            host_bytes=NOTHING,
            log=NOTHING,
        ),
        ListenOptions(addresses=[], port=0, secret=SECRET, job=JOB),
        JoinOptions(
            address="127.0.0.1:1",
            secret=SECRET,
            job=JOB,
            host="here",
            slots=1,
            config=Config(),
        ),
    ],
    ids=lambda holder: type(holder).__name__,
)
def test_no_repr_contains_the_secret(holder: object) -> None:
    text = repr(holder)
    assert type(holder).__name__ in text
    assert "tell nobody" not in text
    assert SECRET.hex() not in text
