"""The token that orders stand-alone calls: placed once, waited for, and never lost.

One process, a job of one. What xla/tokens.py changes in JAX is a shortcut: these tests
hold it against JAX's own way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import ringjax
from ringjax.xla import tokens

JAX: Any = tokens  # with the private names of jax, which only that file imports


@pytest.fixture(scope="module", autouse=True)
def _job_of_one() -> Iterator[None]:
    ringjax.init()
    yield
    ringjax.shutdown()


@pytest.fixture(autouse=True)
def _no_tokens_of_others() -> Iterator[None]:
    JAX._dispatch.runtime_tokens.clear()
    yield
    JAX._dispatch.runtime_tokens.clear()


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What JAX places on devices from now on."""
    arguments: list[Any] = []
    api: Any = vars(JAX._dispatch)["api"]
    place = api.device_put

    def device_put(x: Any, *rest: Any, **options: Any) -> Any:
        arguments.append(x)
        return place(x, *rest, **options)

    monkeypatch.setattr(api, "device_put", device_put)
    return arguments


def token() -> Any:
    return JAX._dispatch.runtime_tokens.current_tokens.get(tokens.RING)


@jax.jit
def reduced(x: Any) -> Any:
    return ringjax.allreduce(x, op=ringjax.Sum)


def test_a_token_in_place_is_not_placed_again(placed: list[Any]) -> None:
    for _ in range(3):
        before = token()
        reduced(jnp.ones(3)).block_until_ready()
        assert token() is not before  # each program gives the next one a new token
    assert not any(isinstance(x, JAX._core.Token) for x in placed)


def test_the_tokens_of_others_are_left_to_jax(placed: list[Any]) -> None:
    seen: list[float] = []

    @jax.jit
    def told(x: Any) -> Any:
        io_callback(lambda v: seen.append(float(v)), None, x, ordered=True)
        return x

    for i in range(3):
        told(jnp.float32(i))
    jax.effects_barrier()
    assert seen == [0, 1, 2]
    assert sum(isinstance(x, JAX._core.Token) for x in placed) == 2


class _Array:
    """Stands for the array inside a token."""

    def __init__(self, devices: set[Any], error: Exception | None = None) -> None:
        self._devices, self._error = devices, error
        self.waits = 0

    def devices(self) -> set[Any]:
        return self._devices

    def block_until_ready(self) -> None:
        self.waits += 1
        if self._error is not None:
            raise self._error


def test_a_program_waits_for_the_one_before() -> None:
    array = _Array(set())
    JAX._dispatch.runtime_tokens.current_tokens[tokens.RING] = JAX._core.Token(array)
    np.testing.assert_array_equal(reduced(jnp.ones(3)), np.ones(3))
    assert array.waits


def test_a_token_elsewhere_is_placed(placed: list[Any]) -> None:
    elsewhere = JAX._core.Token(_Array({"another device"}))
    JAX._dispatch.runtime_tokens.current_tokens[tokens.RING] = elsewhere
    np.testing.assert_array_equal(reduced(jnp.ones(3)), np.ones(3))
    assert elsewhere in placed


def test_the_error_of_the_program_before_is_raised() -> None:
    failed = _Array(set(jax.devices()), ValueError("of the program before"))
    JAX._dispatch.runtime_tokens.current_tokens[tokens.RING] = JAX._core.Token(failed)
    with pytest.raises(ValueError, match="of the program before"):
        reduced(jnp.ones(3))
    JAX._dispatch.runtime_tokens.clear()
    np.testing.assert_array_equal(reduced(jnp.ones(3)), np.ones(3))
