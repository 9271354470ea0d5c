"""TLS on the connections of a job, where Python's ssl can do it without files.

That is from Python 3.13 on: TLS 1.3 with a pre-shared key instead of certificates. The
key is made of what both ends proved to each other before (handshake.py), so it is new
for each connection, and it only authenticates: what is encrypted with comes from a
Diffie-Hellman exchange, so who records a conversation and learns the job's secret later
still cannot read it. No sockets here: bytes in, bytes out.

Links between hosts (RINGJAX_TLS=required) only shake hands here, and agree in TLS on
the keys with which the native core makes its records (xla_ext/transport/channel.h).
"""

from __future__ import annotations

import enum
import hmac
import secrets
import ssl
import threading
from collections.abc import Generator
from typing import Any

from ringjax.errors import AuthenticationError, StartupError

SETTINGS = ("auto", "required", "off")
_WITHOUT_DIFFIE_HELLMAN = 1 << 10  # SSL_OP_ALLOW_NO_DHE_KEX, which has no name in ssl
_HEAD = 5  # bytes of a record that say how long it is
_LONGEST = 16384 + 256  # bytes of the rest of a record
_PIECE = 1 << 16
_RANDOM = 32  # bytes of each end, for the keys of a link
_SEALED = _HEAD + _RANDOM + 1 + 16  # as a record: its type, and the tag

# Yields (bytes to send, how many bytes it wants next) and takes these. Returns the keys
# of a link: key and IV for sending, then for receiving, as the native core takes them.
Steps = Generator[tuple[bytes, int], bytes, bytes]


class TlsOffer(enum.IntEnum):
    """What one end of a connection says about TLS, in the handshake before."""

    NONE = 0
    ABLE = 1
    REQUIRED = 2


def supported() -> bool:
    """Whether this Python can."""
    return bool(getattr(ssl, "HAS_PSK", False) and ssl.HAS_TLSv1_3)


def offer_for(setting: str) -> TlsOffer:
    """What a process with this setting of RINGJAX_TLS says.

    Raises:
        StartupError: it is required and this Python cannot.

    Example:
        >>> offer_for("off").name
        'NONE'
    """
    if setting == "off":
        return TlsOffer.NONE
    if setting != "required":
        return TlsOffer.ABLE if supported() else TlsOffer.NONE
    if not supported():
        raise StartupError(
            "RINGJAX_TLS is 'required', but this Python's ssl has no pre-shared keys: "
            "use Python 3.13 or newer, or set RINGJAX_TLS=auto"
        )
    return TlsOffer.REQUIRED


def agree(mine: TlsOffer, theirs: TlsOffer, *, link: bool = False) -> bool:
    """Whether two ends use TLS; alike on both.

    Args:
        link: it is a link between ranks, which is encrypted only if one requires it.

    Raises:
        AuthenticationError: one requires what the other does not have.

    Example:
        >>> agree(TlsOffer.ABLE, TlsOffer.REQUIRED), agree(TlsOffer.ABLE, TlsOffer.NONE)
        (True, False)
        >>> agree(TlsOffer.ABLE, TlsOffer.ABLE, link=True)
        False
    """
    if TlsOffer.NONE not in (mine, theirs):
        return not link or TlsOffer.REQUIRED in (mine, theirs)
    if mine == TlsOffer.REQUIRED:
        raise AuthenticationError(
            "has no TLS, and here RINGJAX_TLS=required: it needs Python 3.13 or newer "
            "and must not have RINGJAX_TLS=off"
        )
    if theirs == TlsOffer.REQUIRED:
        raise AuthenticationError(
            "requires TLS (RINGJAX_TLS=required), which this end does not have: "
            + ("RINGJAX_TLS=off" if supported() else "it needs Python 3.13 or newer")
        )
    return False


class TlsEndpoint:
    """One end of a TLS connection, between plain bytes and records.

    Args:
        key: 32 bytes that both ends know and nobody else.
        server: which end.

    Usable from several threads; nothing here waits.
    """

    def __init__(self, key: bytes, *, server: bool) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = _context(key, server)
        self._tls = context.wrap_bio(self._in, self._out, server_side=server)
        self._lock = threading.Lock()
        self._server = server

    def handshake(self, root: bytes = b"", first: bytes = b"") -> Steps:
        """What this end does until both have the keys.

        It takes whole records, and none that comes after its end.

        Args:
            root: 32 bytes that both ends know, if they are to agree on keys of a link.
            first: to be sent before anything of its own.

        Raises:
            AuthenticationError: the other end does not know the key, or somebody has
                altered what it said.
        """
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise _refusal(error) from None
            head = yield first + self._out.read(), _HEAD
            first = b""
            length = int.from_bytes(head[3:], "big")
            if not 0 < length <= _LONGEST:
                raise AuthenticationError(f"announces a TLS record of {length} bytes")
            self._in.write(head)
            self._in.write((yield b"", length))
        last = self._out.read()
        if root:
            return (yield from self._link_keys(root, last))
        yield last, 0
        return b""

    def _link_keys(self, root: bytes, last: bytes) -> Steps:
        """Agrees on the keys of a link; nothing is left unread."""
        mine = secrets.token_bytes(_RANDOM)
        if self._server:
            record = yield last, _SEALED
            both = self._random(record) + mine
            yield self.protect(mine), 0
        else:
            record = yield last + self.protect(mine), _SEALED
            both = mine + self._random(record)
        keys = [
            _expand(hmac.digest(root, both, "sha256"), way) for way in (b"up", b"down")
        ]
        return b"".join(keys[::-1] if self._server else keys)

    def _random(self, record: bytes) -> bytes:
        plain = self.expose(record)
        if len(plain) != _RANDOM:
            raise AuthenticationError(f"sent {len(plain)} bytes for the keys of a link")
        return plain

    @property
    def cipher(self) -> str:
        """Version and cipher suite.

        Example: "TLSv1.3 TLS_CHACHA20_POLY1305_SHA256".
        """
        suite = self._tls.cipher()
        return f"{self._tls.version()} {suite[0] if suite else '-'}"

    def protect(self, plain: bytes) -> bytes:
        """The records that carry these bytes."""
        view = memoryview(plain)
        with self._lock:
            while view:
                view = view[self._tls.write(view) :]
            return self._out.read()

    def expose(self, records: bytes) -> bytes:
        """The plain bytes in what has come so far.

        Raises:
            AuthenticationError: it was altered, or is something else.
        """
        plain = []
        with self._lock:
            self._in.write(records)
            try:
                while piece := self._tls.read(_PIECE):
                    plain.append(piece)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise _refusal(error) from None
        return b"".join(plain)


def _context(key: bytes, server: bool) -> Any:
    """An SSLContext; what it is asked for here, older Pythons do not have."""
    kind = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
    context: Any = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The system's configuration must not take forward secrecy away.
    context.options &= ~_WITHOUT_DIFFIE_HELLMAN
    if server:
        context.num_tickets = 0  # a connection is never resumed
        context.set_psk_server_callback(lambda identity: key)
    else:
        context.check_hostname = False  # there are no certificates
        context.verify_mode = ssl.CERT_NONE
        context.set_psk_client_callback(lambda hint: ("ringjax", key))
    return context


def _expand(root: bytes, way: bytes) -> bytes:
    """Key and IV of one direction (HKDF-Expand, RFC 5869)."""
    label = b"ringjax link " + way
    first = hmac.digest(root, label + b"\x01", "sha256")
    return first + hmac.digest(root, first + label + b"\x02", "sha256")[:12]


def _refusal(error: ssl.SSLError) -> AuthenticationError:
    reason = (error.reason or "no reason").replace("_", " ").lower()
    return AuthenticationError(f"sent TLS that was altered or is wrong ({reason})")
