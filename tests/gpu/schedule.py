"""Checks XLA's schedule of a training step for a GPU, on a machine without a GPU.

XLA compiles for the description of a GPU and prints its optimised HLO in the order of
the schedule. The text shows where communication starts and that nothing is copied.
Nothing runs here. `make gpu-schedule` installs JAX's CUDA plugin and runs this file.
Plain `pytest` does not collect it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from support import described_gpu
from support.described_gpu import (
    BF16,
    F32,
    LAYERS,
    MATRIX,
    ROWS,
    WIDTH,
    Shape,
    dense,
    dense_loss,
)  # fmt: skip
from support.hlo import Program

import ringjax
from ringjax.xla import lowering

# -- compiling -------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[Any]:
    """The sharding on a described GPU."""
    ringjax.init()
    mesh = jax.sharding.Mesh(described_gpu.gpus(1), ("x",))
    yield jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    ringjax.shutdown()


@pytest.fixture(params=[False, True], ids=["default", "latency-hiding"])
def compiled(request: pytest.FixtureRequest, device: Any) -> Callable[..., Program]:
    """Compiles a function with each of XLA's schedulers and returns the schedule."""

    def compile(
        f: Any, *args: Any, donate: tuple[int, ...] = (), xla: Any = ()
    ) -> Program:
        args = jax.tree.map(lambda x: Shape(x.shape, x.dtype, sharding=device), args)
        with lowering.without_device():
            lowered = jax.jit(f, donate_argnums=donate).lower(*args)
        program = Program(
            lowered.compile(
                compiler_options={
                    "xla_gpu_enable_latency_hiding_scheduler": request.param,
                    "xla_gpu_autotune_level": 0,  # would measure, on a device
                    **dict(xla),
                }
            ).as_text()
        )
        print(f"\n{request.node.name}, jax {jax.__version__}:\n  {program}")
        return program

    return compile


def training(
    compiled: Callable[..., Program],
    loss: Any,
    params: Any,
    batch: Any,
    donate: bool = True,
    xla: Any = (),
    **options: Any,
) -> Program:
    """Compiles a complete training step with Adam."""
    tx = optax.chain(ringjax.allreduce_grads(**options), optax.adam(1e-3))

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.eval_shape(tx.init, params)
    return compiled(
        step, params, state, batch, donate=(0, 1) if donate else (), xla=xla
    )


# -- checks of every program -----------------------------------------------------------


def check_chain(program: Program) -> None:
    """Checks that calls work in place, in order, and no bucket is read before DONE."""
    calls = program.calls()
    for call in calls:
        *tensors, order = ((i, i) for i in range(len(call.operands)))
        # The first call passes on a sequence number that the caller keeps.
        handed_on = program.origin(call.operands[-1])[0].opcode == "parameter"
        ways = ([*tensors, order], tensors) if handed_on else ([*tensors, order],)
        assert call.aliases in ways, call.rest
        assert "custom_call_has_side_effect=true" in call.rest
        for operand in call.operands[:-1]:
            origin, _ = program.origin(operand)
            assert origin.opcode != "copy", f"{origin.name} is copied for {call.name}"
    for before, call in pairwise(calls):
        order, index = program.origin(call.operands[-1])
        assert (order, index) == (before, len(before.operands) - 1)
    origin, _ = program.origin(calls[0].operands[-1])
    assert origin.opcode in ("parameter", "copy")
    assert origin.bytes == 4
    for start in program.calls("START"):
        *tensors, _ = range(len(start.operands))
        read = [r.kind for i in tensors for r in program.readers(start.name, i)]
        assert read == len(tensors) * [f"DONE{start.bucket}"]
    assert program.count_everywhere() == len(calls), "a call in an inner computation"


def check_overlap(program: Program, buckets: int) -> None:
    """Checks that each bucket starts before the products that later buckets need."""
    check_chain(program)
    sites = range(buckets)
    kinds = [x.kind for x in program.calls()]
    assert kinds == [f"START{i}" for i in sites] + [f"DONE{i}" for i in sites]
    starts = program.calls("START")
    # The last bucket has the first layer's weights, the one before it the bias beside
    # them, and XLA may compute these two in any order.
    for before, after in pairwise(starts[:-1]):
        assert program.heavy_between(before, after) >= 1, str(program)
    # Then nothing is left to do but the update.
    assert not program.heavy_between(starts[-1], program.instructions[-1])


# -- the schedules ---------------------------------------------------------------------


def test_buckets_start_inside_the_backward_pass(compiled: Any) -> None:
    options = {"overlap": True, "bucket_bytes": 2 * MATRIX}
    program = training(compiled, dense_loss, dense(), ROWS, **options)
    check_overlap(program, LAYERS)
    assert not any(x.opcode == "copy" for x in program.instructions)


def test_bfloat16_gradients(compiled: Any) -> None:
    options = {"overlap": True, "bucket_bytes": 2 * MATRIX // 2}
    program = training(compiled, dense_loss, dense(BF16), ROWS, **options)
    check_overlap(program, LAYERS)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_small_batches_overlap_too(compiled: Any, dtype: Any) -> None:
    """A scheduler that only saves memory would compute all gradients at the end."""
    rows = (Shape((64, WIDTH), F32), Shape((64, WIDTH), F32))
    size = 2 * MATRIX * jnp.dtype(dtype).itemsize // 4
    options = {"overlap": True, "bucket_bytes": size}
    program = training(compiled, dense_loss, dense(dtype), rows, **options)
    check_overlap(program, LAYERS)


def test_compression_leaves_the_program_alone(compiled: Any) -> None:
    """The cast is in the kernels that pack: XLA sees float32 only."""
    options = {"overlap": True, "bucket_bytes": 2 * MATRIX}
    plain = training(compiled, dense_loss, dense(), ROWS, **options)
    cast = training(
        compiled, dense_loss, dense(), ROWS, compression=ringjax.Compression.bf16,
        **options,
    )  # fmt: skip
    check_overlap(cast, LAYERS)
    assert str(cast) == str(plain)
    assert "bf16[" not in cast.text


def test_kept_parameters_cost_no_copy(compiled: Any) -> None:
    options = {"overlap": True, "bucket_bytes": 2 * MATRIX, "donate": False}
    program = training(compiled, dense_loss, dense(), ROWS, **options)
    check_overlap(program, LAYERS)
    assert not any(x.opcode == "copy" for x in program.instructions)


def test_without_overlap_one_call_follows_the_backward_pass(compiled: Any) -> None:
    program = training(compiled, dense_loss, dense(), ROWS, overlap=False)
    check_chain(program)
    (call,) = program.calls()
    assert call.kind == "RUN0"
    assert len(call.operands) == 2 * LAYERS + 1
    assert not program.heavy_between(call, program.instructions[-1])


def test_the_head_starts_before_the_layers_of_a_scan(compiled: Any) -> None:
    """The gradients of the layers exist only after the scan, which contains no call."""

    def loss(params: Any, batch: Any) -> Any:
        def layer(x: Any, p: Any) -> Any:
            return jnp.tanh(x @ p["w"] + p["b"]), None

        x, _ = jax.lax.scan(layer, batch[0], params["layers"])
        return jnp.mean((x @ params["head"]["w"] - batch[1]) ** 2)

    layers = {
        "w": Shape((LAYERS, WIDTH, WIDTH), F32),
        "b": Shape((LAYERS, WIDTH), F32),
    }
    params = {"layers": layers, "head": {"w": Shape((WIDTH, WIDTH), F32)}}
    options = {"overlap": True, "bucket_bytes": 2 * MATRIX}
    program = training(compiled, loss, params, ROWS, **options)
    check_chain(program)
    places = [program.place(x.name) for x in program.calls("START")]
    loops = [i for i, x in enumerate(program.instructions) if x.opcode == "while"]
    assert places[0] < loops[-1] < places[1], str(program)


def test_kernels_of_convolutions_are_transposed_before_they_start(
    compiled: Any,
) -> None:
    """cuDNN has another layout. Without a call, the update needs the transposition."""

    def loss(params: Any, x: Any) -> Any:
        for kernel in params:
            numbers = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=numbers
            )
            x = jax.nn.relu(x)
        return jnp.mean(x.astype(F32) ** 2)

    kernels = [Shape((3, 3, 64, 64), BF16)] * 4
    images = Shape((128, 32, 32, 64), BF16)
    options = {"overlap": True, "bucket_bytes": 1 << 16}
    program = training(compiled, loss, kernels, images, **options)
    check_overlap(program, len(kernels))


def test_other_collectives_share_the_order(compiled: Any) -> None:
    """A metric before the gradients and one after them, each with its own token."""
    tx = ringjax.allreduce_grads(overlap=True, bucket_bytes=2 * MATRIX)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(dense_loss)(params, batch)
        value = ringjax.allreduce(value)
        grads, state = tx.update(grads, state)
        return grads, state, value, ringjax.allreduce(grads["layer_0"]["b"].sum())

    state = jax.eval_shape(tx.init, dense())
    program = compiled(step, dense(), state, ROWS)
    kinds = [x.kind for x in program.calls()]
    starts = [f"START{i}" for i in range(LAYERS)]
    dones = [f"DONE{i}" for i in range(LAYERS)]
    assert kinds == ["RUN0", *starts, *dones, "RUN0"]


def test_calls_stay_out_of_cuda_graphs(compiled: Any, tmp_path: Path) -> None:
    """A captured graph would use the communicator of an epoch that has ended."""
    options = {"overlap": True, "bucket_bytes": 2 * MATRIX}
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    training(compiled, dense_loss, dense(), ROWS, xla=dump, **options)
    (found,) = tmp_path.glob("*.thunk_sequence_after_thunk_passes.txt")
    lines = found.read_text().splitlines()
    calls = [line for line in lines if "kCustomCall" in line]
    assert len(calls) == 2 * LAYERS
    # Lines inside a CUDA graph are indented.
    assert not [line for line in calls if line.startswith(" ")]
    assert any("kCommandBuffer" in line for line in lines), "graphs are off"
