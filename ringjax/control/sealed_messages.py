"""JSON messages with an HMAC and a counter (the *seal*), inside TLS if possible.

A rank and a server exchange these messages after the handshake (handshake.py), which
supplies the keys. The seal reveals messages that were altered, dropped, replayed or
forged, with and without TLS. TLS (tls.py) also keeps the messages secret.
"""

from __future__ import annotations

import hmac
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringjax.control.member import JsonObject
from ringjax.control.tls import TlsEndpoint
from ringjax.errors import AuthenticationError

MAX_BYTES = 16 << 20  # the longest sealed message
_MAC_BYTES = 32
_COMPRESSED_FROM = 2048  # bytes of the shortest message that is compressed
JsonMessage = Mapping[str, Any] | bytes  # a JSON object, or the result of `encode`


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """The keys that a handshake supplies for one connection.

    Attributes:
        send: the HMAC key of the messages that this end sends.
        receive: the HMAC key of the messages that this end receives.
        tls: this end of the TLS connection; None if the session is not encrypted.
        link: the key with which the native core encrypts a link between ranks; empty if
            the link is not encrypted.
    """

    send: bytes = field(default=b"", repr=False)
    receive: bytes = field(default=b"", repr=False)
    tls: TlsEndpoint | None = None
    link: bytes = field(default=b"", repr=False)

    def sealer(self) -> MessageSealer:
        """Makes the sealer. Call once per session: a second sealer reuses counters."""
        return MessageSealer(self.send, self.tls)

    def opener(self, max_bytes: int = MAX_BYTES) -> MessageOpener:
        """Makes the opener. Call once per session: a second opener restarts at 0."""
        return MessageOpener(self.receive, max_bytes, self.tls)


def encode(message: Mapping[str, Any]) -> bytes:
    """Encodes a message as bytes, so that `seal` need not encode it for each peer.

    Long messages are compressed, because they are sent to many ranks. Raises ValueError
    if the message has more than MAX_BYTES.
    """
    text = json.dumps(message, separators=(",", ":")).encode()
    if len(text) > MAX_BYTES:
        raise ValueError(f"message of {len(text)} bytes, at most {MAX_BYTES}")
    return zlib.compress(text, level=1) if len(text) >= _COMPRESSED_FROM else text


def decode(data: bytes) -> JsonObject:
    """Returns the message of the result of `encode`.

    Raises:
        AuthenticationError: the data are no message, or one of more than MAX_BYTES.
    """
    try:
        if data[:1] != b"{":
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(data, MAX_BYTES)
            if not unpacker.eof or unpacker.unused_data:
                raise AuthenticationError("sent an incomplete or too long message")
        message = json.loads(data)
    except (zlib.error, ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise AuthenticationError("sent something other than a JSON object")
    return message


class MessageSealer:
    """Adds HMACs, so that the other end detects altered, lost or replayed messages."""

    def __init__(self, key: bytes, tls: TlsEndpoint | None = None) -> None:
        self._key, self._count, self._tls = key, 0, tls

    def seal(self, message: JsonMessage) -> bytes:
        """Returns the length (4 bytes), HMAC(key, counter, length, text), and the text.

        Raises ValueError as `encode` does.
        """
        text = message if isinstance(message, bytes) else encode(message)
        head = struct.pack("!QI", self._count, len(text))
        self._count += 1
        sealed = head[8:] + hmac.digest(self._key, head + text, "sha256") + text
        return sealed if self._tls is None else self._tls.encrypt(sealed)


class MessageOpener:
    """Collects received bytes, verifies HMACs, and returns the complete messages."""

    def __init__(
        self, key: bytes, max_bytes: int = MAX_BYTES, tls: TlsEndpoint | None = None
    ) -> None:
        self._key, self._count, self._max_bytes, self._tls = key, 0, max_bytes, tls
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> list[JsonObject]:
        """Adds received bytes, and returns the messages that are complete now.

        Raises:
            AuthenticationError: a message is not genuine, or too long.
        """
        self._buffer += piece if self._tls is None else self._tls.decrypt(piece)
        messages = []
        while len(self._buffer) >= 4 + _MAC_BYTES:
            length = int.from_bytes(self._buffer[:4], "big")
            # The length is not authenticated until the whole message has arrived. The
            # limit keeps an attacker from making this process collect gigabytes.
            if length > self._max_bytes:
                raise AuthenticationError(f"announces a message of {length} bytes")
            if len(self._buffer) < 4 + _MAC_BYTES + length:
                break
            head = struct.pack("!QI", self._count, length)
            mac = bytes(self._buffer[4 : 4 + _MAC_BYTES])
            text = bytes(self._buffer[4 + _MAC_BYTES : 4 + _MAC_BYTES + length])
            del self._buffer[: 4 + _MAC_BYTES + length]
            expected = hmac.digest(self._key, head + text, "sha256")
            if not hmac.compare_digest(mac, expected):
                raise AuthenticationError("sent a message that was altered or replayed")
            self._count += 1
            messages.append(decode(text))
        return messages


class ObjectSeal:
    """Proves by an HMAC that a rank of this job has sent an object.

    Links between hosts may be plain TCP, and loading a pickle runs code. So an HMAC
    (RFC 2104, SHA-256) under a key of the job follows each object. The HMAC does not
    encrypt, and does not detect that a genuine object is replayed.

    Args:
        secret: the secret of the job; empty in a job of one.
        function: the name of the function that sends the object. `verify` rejects an
            object that another function has sent.
    """

    SIZE = 32

    def __init__(self, secret: bytes, function: str) -> None:
        label = b"ringjax objects " + function.encode()
        self._key = hmac.digest(secret, label, "sha256")

    def of(self, failed: bool, data: bytes) -> bytes:
        """Returns the HMAC of an encoded object, or of the reason of a failure."""
        return hmac.digest(self._key, bytes([failed]) + data, "sha256")

    def verify(self, failed: bool, data: bytes) -> bytes:
        """Removes the HMAC from a message. Raises ValueError if it is not genuine."""
        data, seal = data[: -self.SIZE], data[-self.SIZE :]
        if not hmac.compare_digest(seal, self.of(failed, data)):
            raise ValueError(
                "it was altered on its way, or does not come from a rank of this job"
            )
        return data
