"""Several GPUs in a process: two ranks that each shard a model over several GPUs.

With four GPUs or more, the ranks have different GPUs. With two or three GPUs both ranks
have the same GPUs, as in ranks.py. With one GPU the section only says that it needs
more. Parameters must be equal to a training on one device with the data of both ranks,
bit for bit on all ranks and on all devices with equal shards. Times have no meaning.

With --rank-in FOLDER the program is one of these ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu import driver, sharing
from benchmarks.gpu.ranks import finish
from benchmarks.gpu.report import Report
from benchmarks.gpu.section import attempt, section

RANKS, STEPS, ROWS, WIDTH = 2, 10, 16, 256
LIMIT = 90.0  # time limit of the job in seconds
CLOSE = 1e-4  # largest error, relative to the largest parameter, in float32
# The placements of parameters on the devices of a rank.
CASES = {"cut over rows": True, "alike on all devices": False}


def visible(count: int, rank: int) -> str:
    """Returns the devices of a rank, if there are `count` devices.

    Example:
        >>> visible(8, 1), visible(3, 1)
        ('4,5,6,7', '0,1')
    """
    each = count // RANKS if count >= 2 * RANKS else 2
    first = rank * each if count >= 2 * RANKS else 0
    return ",".join(str(n) for n in range(first, first + each))


# -- one rank --------------------------------------------------------------------------


def parameters() -> dict[str, Any]:
    """Returns matrices, vectors, a number, and sizes that cannot be divided evenly."""
    import numpy as np

    rng = np.random.default_rng(0)
    shapes = {"in": (WIDTH, WIDTH), "bias": (WIDTH,), "out": (WIDTH, 8), "odd": (3, 5)}
    drawn = {name: rng.normal(size=s) / WIDTH**0.5 for name, s in shapes.items()}
    return {k: v.astype(np.float32) for k, v in drawn.items()} | {
        "scale": np.float32(1)
    }


def batch(rank: int, step: int) -> Any:
    """Returns the rows of a rank in a step."""
    import numpy as np

    rng = np.random.default_rng([rank, step])
    return rng.normal(size=(ROWS, WIDTH)).astype(np.float32)


def trained(transform: Any, params: Any, rows: Any) -> Any:
    """Returns the parameters after some steps; `rows` makes the batch of a step."""
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.chain(transform, optax.sgd(0.05, 0.9))

    def loss(p: Mapping[str, Any], x: Any) -> Any:
        hidden = jnp.tanh(x @ p["in"] + p["bias"]) @ p["out"]
        return (jnp.sin(hidden) * p["scale"]).mean() + (p["odd"] ** 2).sum()

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for number in range(STEPS):
        params, state = jax.block_until_ready(step(params, state, rows(number)))
    return params


def case(cut: bool) -> dict[str, Any]:
    """Trains on all devices, and on one device with the data of all ranks."""
    import jax
    import numpy as np
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    import ringjax

    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("d",))  # Auto axes
    rows = NamedSharding(mesh, PartitionSpec("d"))
    whole = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> Any:
        divides = np.ndim(x) and len(x) % mesh.size == 0
        return jax.device_put(x, rows if cut and divides else whole)

    def mine(step: int) -> Any:
        return jax.device_put(batch(ringjax.rank(), step), rows)

    def everybody(step: int) -> Any:
        return np.concatenate([batch(rank, step) for rank in range(ringjax.size())])

    got = trained(ringjax.allreduce_grads(), jax.tree.map(place, parameters()), mine)
    want = trained(optax.identity(), parameters(), everybody)
    worst, digest, same = 0.0, hashlib.sha256(), True
    for key in sorted(want):
        ours, theirs = np.asarray(got[key]), np.asarray(want[key])
        worst = max(worst, float(abs(ours - theirs).max() / abs(theirs).max()))
        digest.update(ours.tobytes())
        seen: dict[str, bytes] = {}
        for shard in got[key].addressable_shards:
            data = np.asarray(shard.data).tobytes()
            same &= seen.setdefault(str(shard.index), data) == data
    return {"worst": worst, "digest": digest.hexdigest(), "same": same}


def run_rank(folder: Path, count: int) -> None:
    rank = int(os.environ["RINGJAX_RANK"])
    sharing.prepare(rank, visible(count, rank) if count else None)
    import jax

    import ringjax

    if not count:  # this is a dry run
        jax.config.update("jax_num_cpu_devices", 2)
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    ringjax.init()
    said: dict[str, Any] = {name: case(cut) for name, cut in CASES.items()}
    said["devices"] = jax.local_device_count()
    (folder / f"rank.{rank}").write_text(json.dumps(said))
    ringjax.shutdown()


# -- the section -----------------------------------------------------------------------


def job(folder: Path, count: int) -> list[dict[str, Any]]:
    """Runs the ranks; returns their results."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rank = ["-m", "benchmarks.gpu.several", "--rank-in", str(folder)]
    words = ["-m", "ringjax.run", "-np", str(RANKS), "--devices-per-rank", "all"]
    words += [sys.executable, "-P", *rank, "--count", str(count)]
    finish([words], os.environ, folder / "log", LIMIT)
    return [json.loads((folder / f"rank.{rank}").read_text()) for rank in range(RANKS)]


def tabulate(report: Report, said: list[dict[str, Any]], seconds: float) -> None:
    devices = said[0]["devices"]
    report.table(f"{RANKS} ranks with {devices} devices each", "parameters", "result")
    for name in CASES:
        lines = [rank[name] for rank in said]
        worst = max(line["worst"] for line in lines)
        alike = len({line["digest"] for line in lines}) == 1
        alike &= all(line["same"] for line in lines)
        bits = "the same bits everywhere" if alike else "OTHER BITS"
        text = f"largest difference to one device {worst:.1e}, {bits}"
        report.row(name, text if worst <= CLOSE else f"WRONG: {text}")
        if worst > CLOSE or not alike:
            report.fail(f"{name}: {text}")
    report.note(f"{seconds:.0f} s for all of it; no measure of anything")


def main() -> None:
    """Runs the job if there are enough GPUs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rank-in", type=Path)
    parser.add_argument("--count", type=int, default=0)
    options = parser.parse_args()
    if options.rank_in:
        return run_rank(options.rank_in, options.count)
    with section() as report:
        count = 0 if options.cpu else driver.count_devices()[0]
        if count == 1:
            report.table("Several GPUs a process", "what", "result")
            report.row("2 ranks with several GPUs each", "not run: there is one GPU")
            return None
        started = time.monotonic()
        said = attempt(report, "several GPUs a process", job, options.work, count)
        if said:
            tabulate(report, said, time.monotonic() - started)
    return None


if __name__ == "__main__":
    main()
