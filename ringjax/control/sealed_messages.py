"""JSON messages sealed with an HMAC and a counter, inside TLS where there is some.

What flows on control connections after the handshake (handshake.py), which gives out
the keys. The seal alone keeps anything altered, lost, replayed or made up from being
believed; TLS (tls.py) keeps it from being read. `ObjectSeal` is for objects on links.
"""

from __future__ import annotations

import hmac
import json
import struct
from dataclasses import dataclass, field
from typing import Any

from ringjax.control.tls import TlsEndpoint
from ringjax.errors import AuthenticationError

MAX_BYTES = 16 << 20  # of one sealed message
_MAC = 32
JsonMessage = dict[str, Any] | bytes  # a JSON object, or what `encode` made of it


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """The keys for sealed messages after a handshake, one per direction.

    Attributes:
        layer: this end of TLS, if both ends have it.
        link: what a link between ranks is encrypted with in the native core.
    """

    send: bytes = b""
    receive: bytes = b""
    layer: TlsEndpoint | None = None
    link: bytes = field(default=b"", repr=False)

    def sealer(self) -> MessageSealer:
        """For what is sent from now on; there must be one only."""
        return MessageSealer(self.send, self.layer)

    def opener(self, most: int = MAX_BYTES) -> MessageOpener:
        """For what is received from now on; there must be one only."""
        return MessageOpener(self.receive, most, self.layer)


def encode(message: dict[str, Any]) -> bytes:
    """The text of a message, once for many who get the same one."""
    return json.dumps(message, separators=(",", ":")).encode()


class MessageSealer:
    """Packs JSON messages so that the other end notices any change, loss or replay."""

    def __init__(self, key: bytes, layer: TlsEndpoint | None = None) -> None:
        self._key, self._count, self._layer = key, 0, layer

    def seal(self, message: JsonMessage) -> bytes:
        """Length (4 bytes), HMAC(key, counter, length, text), text; all that in TLS."""
        text = message if isinstance(message, bytes) else encode(message)
        if len(text) > MAX_BYTES:
            raise ValueError(f"message of {len(text)} bytes, at most {MAX_BYTES}")
        head = struct.pack("!QI", self._count, len(text))
        self._count += 1
        sealed = head[8:] + hmac.digest(self._key, head + text, "sha256") + text
        return sealed if self._layer is None else self._layer.protect(sealed)


class MessageOpener:
    """Takes bytes as they come, returns the messages that are complete and genuine."""

    def __init__(
        self, key: bytes, most: int = MAX_BYTES, layer: TlsEndpoint | None = None
    ) -> None:
        self._key, self._count, self._most, self._layer = key, 0, most, layer
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> list[dict[str, Any]]:
        """Raises AuthenticationError on the first message that is not genuine."""
        self._buffer += piece if self._layer is None else self._layer.expose(piece)
        messages = []
        while len(self._buffer) >= 4 + _MAC:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > self._most:
                raise AuthenticationError(f"announces a message of {length} bytes")
            if len(self._buffer) < 4 + _MAC + length:
                break
            head = struct.pack("!QI", self._count, length)
            mac = bytes(self._buffer[4 : 4 + _MAC])
            text = bytes(self._buffer[4 + _MAC : 4 + _MAC + length])
            del self._buffer[: 4 + _MAC + length]
            if not hmac.compare_digest(
                mac, hmac.digest(self._key, head + text, "sha256")
            ):
                raise AuthenticationError("sent a message that was altered or replayed")
            self._count += 1
            try:
                message = json.loads(text)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                raise AuthenticationError("sent something other than a JSON object")
            messages.append(message)
        return messages


class ObjectSeal:
    """Tells what a rank of this job has sent from what was altered or made up.

    Links between hosts may be plain TCP, and a pickle runs code. The seal is an HMAC
    (RFC 2104, SHA-256) under a key that only this job's ranks have. It does not hide
    anything, and an object that was genuine once could be played again.

    Args:
        secret: the job's; empty in a job of one.
        what: what the object is sent by; another function's objects are not genuine.
    """

    SIZE = 32

    def __init__(self, secret: bytes, what: str) -> None:
        self._key = hmac.digest(secret, b"ringjax objects " + what.encode(), "sha256")

    def of(self, failed: bool, data: bytes) -> bytes:
        """The seal of a message."""
        return hmac.digest(self._key, bytes([failed]) + data, "sha256")

    def checked(self, failed: bool, data: bytes) -> bytes:
        """The message without its seal.

        Raises:
            ValueError: it is not genuine.
        """
        data, seal = data[: -self.SIZE], data[-self.SIZE :]
        if not hmac.compare_digest(seal, self.of(failed, data)):
            raise ValueError(
                "it was altered on its way, or does not come from a rank of this job"
            )
        return data
