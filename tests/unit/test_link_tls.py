"""Tests of RINGJAX_TLS=required on links: keys, secrecy, damaged records.

tests/native/channel_test.cc tests the records. Most tests need Python 3.13, whose ssl
module has pre-shared keys.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest
from support.fault_proxy import Fault, FaultProxy
from support.handshakes import needs_tls, run_handshake
from support.link_ranks import JOB, SECRET, Ranks, world
from support.waiting import until

from ringjax import _native
from ringjax.control.handshake import HandshakeRequest, Purpose
from ringjax.control.tls import TlsOffer
from ringjax.errors import Unreachable

__all__ = ["world"]  # a fixture

HELLO = HandshakeRequest(JOB, Purpose.DATA, caller=1, callee=0)
SENTENCE = "a sentence that nobody else may read"
HALF = 44  # bytes of the key for one direction


@needs_tls
@pytest.mark.parametrize("mine", [TlsOffer.ABLE, TlsOffer.REQUIRED])
@pytest.mark.parametrize("theirs", [TlsOffer.ABLE, TlsOffer.REQUIRED])
def test_one_end_can_require_encryption(mine: TlsOffer, theirs: TlsOffer) -> None:
    one, other = run_handshake(SECRET, HELLO, mine, theirs)
    if TlsOffer.REQUIRED not in (mine, theirs):
        assert one.link == other.link == b""
        return
    assert len(one.link) == 2 * HALF
    assert one.link == other.link[HALF:] + other.link[:HALF]
    assert one.link[:HALF] != one.link[HALF:]
    assert run_handshake(SECRET, HELLO, mine, theirs)[0].link != one.link, (
        "keys of another connection"
    )
    assert one.link.hex() not in repr(one)


@needs_tls
def test_only_links_between_hosts_have_keys(
    world: Callable[..., Ranks],
) -> None:
    ranks = world((0, 1, 0), tls="required", tcp_streams=2)
    meshes = ranks.build()
    keys = {
        (rank, peer): of_streams
        for rank, mesh in enumerate(meshes)
        for peer, _, of_streams in mesh.links
    }
    assert sorted(keys) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    for (rank, peer), of_streams in keys.items():
        turned = [key[HALF:] + key[:HALF] for key in keys[peer, rank]]
        assert of_streams == turned
    assert len({key for found in keys.values() for key in found}) == 2 * 4
    for rank, mesh in enumerate(meshes):
        near = [ranks.hosts[peer] == ranks.hosts[rank] for peer, _ in mesh.control]
        assert [not key for key in mesh.control_keys] == near


@pytest.mark.parametrize("tls", ["auto", "off"])
def test_links_are_plain_by_default(world: Callable[..., Ranks], tls: str) -> None:
    meshes = world((0, 1), tls=tls).build()
    assert [keys for mesh in meshes for _, _, keys in mesh.links] == [[], []]
    assert [mesh.control_keys for mesh in meshes] == [[b""], [b""]]


@needs_tls
@pytest.mark.parametrize("without", [0, 1])
def test_a_rank_without_tls_is_refused_with_a_reason(
    world: Callable[..., Ranks], without: int
) -> None:
    ranks = world((0, 1), tls="required", without_tls=without, start_timeout=1.0)
    futures = ranks.start(0, [0, 1], [0, 1], True)
    texts = []
    for future in futures:
        with pytest.raises(Unreachable) as caught:
            future.result()
        texts.append(str(caught.value))
    assert "rank 0 could not be connected with rank 1" in texts[0]
    assert "rank 1 could not be connected with rank 0" in texts[1]
    assert "RINGJAX_TLS=required" in texts[1], texts
    assert "RINGJAX_TLS=required" in "\n".join(ranks.log)


@contextlib.contextmanager
def two_heartbeats(
    fault: Fault, encrypted: bool
) -> Iterator[tuple[list[_native.Heartbeat], FaultProxy]]:
    """Starts two heartbeats that are connected through a proxy."""
    with contextlib.ExitStack() as stack:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            proxy = stack.enter_context(FaultProxy(listener.getsockname(), up=fault))
            ours = socket.create_connection(proxy.address)
            theirs, _ = listener.accept()
        up, down = b"u" * HALF, b"d" * HALF
        keys = [up + down], [down + up]
        beats = []
        for rank, sock in enumerate((ours, theirs)):
            beat = _native.Heartbeat(
                rank,
                ["", ""],
                [(1 - rank, sock.detach())],
                interval=0.05,
                timeout=60,
                **({"keys": keys[rank]} if encrypted else {}),
            )
            stack.callback(beat.close)
            beats.append(beat)
        yield beats, proxy


def test_encrypted_data_is_unreadable_on_the_wire() -> None:
    received = []
    for encrypted in (False, True):
        with two_heartbeats(Fault(), encrypted) as (beats, proxy):
            beats[0].fail(SENTENCE)
            until(lambda beat=beats[1]: beat.lost())
            assert SENTENCE in beats[1].lost()[0][1]
        received.append(bytes(proxy.received[0]))
    assert [SENTENCE.encode() in bytes_ for bytes_ in received] == [True, False]
    assert received[1][:3] == b"\x17\x03\x03"


@pytest.mark.parametrize("at", [0, 5, 30, 300])
def test_altered_records_are_detected_and_named(at: int) -> None:
    with two_heartbeats(Fault(flip_at=at), encrypted=True) as (beats, _):
        until(lambda: beats[1].lost())
        assert beats[1].lost() == [
            (0, "sent data that were altered on their way, or are no TLS records")
        ]


def test_an_encrypted_heartbeat_works_and_detects_the_end() -> None:
    with two_heartbeats(Fault(drip=7), encrypted=True) as (beats, proxy):
        until(lambda: len(proxy.received[0]) > 600)  # about ten heartbeats
        assert [beat.lost() for beat in beats] == [[], []]
        beats[0].close()
        until(lambda: beats[1].lost())
        assert "closed its connection" in beats[1].lost()[0][1]


@pytest.mark.parametrize("keys", [[b"k" * 88, b"k" * 88], [b"k" * 87]])
def test_bad_keys_are_refused(keys: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with pytest.raises(_native.StatusError, match="key"):
            _native.Heartbeat(
                0, ["", ""], [(1, ours.detach())], interval=1, timeout=9, keys=keys
            )
        assert theirs.recv(1) == b""
