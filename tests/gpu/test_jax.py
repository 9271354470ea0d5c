"""ringjax on a GPU as users call it: collectives, transforms, training, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import ringjax  # noqa: E402
from benchmarks.gpu import section  # noqa: E402


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    assert jax.default_backend() == "gpu"
    ringjax.init()
    yield


def calls() -> float:
    return section.allreduce_stats().get("calls", 0)


def test_allreduce_goes_through_the_device() -> None:
    x = jnp.arange(10.0)
    for f in (ringjax.allreduce, jax.jit(ringjax.allreduce)):
        before = calls()
        out = f(x)
        np.testing.assert_array_equal(out, x)
        assert out.devices() == x.devices()
        assert section.device_communicator() is not None
        assert calls() == before + 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("compression", ["none", "bf16", "fp16"])
def test_training_equals_training_without_ringjax(overlap, compression) -> None:
    wire = getattr(ringjax.Compression, compression)
    exchange = ringjax.allreduce_grads(
        overlap=overlap, bucket_bytes=10_000, compression=wire
    )
    params = [jnp.full((64, 64), 0.01 * (i + 1)) for i in range(4)]
    x = jnp.linspace(-1, 1, 8 * 64).reshape(8, 64)

    def train(tx: Any) -> Any:
        @jax.jit
        def step(params: Any, state: Any) -> Any:
            def loss(params: Any) -> Any:
                y = x
                for matrix in params:
                    y = jnp.tanh(y @ matrix)
                return jnp.sum(y**2)

            updates, state = tx.update(jax.grad(loss)(params), state)
            return optax.apply_updates(params, updates), state

        state, trained = tx.init(params), params
        for _ in range(10):
            trained, state = step(trained, state)
        return jax.device_get(trained)

    with jax.default_matmul_precision("highest"):
        plain = train(optax.sgd(1e-3))
        ours = train(optax.chain(exchange, optax.sgd(1e-3)))
    near = 1e-6 if compression == "none" else 1e-3
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=near, atol=near)


def test_donated_gradients_are_reduced_in_place() -> None:
    tx = ringjax.allreduce_grads(overlap=False)
    step = jax.jit(tx.update, donate_argnums=(0, 1))
    grads = [jnp.ones(3), jnp.full((1 << 20,), 2.0)]
    large = grads[1].unsafe_buffer_pointer()
    state = tx.init(grads)
    for _ in range(3):
        grads, state = step(grads, state)
    assert int(state.seq[0]) == 3
    assert grads[1].unsafe_buffer_pointer() == large
    np.testing.assert_array_equal(grads[1], np.full(1 << 20, 2.0, np.float32))


def test_the_other_collectives() -> None:
    x = jnp.arange(12.0).reshape(4, 3)
    for f in (
        ringjax.allgather,
        ringjax.alltoall,
        ringjax.reducescatter,
        lambda v: ringjax.broadcast(v, 0),
    ):
        np.testing.assert_array_equal(f(x), x)
        np.testing.assert_array_equal(jax.jit(f)(x), x)
    ringjax.barrier()


def test_transforms() -> None:
    x = jnp.arange(6.0).reshape(2, 3)
    f = lambda v: ringjax.allreduce(v, ringjax.Sum)  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(x), x)
    slope = jax.jit(jax.grad(lambda v: jnp.sum(f(v * v))))(x)
    np.testing.assert_allclose(slope, 2 * x)

    def body(carry: Any, _: Any) -> Any:
        return f(carry) + 1, carry.sum()

    out, sums = jax.jit(lambda v: jax.lax.scan(body, v, None, length=5))(x)
    np.testing.assert_allclose(out, x + 5)
    assert sums.shape == (5,)


def test_objects_and_metrics() -> None:
    assert ringjax.broadcast_object({"a": 1}) == {"a": 1}
    assert ringjax.allgather_object("x") == ["x"]
    shown = ringjax.allreduce_metrics({"loss": jnp.float32(2.5)})
    assert shown["loss"] == 2.5
    params = {"w": jnp.ones((3, 3))}
    out = ringjax.broadcast_parameters(params)
    np.testing.assert_array_equal(out["w"], params["w"])


def test_another_epoch() -> None:
    before = ringjax.allreduce(jnp.ones(3))
    ringjax.shutdown()
    ringjax.init()
    np.testing.assert_array_equal(ringjax.allreduce(jnp.ones(3)), before)


def test_build_info_knows_the_device() -> None:
    info = ringjax.build_info()
    assert info["devices"] and info["nccl"] > 21800
    assert info["device_code"] != "none"
    assert "libnccl" in info["nccl_path"]
