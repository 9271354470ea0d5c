"""Exchanges values of processes through a key-value store, as `jax.distributed` has.

The store is the only thing that these processes share before they are connected. It
authenticates nobody.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

from ringjax.errors import StartupError

_GRACE = 5.0  # seconds for rank 0 to tell which rank was missing


class StoreClient(Protocol):
    """The methods of JAX's client of its store that are used here."""

    def key_value_set(self, key: str, value: str) -> None:
        """Sets a key, once."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Waits for a key. Raises an error of JAX if it is not set in time."""


class KeyValueStore:
    """The values that the ranks of one job exchange, under a common prefix.

    All ranks call the methods in the same order, and wait at most `timeout` seconds
    for each other. A rank is a process, or a device; `member` is the word for errors.
    """

    def __init__(
        self,
        client: StoreClient,
        rank: int,
        size: int,
        prefix: str,
        timeout: float,
        member: str = "process",
    ) -> None:
        self.rank, self.size, self.member = rank, size, member
        self._client, self._prefix, self._timeout = client, prefix, timeout

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Sets a JSON value, and returns the values of all ranks, in order.

        Raises:
            StartupError: a rank has not set its value. The text names the rank.
        """
        self._client.key_value_set(self._key(name, self.rank), json.dumps(value))

        def values() -> list[Any]:
            return [self._get(name, rank, self._timeout) for rank in range(self.size)]

        return list(self.from_first(f"{name}/all", values))

    def from_first(self, name: str, value: Callable[[], Any]) -> Any:
        """Returns the JSON value that `value` returns on rank 0, on all ranks.

        Raises:
            StartupError: rank 0 has set no value, or `value` has failed on it.
        """
        if self.rank > 0:
            found = self._get(name, 0, self._timeout + _GRACE)
            if "failure" in found:
                raise StartupError(f"{self.member} 0: {found['failure']}")
            return found["value"]
        try:
            made = value()
        except Exception as error:
            text = json.dumps({"failure": str(error)})
            self._client.key_value_set(self._key(name, 0), text)
            raise
        text = json.dumps({"value": made})
        self._client.key_value_set(self._key(name, 0), text)
        return made

    def _key(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{name}/{rank}"

    def _get(self, name: str, rank: int, seconds: float) -> Any:
        key = self._key(name, rank)
        try:
            text = self._client.blocking_key_value_get(key, int(1000 * seconds))
        # JAX raises an error of its own, and has no name for it that is public.
        except Exception as error:
            raise StartupError(
                f"{self.member} {rank} has not set {key} in JAX's key-value store "
                f"within {seconds:g} s: {error}"
            ) from error
        return json.loads(text)
