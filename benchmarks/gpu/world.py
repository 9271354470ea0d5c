"""One rank of the correctness check: every collective against numpy on all inputs.

ranks.py starts this program under ringrun, on a GPU that all ranks share or on the CPU,
with the same checks. Every rank can draw the inputs of all ranks, so numpy computes the
expected results. Training is in training.py. The number of calls is small, because on a
GPU each call takes 20 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import sharing

sharing.prepare(int(os.environ.get("RINGJAX_RANK", "0")))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import ringjax  # noqa: E402
from benchmarks.gpu import section, training  # noqa: E402
from ringjax import Average, Compression, Max, Min, Product, Sum, runtime  # noqa: E402

INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
REDUCED = (*INTEGERS, *FLOATS)  # types that NCCL adds up
MOVED = (*REDUCED, "bool", "int16", "uint16", "complex64")
REDUCE: dict[int, Any] = {
    Sum: np.add,
    Min: np.minimum,
    Max: np.maximum,
    Product: np.multiply,
}
# Sizes of every kind: empty, odd, and below and above the default limit of packing.
SHAPES = ((), (1,), (0, 3), (3,), (17, 5), (1001,), (129, 1023), (600_001,))


class World:
    """This rank, with methods that draw inputs and compare results."""

    def __init__(self) -> None:
        self.rank, self.size = ringjax.rank(), ringjax.size()

    def draw(self, shape: Any, dtype: str = "float32", seed: int = 0) -> list[Any]:
        """Draws an array for each rank: small halves and integers with exact sums."""
        out = []
        for rank in range(self.size):
            rng = np.random.default_rng((seed, rank))
            dims = shape(rank) if callable(shape) else shape
            low = 0 if dtype[0] in "ub" and dtype != "bfloat16" else -4
            values: Any = np.asarray(rng.integers(low, 5, dims))
            if dtype in FLOATS or dtype == "complex64":
                values = values / 2
            if dtype == "bool":
                values = values % 2
            out.append(values.astype(jnp.dtype(dtype)))
        return out

    def equal(self, actual: Any, expected: Any, tolerance: float = 0.0) -> None:
        """Compares shape, dtype and values, with an optional tolerance."""
        expected = np.asarray(expected)
        assert actual.shape == expected.shape, (actual.shape, expected.shape)
        assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
        got = np.asarray(actual)
        if tolerance == 0.0:
            np.testing.assert_array_equal(got, expected)
            return
        wide = np.complex128 if np.iscomplexobj(expected) else np.float64
        np.testing.assert_allclose(
            got.astype(wide), expected.astype(wide), rtol=tolerance, atol=tolerance
        )


def oracle(op: int, xs: list[Any]) -> Any:
    """Reduces the arrays of all ranks in numpy."""
    if op == Average:
        total = oracle(Sum, xs)
        mean = total.astype(np.float64) / len(xs)
        return (np.trunc(mean) if total.dtype.kind in "iu" else mean).astype(
            total.dtype
        )
    out = xs[0]
    for x in xs[1:]:
        out = np.asarray(REDUCE[op](out, x)).astype(out.dtype)
    return out


# -- the cases -------------------------------------------------------------------------


def reduce_every_dtype(w: World, op: int, dtypes: tuple[str, ...] = REDUCED) -> None:
    """Reduces all dtypes as one tree, eagerly and in jit."""
    xs = {d: w.draw((5, 7), d) for d in dtypes}
    mine = {d: x[w.rank] for d, x in xs.items()}
    for f in (ringjax.allreduce, jax.jit(ringjax.allreduce, static_argnums=1)):
        for dtype, out in f(mine, op).items():
            exact = op != Average or dtype in INTEGERS
            near = 0.0 if exact else 1e-2 if dtype[-2:] == "16" else 1e-6
            w.equal(out, oracle(op, xs[dtype]), near)


def sizes(w: World) -> None:
    """Reduces odd and large sizes in one call, and again with donated memory."""
    xs = [w.draw(shape, seed=i) for i, shape in enumerate(SHAPES)]
    f = jax.jit(lambda tree: ringjax.allreduce(tree, Sum), donate_argnums=0)
    for _ in range(2):
        out = f([jnp.asarray(x[w.rank]) for x in xs])
        for got, stack in zip(out, xs, strict=True):
            w.equal(got, oracle(Sum, stack))


def scaling(w: World) -> None:
    """Checks factors before and after, alone and in a tree of many sizes."""
    xs = [w.draw((33,), seed=1), w.draw((400_003,), seed=2)]
    out = ringjax.allreduce(
        [x[w.rank] for x in xs], Sum, prescale_factor=0.5, postscale_factor=3.0
    )
    for got, stack in zip(out, xs, strict=True):
        w.equal(got, 1.5 * oracle(Sum, stack), 1e-6)


def compression(w: World) -> None:
    """Checks compression to half the bytes. Other dtypes must not change."""
    xs, ns = w.draw((100_003,)), w.draw((9,), "int32")
    for wire in (Compression.fp16, Compression.bf16):
        out = ringjax.allreduce([xs[w.rank], ns[w.rank]], Sum, compression=wire)
        w.equal(out[0], oracle(Sum, xs), 2e-2)
        w.equal(out[1], oracle(Sum, ns))


def broadcast(w: World) -> None:
    xs = {d: w.draw((3, 5), d) for d in MOVED}
    root = w.size - 1
    out = ringjax.broadcast({d: x[w.rank] for d, x in xs.items()}, root)
    for dtype, got in out.items():
        w.equal(got, xs[dtype][root])


def allgather(w: World) -> None:
    xs = {d: w.draw(lambda r: (2 * r + 1, 3), d) for d in MOVED}
    out = ringjax.allgather({d: x[w.rank] for d, x in xs.items()})
    for dtype, got in out.items():
        w.equal(got, np.concatenate(xs[dtype]))
    same = w.draw((70_001,))
    w.equal(jax.jit(ringjax.allgather)(same[w.rank]), np.concatenate(same))


def reducescatter(w: World) -> None:
    bounds = np.cumsum([0, *(7 // w.size + (r < 7 % w.size) for r in range(w.size))])
    mine = slice(bounds[w.rank], bounds[w.rank + 1])
    xs = {d: w.draw((7, 3), d) for d in REDUCED}
    out = ringjax.reducescatter({d: x[w.rank] for d, x in xs.items()}, Sum)
    for dtype, got in out.items():
        w.equal(got, oracle(Sum, xs[dtype])[mine])
    large = w.draw((w.size * 30_001,))
    rows = slice(w.rank * 30_001, (w.rank + 1) * 30_001)
    mean = jax.jit(ringjax.reducescatter)(large[w.rank])
    w.equal(mean, oracle(Average, large)[rows], 1e-6)


def alltoall(w: World) -> None:
    """Checks equal parts of every dtype, and uneven parts."""
    xs = {d: w.draw((2 * w.size, 3), d) for d in MOVED}
    out = ringjax.alltoall({d: x[w.rank] for d, x in xs.items()})
    part = slice(2 * w.rank, 2 * w.rank + 2)
    for dtype, got in out.items():
        w.equal(got, np.concatenate([x[part] for x in xs[dtype]]))
    table = np.random.default_rng(4).integers(0, 4, (w.size, w.size))
    ys = w.draw(lambda r: (int(table[r].sum()), 2), "float64", 1)
    got, received = ringjax.alltoall(ys[w.rank], splits=table[w.rank])
    starts = np.concatenate([np.zeros((w.size, 1), int), table.cumsum(1)], axis=1)
    parts = [y[starts[s, w.rank] : starts[s, w.rank + 1]] for s, y in enumerate(ys)]
    w.equal(got, np.concatenate(parts))
    w.equal(received, table[:, w.rank].astype(np.int32))


def barrier(w: World) -> None:
    """Checks that no rank leaves a barrier before the last rank has entered."""
    time.sleep(0.3 if w.rank == w.size - 1 else 0.0)
    started = time.monotonic()
    ringjax.barrier()
    if w.rank == 0:
        waited = time.monotonic() - started
        assert waited > 0.1, f"rank 0 waited {waited:.3f} s for a rank 0.3 s late"


def process_sets(w: World) -> None:
    """Checks a set of some ranks, in addition to the world."""
    ends = ringjax.add_process_set(sorted({0, w.size - 1}))
    alone = ringjax.add_process_set([w.size - 1])
    xs = w.draw((1003,))
    for chosen in (ends, alone):
        if chosen.included():
            stack = [xs[r] for r in chosen.ranks]
            out = ringjax.allreduce(xs[w.rank], Sum, process_set=chosen)
            w.equal(out, oracle(Sum, stack))
    w.equal(ringjax.allreduce(xs[w.rank], Sum), oracle(Sum, xs))
    assert ringjax.remove_process_set(alone)
    if w.size > 2:  # a set of two ranks would be the world
        assert ringjax.remove_process_set(ends)


def transforms(w: World) -> None:
    """Checks jit, grad, vmap and scan around an allreduce."""
    xs = w.draw((3, 4), "float64", 7)
    x = jnp.asarray(xs[w.rank])
    batched = jax.jit(jax.vmap(lambda v: ringjax.allreduce(v, Sum)))(x)
    w.equal(batched, oracle(Sum, xs))

    def loss(v: Any) -> Any:
        return jnp.sum(ringjax.allreduce(v * v, Sum)) * (w.rank + 1)

    weight = sum(r + 1 for r in range(w.size))
    w.equal(jax.jit(jax.grad(loss))(x), 2 * xs[w.rank] * weight, 1e-12)

    @jax.jit
    def scanned(v: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            carry = ringjax.allreduce(carry, Average) + 1
            return carry, carry.sum()

        return jax.lax.scan(body, v, None, length=4)

    out, sums = scanned(x)
    mean = oracle(Average, xs)
    w.equal(out, mean + 4, 1e-12)
    w.equal(sums, np.array([(mean + k).sum() for k in range(1, 5)]), 1e-12)


def disagreement(w: World) -> None:
    """Checks that all ranks get an error soon if shapes differ.

    A device call only enqueues, so a later call may raise the error, but no earlier
    call may return a result. The host must not use wrong sizes: the sizes of an eager
    allgather are exchanged as eight bytes, which fit eight bytes of another call, as on
    more than two ranks here.
    """
    if w.size > 2:
        try:
            if w.rank == 0:
                np.asarray(ringjax.allreduce(np.ones(2, np.float32), name="apart"))
                ringjax.barrier(name="apart")
            else:
                ringjax.allgather(np.ones((2, 2), np.float32), name="apart")
        except Exception as error:
            assert "apart" in str(error), error
            return
        raise AssertionError("no error on this rank")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            mine = np.ones(3 + (w.rank == 0), np.float32)
            out = np.asarray(ringjax.allreduce(mine, name="apart"))
        except Exception as error:
            assert "apart" in str(error), error
            return
        assert np.isnan(out).all(), f"a result of calls that do not match: {out}"
        time.sleep(0.1)
    raise AssertionError("no error on this rank")


CASES: dict[str, Callable[[World], Any]] = {
    "allreduce Sum, every dtype": lambda w: reduce_every_dtype(w, Sum),
    "allreduce Average of floats": lambda w: reduce_every_dtype(w, Average, FLOATS),
    "allreduce Average of integers": lambda w: reduce_every_dtype(w, Average, INTEGERS),
    "allreduce Min": lambda w: reduce_every_dtype(w, Min),
    "allreduce Max": lambda w: reduce_every_dtype(w, Max),
    "allreduce Product": lambda w: reduce_every_dtype(w, Product),
    "odd and large sizes, donated": sizes,
    "prescale and postscale": scaling,
    "compression fp16, bf16": compression,
    "broadcast": broadcast,
    "allgather, uneven": allgather,
    "reducescatter, uneven": reducescatter,
    "alltoall, uneven": alltoall,
    "barrier": barrier,
    "process sets": process_sets,
    "jit, grad, vmap, scan": transforms,
    "training in place": lambda w: training.train(False),
    "training overlapped": lambda w: training.train(True),
    "training compressed": lambda w: training.train(True, Compression.bf16),
    "sum beside psum": lambda w: training.sum_of_normals(w.rank),
    # This case is the last, because it ends the communicator of the device.
    "ranks that disagree": disagreement,
}
# With four ranks every call takes twice as long, so omit cases that two ranks check.
FEWER = [name for name in CASES if name not in {
    "allreduce Average of integers", "allreduce Min", "allreduce Max",
    "allreduce Product", "training in place", "training compressed", "sum beside psum",
}]  # fmt: skip
TRAINING = [name for name in CASES if name.startswith("training")]


def meet(ok: bool) -> bool:
    """Returns whether all ranks succeeded; uses the host's transports."""
    from ringjax import _native

    mine, all_of = np.array([ok], np.int32), np.zeros(1, np.int32)
    op, least = _native.COLLECTIVES["allreduce"], _native.REDUCE_OPS["Min"]
    runtime.communicator().execute(op, least, [mine], [all_of], name="gpu_world")
    return bool(all_of[0])


def main() -> None:
    """Runs the cases; writes a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--training", action="store_true", help="nothing else")
    parser.add_argument("--fewer", action="store_true", help="what may depend on size")
    options = parser.parse_args()
    ringjax.init()
    world, failed = World(), False
    with (options.folder / f"rank.{world.rank}").open("w") as file:
        for name in TRAINING if options.training else FEWER if options.fewer else CASES:
            started, detail, error = time.monotonic(), None, ""
            try:
                detail = CASES[name](world)
            except Exception as caught:
                traceback.print_exc()
                error = f"{type(caught).__name__}: {caught}"
                failed = True
            seconds = time.monotonic() - started
            line = {"case": name, "error": error, "seconds": seconds, "detail": detail}
            print(json.dumps(line), file=file, flush=True)
            meet(not error)
        used = "nccl" if section.device_communicator() is not None else "host"
        where = jax.default_backend()
        print(json.dumps({"transport": used, "platform": where}), file=file)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
