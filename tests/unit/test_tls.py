"""Tests of TLS on control connections: negotiation, encryption, detected damage.

Most tests need Python 3.13, whose ssl has pre-shared keys (PSK). Tests of a Python
without PSK run on all versions.
"""

from __future__ import annotations

import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.fault_proxy import Fault, FaultProxy
from support.handshakes import needs_tls, run_handshake
from support.launch import environment
from support.waiting import LONG, until

from ringjax.control import addresses, handshake, tls
from ringjax.control.handshake import HandshakeRequest, Purpose
from ringjax.control.tls import TlsEndpoint, TlsOffer, supported
from ringjax.errors import AuthenticationError, StartupError
from ringjax.membership.client import CoordinatorClient
from ringjax.membership.coordinator import Coordinator
from ringjax.membership.job_credentials import JobCredentials
from ringjax.membership.joined_job import join

SECRET, JOB = b"s" * 32, "0123456789abcdef"
HELLO = HandshakeRequest(JOB, Purpose.RENDEZVOUS, caller=0, callee=-1)
TOKEN = "a sentence that nobody else may read"
SUITES = ("TLS_CHACHA20_POLY1305_SHA256", "TLS_AES_128_GCM_SHA256")

# The negotiation of TLS.


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (TlsOffer.NONE, TlsOffer.NONE),
        (TlsOffer.ABLE, TlsOffer.NONE),
        (TlsOffer.NONE, TlsOffer.ABLE),
    ],
)
def test_without_tls_on_both_ends_messages_are_plain(
    mine: TlsOffer, theirs: TlsOffer
) -> None:
    one, other = run_handshake(SECRET, HELLO, mine, theirs)
    assert one.tls is other.tls is None
    assert other.opener().feed(one.sealer().seal({"a": 1})) == [{"a": 1}]


@needs_tls
@pytest.mark.parametrize("mine", [TlsOffer.ABLE, TlsOffer.REQUIRED])
@pytest.mark.parametrize("theirs", [TlsOffer.ABLE, TlsOffer.REQUIRED])
def test_tls_is_used_if_both_ends_support_it(mine: TlsOffer, theirs: TlsOffer) -> None:
    one, other = run_handshake(SECRET, HELLO, mine, theirs)
    assert one.tls is not None and other.tls is not None
    assert one.tls.cipher == other.tls.cipher
    assert one.tls.cipher in [f"TLSv1.3 {suite}" for suite in SUITES]
    to, back = (one.sealer(), other.opener()), (other.sealer(), one.opener())
    for sealer, opener in (to, back):
        message = {"text": TOKEN, "n": "x" * (1 << 20)}
        assert opener.feed(sealer.seal(message)) == [message]


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(TlsOffer.REQUIRED, TlsOffer.NONE), (TlsOffer.NONE, TlsOffer.REQUIRED)],
)
def test_both_ends_report_that_tls_is_required(
    mine: TlsOffer, theirs: TlsOffer
) -> None:
    caller = handshake.caller_steps(SECRET, replace(HELLO, tls=mine))
    callee = handshake.callee_steps(SECRET, JOB, lambda introduction: "", theirs)
    next(callee)
    challenge, _ = callee.send(next(caller)[0])
    proof, wants = caller.send(challenge)
    # The caller refuses and sends no more, but the callee already has its proof.
    assert not wants
    text = {
        TlsOffer.REQUIRED: "has no TLS, and here RINGJAX_TLS=required",
        TlsOffer.NONE: "requires TLS .RINGJAX_TLS=required., which this end does not",
    }
    with pytest.raises(AuthenticationError, match=text[mine]):
        caller.send(b"")
    with pytest.raises(AuthenticationError, match=text[theirs]):
        callee.send(proof)


@pytest.mark.parametrize("flag", [0, 2, 3, 255])
def test_altered_tls_offers_are_detected(flag: int) -> None:
    def callee() -> handshake.HandshakeSteps:
        steps = handshake.callee_steps(
            SECRET, JOB, lambda introduction: "", TlsOffer.ABLE
        )
        next(steps)
        return steps

    said = bytearray(
        next(handshake.caller_steps(SECRET, replace(HELLO, tls=TlsOffer.ABLE)))[0]
    )
    where = 17
    assert said[where] == TlsOffer.ABLE
    said[where] = flag
    caller = handshake.caller_steps(SECRET, replace(HELLO, tls=TlsOffer.ABLE))
    next(caller)
    # The caller detects that its offer was altered on the way.
    with pytest.raises(AuthenticationError):
        caller.send(callee().send(bytes(said))[0])
    caller = handshake.caller_steps(SECRET, replace(HELLO, tls=TlsOffer.ABLE))
    answer = bytearray(callee().send(next(caller)[0])[0])
    where = 32
    assert answer[where] == TlsOffer.ABLE
    answer[where] = flag
    with pytest.raises(AuthenticationError, match="does not know this job's secret"):
        caller.send(bytes(answer))


def test_required_tls_without_psk_support_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(ssl, "HAS_PSK", raising=False)
    assert (tls.offer_for("auto"), tls.offer_for("off")) == (
        TlsOffer.NONE,
        TlsOffer.NONE,
    )
    for start in (
        lambda: tls.offer_for("required"),
        lambda: Coordinator(SECRET, JOB, np=1, tls="required"),
        lambda: join(
            JobCredentials("127.0.0.1:1", SECRET, JOB), 0, {}, 1, tls="required"
        ),
    ):
        with pytest.raises(StartupError, match="RINGJAX_TLS is 'required', but this"):
            start()


@needs_tls
def test_different_keys_are_refused() -> None:
    client, server = (
        TlsEndpoint(b"a" * 32, server=False),
        TlsEndpoint(b"b" * 32, server=True),
    )
    calling, answering = client.handshake(), server.handshake()
    hello, _ = next(calling)
    next(answering)
    answering.send(hello[:5])
    with pytest.raises(AuthenticationError, match="binder does not verify"):
        answering.send(hello[5:])


@needs_tls
@pytest.mark.parametrize("head", [b"\x16\x03\x03\xff\xff", b"\x16\x03\x03\0\0"])
def test_bad_record_lengths_are_refused(head: bytes) -> None:
    steps = TlsEndpoint(b"a" * 32, server=True).handshake()
    next(steps)
    with pytest.raises(AuthenticationError, match="announces a TLS record of"):
        steps.send(head)


@needs_tls
def test_one_thread_may_send_while_another_receives() -> None:
    one, other = run_handshake(SECRET, HELLO, TlsOffer.ABLE, TlsOffer.ABLE)
    sealer, opener, back = one.sealer(), other.opener(), other.sealer()
    stream = b"".join(back.seal({"n": n}) for n in range(300))
    reading, found = one.opener(), []

    def receive() -> None:
        for start in range(0, len(stream), 11):
            found.extend(reading.feed(stream[start : start + 11]))

    thread = threading.Thread(target=receive)
    thread.start()
    sent = [m for n in range(300) for m in opener.feed(sealer.seal({"n": n}))]
    thread.join(20)
    assert sent == found == [{"n": n} for n in range(300)]


# Over sockets, through a proxy that records all bytes.


@pytest.fixture
def server_and_log(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[Coordinator, list[str]]]:
    log: list[str] = []
    setting: str = request.param
    server = Coordinator(
        *(SECRET, JOB), np=1, on_loss="stop", log=log.append, tls=setting
    )
    server.start()
    yield server, log
    server.close()


def join_through(
    server: Coordinator, proxy: FaultProxy, setting: str, seconds: float = LONG
) -> CoordinatorClient:
    hello = {"rank": 0, "size": 1, "hostname": TOKEN}
    where = addresses.show(*proxy.address)
    return join(JobCredentials(where, SECRET, JOB), 0, hello, seconds, tls=setting)


def records(stream: bytes) -> Iterator[tuple[int, bytes]]:
    while stream:
        kind, _, length = struct.unpack_from("!BHH", stream)
        yield kind, stream[5 : 5 + length]
        stream = stream[5 + length :]


def extensions(hello: bytes, *, client: bool) -> dict[int, bytes]:
    """Parses the extensions of a TLS 1.3 hello message in its handshake record."""
    place = 4 + 2 + 32
    place += 1 + hello[place]  # client
    if client:
        place += 2 + int.from_bytes(hello[place : place + 2], "big")  # suites
        place += 1 + hello[place]  # compression
    else:
        place += 3
    place += 2
    found = {}
    while place < len(hello):
        kind, length = struct.unpack_from("!HH", hello, place)
        found[kind] = hello[place + 4 : place + 4 + length]
        place += 4 + length
    return found


@needs_tls
@pytest.mark.parametrize("server_and_log", ["auto", "required"], indirect=True)
def test_an_observer_cannot_read_messages(
    server_and_log: tuple[Coordinator, list[str]],
) -> None:
    server, _ = server_and_log
    with FaultProxy(addresses.parse(server.addresses[0])[0]) as proxy:
        client = join_through(server, proxy, "auto")
        assert client.members[0].hostname == TOKEN
        assert client.exchange(TOKEN, 5.0, "a value") == [TOKEN]
        client.close()
        up, down = (bytes(side) for side in proxy.received)
    for side in (up, down):
        assert TOKEN.encode() not in side
        assert b'"type"' not in side
    # Even the job's secret does not decrypt the messages, because the keys come from a
    # Diffie-Hellman exchange. The client allows only this mode (extension 45, value 1),
    # and the server has selected a pre-shared key (41) and a key share (51).
    mine = extensions(next(records(up[100:]))[1], client=True)
    assert mine[45] == b"\x01\x01"
    theirs = extensions(next(records(down[97:]))[1], client=False)
    assert theirs.keys() >= {41, 51, 43}
    assert theirs[43] == b"\x03\x04"  # TLS 1.3
    # After the hellos, all records are encrypted data (23), except a meaningless
    # change-cipher-spec record (20) for old middleboxes.
    for side in (up[100:], down[97:]):
        assert {kind for kind, _ in list(records(side))[1:]} <= {20, 23}


@pytest.mark.parametrize("server_and_log", ["off"], indirect=True)
def test_an_observer_can_read_messages_without_tls(
    server_and_log: tuple[Coordinator, list[str]],
) -> None:
    """Proves that the test above can fail: without TLS the proxy reads the token."""
    server, _ = server_and_log
    with FaultProxy(addresses.parse(server.addresses[0])[0]) as proxy:
        join_through(server, proxy, "auto").close()
        assert TOKEN.encode() in proxy.received[0]
        assert TOKEN.encode() in proxy.received[1]


@needs_tls
@pytest.mark.parametrize(
    ("server_and_log", "other"),
    [("required", "off"), ("off", "required")],
    indirect=["server_and_log"],
)
def test_required_tls_refuses_a_peer_without_tls(
    server_and_log: tuple[Coordinator, list[str]], other: str
) -> None:
    server, log = server_and_log
    hello = {"rank": 0, "size": 1}
    with pytest.raises(AuthenticationError, match="RINGJAX_TLS=required"):
        join(
            JobCredentials(server.addresses[0], SECRET, JOB), 0, hello, LONG, tls=other
        )
    until(lambda: log)
    assert "RINGJAX_TLS=required" in log[0]


@needs_tls
@pytest.mark.parametrize("server_and_log", ["auto"], indirect=True)
@pytest.mark.parametrize("direction", ["up", "down"])
def test_damage_after_the_handshake_ends_the_connection(
    server_and_log: tuple[Coordinator, list[str]], direction: str
) -> None:
    server, _ = server_and_log
    at = {"up": 100 + 343 + 30, "down": 97 + 225 + 30}[direction]
    where = addresses.parse(server.addresses[0])[0]
    with FaultProxy(where, **{direction: Fault(flip_at=at)}) as proxy:
        with pytest.raises((AuthenticationError, StartupError)):
            join_through(server, proxy, "auto", 2.0)
        assert len(proxy.received[direction == "down"]) > at


# Whole jobs.

RANK = """
import ringjax
ringjax.init()
print("size", ringjax.size(), flush=True)
ringjax.shutdown()
"""
KINDS = {"static": ["-np", "2"], "elastic": ["-np", "2", "--min-np", "2"]}


def run(kind: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "ringjax.run", *KINDS[kind], *command],
        env=environment("tls", {"RINGJAX_TLS": "required"}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
    )


@needs_tls
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_with_required_tls(kind: str) -> None:
    done = run(kind, sys.executable, "-c", RANK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("size 2") == 2


@pytest.mark.skipif(supported(), reason="this Python can")
@pytest.mark.parametrize("kind", KINDS)
def test_ringrun_refuses_required_tls_without_psk_support(kind: str) -> None:
    done = run(kind, "true")
    assert done.returncode == 2
    assert "RINGJAX_TLS is 'required', but this Python's ssl" in done.stderr
