"""Tests of the tokens that order stand-alone calls, in a job of one rank.

xla/tokens.py replaces some of JAX's handling of tokens by faster code. These tests
check that the results are as with JAX's own code. tests/ranks/jax tests the order of
calls.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import ringjax
from ringjax.xla import tokens

JAX: Any = tokens  # the module imports private names of jax, which these tests need


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
    """Records the arguments of JAX's `device_put` during the test."""
    arguments: list[Any] = []
    api: Any = vars(JAX._dispatch)["api"]
    place = api.device_put

    def device_put(x: Any, *rest: Any, **options: Any) -> Any:
        arguments.append(x)
        return place(x, *rest, **options)

    monkeypatch.setattr(api, "device_put", device_put)
    return arguments


def token() -> Any:
    return JAX._dispatch.runtime_tokens.current_tokens.get(tokens.EFFECT)


def reduce(x: Any) -> Any:
    return ringjax.allreduce(x, op=ringjax.Sum)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the programs that JAX launches from Python, not from its C++ path."""
    names: list[str] = []
    call = JAX._pxla.ExecuteReplicated.__call__

    def __call__(self: Any, *arguments: Any) -> Any:  # noqa: N807
        names.append(self.name)
        return call(self, *arguments)

    monkeypatch.setattr(JAX._pxla.ExecuteReplicated, "__call__", __call__)
    return names


@pytest.mark.parametrize("ahead", [False, True])
def test_a_program_on_one_device_takes_no_token(launches, ahead) -> None:
    program = jax.jit(reduce)
    text = program.lower(jnp.ones(3)).as_text()
    assert text.count("stablehlo.create_token") == 1
    assert "token" not in next(x for x in text.splitlines() if "public @main" in x)
    call = program.lower(jnp.ones(3)).compile() if ahead else program
    for _ in range(5):
        np.testing.assert_array_equal(call(jnp.ones(3)), np.ones(3))
    assert launches.count("jit(reduce)") == 1  # only the first of the five calls
    assert token() is None


@pytest.mark.parametrize("ahead", [False, True])
def test_a_program_without_results_takes_a_token(launches, ahead) -> None:
    """Without results, only the token shows when the program ends or fails."""
    program = jax.jit(lambda: ringjax.barrier())
    call = program.lower().compile() if ahead else program
    seen = set()
    for _ in range(5):
        call()
        seen.add(token())
    assert len(launches) == len(seen) == 5


def test_ordered_callbacks_keep_their_order() -> None:
    seen: list[int] = []

    def tell(x: Any, number: int) -> None:
        io_callback(lambda _: seen.append(number), None, x, ordered=True)

    @jax.jit
    def program(x: Any) -> Any:
        tell(x, 1)
        x = jax.jit(reduce)(x)
        tell(x, 2)
        x = reduce(x)
        tell(x, 3)
        return x

    for _ in range(3):
        np.testing.assert_array_equal(program(jnp.ones(3)), np.ones(3))
    jax.effects_barrier()
    assert seen == [1, 2, 3] * 3


def test_wait_for_programs_waits_for_dropped_results() -> None:
    seen: list[int] = []

    def slow(x: Any) -> Any:
        time.sleep(0.3)
        seen.append(1)
        return x

    @jax.jit
    def program(x: Any) -> Any:
        return reduce(jax.pure_callback(slow, x, x))

    program(jnp.ones(3))
    tokens.wait_for_programs()
    assert seen == [1]


# -- programs that take a token --------------------------------------------------------


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a program that takes a token, as if XLA did not order its calls."""
    monkeypatch.setattr(tokens, "_is_ordered_by_xla", lambda *_: False)
    return jax.jit(lambda x: reduce(x))


def test_a_token_in_place_is_not_placed_again(placed: list[Any], reduced: Any) -> None:
    for _ in range(3):
        before = token()
        reduced(jnp.ones(3)).block_until_ready()
        assert token() is not before  # each program gives the next one a new token
    assert not any(isinstance(x, JAX._core.Token) for x in placed)


def test_tokens_of_other_effects_are_placed_by_jax(placed: list[Any]) -> None:
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
    """A fake of the array inside a token."""

    def __init__(self, devices: set[Any], error: Exception | None = None) -> None:
        self._devices, self._error = devices, error
        self.waits = 0

    def devices(self) -> set[Any]:
        return self._devices

    def block_until_ready(self) -> None:
        self.waits += 1
        if self._error is not None:
            raise self._error


def test_a_program_waits_for_the_previous_program(reduced: Any) -> None:
    array = _Array(set())
    JAX._dispatch.runtime_tokens.current_tokens[tokens.EFFECT] = JAX._core.Token(array)
    np.testing.assert_array_equal(reduced(jnp.ones(3)), np.ones(3))
    assert array.waits


def test_a_token_on_another_device_is_placed(placed: list[Any], reduced: Any) -> None:
    elsewhere = JAX._core.Token(_Array({"another device"}))
    JAX._dispatch.runtime_tokens.current_tokens[tokens.EFFECT] = elsewhere
    np.testing.assert_array_equal(reduced(jnp.ones(3)), np.ones(3))
    assert elsewhere in placed


def test_an_error_of_the_previous_program_is_raised(reduced: Any) -> None:
    failed = _Array(set(jax.devices()), ValueError("of the program before"))
    JAX._dispatch.runtime_tokens.current_tokens[tokens.EFFECT] = JAX._core.Token(failed)
    with pytest.raises(ValueError, match="of the program before"):
        reduced(jnp.ones(3))
    JAX._dispatch.runtime_tokens.clear()
    np.testing.assert_array_equal(reduced(jnp.ones(3)), np.ones(3))


def test_no_thread_waits_for_tokens_when_python_ends() -> None:
    """Such a thread would abort the process when it comes back from jaxlib."""
    program = """
import atexit
import threading

@atexit.register
def print_threads():
    print([thread.name for thread in threading.enumerate()])

from ringjax.xla import tokens

tokens.drop_failed_tokens()
"""
    # The function of the program was registered first, so it runs last.
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (out.returncode, out.stderr) == (0, "")
    assert out.stdout == "['MainThread']\n"
