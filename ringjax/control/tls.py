"""TLS 1.3 with a pre-shared key on the connections of a job.

Python's ssl supports pre-shared keys, without certificate files, from Python 3.13 on.
The pre-shared key is derived from the handshake before TLS (handshake.py), so each
connection has a new key, which only authenticates. Encryption keys come from a
Diffie-Hellman exchange
(*forward secrecy*), so an attacker who records a connection and later learns the secret
of the job still cannot read the recording. This module opens no socket: it converts
bytes to bytes.

A link between hosts (RINGJAX_TLS=required) uses this TLS connection only to agree on
new keys. The native core then makes the records of the link itself, in the format of
TLS 1.3 and with libcrypto's AES-256-GCM (xla_ext/transport/channel.h). The core does
not use the kernel's TLS (kTLS), because a kTLS connection keeps one key for its whole
life. RFC 8446 (5.5) allows 2^24.5 records for one key, and the core derives a new key
after 2^24 records (256 GiB).
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

_WITHOUT_DIFFIE_HELLMAN = 1 << 10  # SSL_OP_ALLOW_NO_DHE_KEX, which has no name in ssl
_HEADER_BYTES = 5  # a record's header; bytes 3 and 4 are the length of the body
_MAX_RECORD_BYTES = 16384 + 256  # the longest body of a record
_READ_BYTES = 1 << 16
_RANDOM_BYTES = 32  # each end sends so many random bytes, to derive a link's keys
# The last two terms are the content type and the authentication tag.
_RANDOM_RECORD_BYTES = _HEADER_BYTES + _RANDOM_BYTES + 1 + 16

# A generator like `HandshakeSteps` that returns the keys of a link: key and IV for
# sending, then key and IV for receiving, as the native core expects them.
Steps = Generator[tuple[bytes, int], bytes, bytes]


class TlsOffer(enum.IntEnum):
    """Whether an end of a connection supports or requires TLS, for the handshake."""

    NONE = 0
    ABLE = 1
    REQUIRED = 2


def supported() -> bool:
    """Returns whether this Python supports TLS 1.3 with pre-shared keys."""
    return bool(getattr(ssl, "HAS_PSK", False) and ssl.HAS_TLSv1_3)


def offer_for(setting: str) -> TlsOffer:
    """Returns the TLS offer of a process with this value of RINGJAX_TLS.

    Raises:
        StartupError: TLS is required and this Python does not support TLS.

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


def agree(own: TlsOffer, peer: TlsOffer, *, is_link: bool = False) -> bool:
    """Decides from the offers of both ends whether they use TLS.

    Both ends get the same result. A link between ranks is encrypted only if an end
    requires TLS.

    Raises:
        AuthenticationError: one end requires TLS and the other end does not offer TLS.

    Example:
        >>> agree(TlsOffer.ABLE, TlsOffer.REQUIRED), agree(TlsOffer.ABLE, TlsOffer.NONE)
        (True, False)
        >>> agree(TlsOffer.ABLE, TlsOffer.ABLE, is_link=True)
        False
    """
    if TlsOffer.NONE not in (own, peer):
        return not is_link or TlsOffer.REQUIRED in (own, peer)
    if own == TlsOffer.REQUIRED:
        raise AuthenticationError(
            "has no TLS, and here RINGJAX_TLS=required: it needs Python 3.13 or newer "
            "and must not have RINGJAX_TLS=off"
        )
    if peer == TlsOffer.REQUIRED:
        raise AuthenticationError(
            "requires TLS (RINGJAX_TLS=required), which this end does not have: "
            + ("RINGJAX_TLS=off" if supported() else "it needs Python 3.13 or newer")
        )
    return False


class TlsEndpoint:
    """One end of a TLS connection, which converts between plain bytes and records.

    Several threads may use the endpoint. No method waits.

    Args:
        key: the pre-shared key, 32 bytes that only the two ends know.
        server: whether this end is the TLS server.
    """

    def __init__(self, key: bytes, *, server: bool) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = _context(key, server)
        self._tls = context.wrap_bio(self._in, self._out, server_side=server)
        self._lock = threading.Lock()
        self._server = server

    def handshake(self, root: bytes = b"", first: bytes = b"") -> Steps:
        """Runs this end of the TLS handshake.

        The steps read no byte beyond the last record of the handshake, because the
        native core reads the bytes that follow.

        Args:
            root: 32 bytes that only the two ends know, from which the keys of a link
                are derived; pass b"" for a connection that is no link.
            first: bytes to send before the first record.

        Raises:
            AuthenticationError: the other end does not know the key, or an attacker has
                altered a record.
        """
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise _authentication_error(error) from None
            header = yield first + self._out.read(), _HEADER_BYTES
            first = b""
            length = int.from_bytes(header[3:], "big")
            if not 0 < length <= _MAX_RECORD_BYTES:
                raise AuthenticationError(f"announces a TLS record of {length} bytes")
            self._in.write(header)
            self._in.write((yield b"", length))
        last = self._out.read()
        if root:
            return (yield from self._link_keys(root, last))
        yield last, 0
        return b""

    def _link_keys(self, root: bytes, last: bytes) -> Steps:
        """Derives the keys of a link from random bytes that both ends send in TLS."""
        own = secrets.token_bytes(_RANDOM_BYTES)
        if self._server:
            record = yield last, _RANDOM_RECORD_BYTES
            both = self._read_random(record) + own
            yield self.encrypt(own), 0
        else:
            record = yield last + self.encrypt(own), _RANDOM_RECORD_BYTES
            both = own + self._read_random(record)
        key = hmac.digest(root, both, "sha256")
        up, down = _expand(key, b"up"), _expand(key, b"down")
        return down + up if self._server else up + down

    def _read_random(self, record: bytes) -> bytes:
        plain = self.decrypt(record)
        if len(plain) != _RANDOM_BYTES:
            raise AuthenticationError(f"sent {len(plain)} bytes for the keys of a link")
        return plain

    @property
    def cipher(self) -> str:
        """The version and cipher suite: "TLSv1.3 TLS_CHACHA20_POLY1305_SHA256"."""
        suite = self._tls.cipher()
        return f"{self._tls.version()} {suite[0] if suite else '-'}"

    def encrypt(self, plain: bytes) -> bytes:
        """Encrypts plain bytes as TLS records."""
        view = memoryview(plain)
        with self._lock:
            while view:
                view = view[self._tls.write(view) :]
            return self._out.read()

    def decrypt(self, records: bytes) -> bytes:
        """Adds received bytes, and returns the plain bytes of the complete records.

        Raises:
            AuthenticationError: a record was altered, or the bytes are no record.
        """
        plain = []
        with self._lock:
            self._in.write(records)
            try:
                while piece := self._tls.read(_READ_BYTES):
                    plain.append(piece)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise _authentication_error(error) from None
        return b"".join(plain)


def _context(key: bytes, server: bool) -> ssl.SSLContext:
    kind = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(kind)
    psk: Any = context  # the types of Python 3.11 lack the set_psk_* methods
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The system's openssl.cnf may set this option, which gives up forward secrecy.
    context.options &= ~_WITHOUT_DIFFIE_HELLMAN
    if server:
        context.num_tickets = 0  # no client resumes a session, so send no tickets
        psk.set_psk_server_callback(lambda identity: key)
    else:
        context.check_hostname = False  # TLS with a shared key has no certificates
        context.verify_mode = ssl.CERT_NONE
        psk.set_psk_client_callback(lambda hint: ("ringjax", key))
    return context


def _expand(root: bytes, direction: bytes) -> bytes:
    """Derives key and IV of one direction (HKDF-Expand, RFC 5869)."""
    label = b"ringjax link " + direction
    first = hmac.digest(root, label + b"\x01", "sha256")
    return first + hmac.digest(root, first + label + b"\x02", "sha256")[:12]


def _authentication_error(error: ssl.SSLError) -> AuthenticationError:
    reason = (error.reason or "no reason").replace("_", " ").lower()
    return AuthenticationError(f"sent TLS that was altered or is wrong ({reason})")
