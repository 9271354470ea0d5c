"""One process of a sum by jax.lax.psum over jax.distributed, without ringjax.

Only results are compared with training.sum_of_normals, not speeds, because two
processes on one GPU take turns. XLA's NCCL needs the same environment as ringjax's.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from benchmarks.gpu import sharing


def main() -> None:
    """Joins the job, sums, and writes some elements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    sharing.prepare(options.rank)
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    jax.distributed.initialize(
        f"127.0.0.1:{options.port}",
        options.size,
        options.rank,
        local_device_ids=[0],
        initialization_timeout=40,
    )
    from benchmarks.gpu.training import NORMALS, normals

    mesh = jax.make_mesh((options.size,), ("ranks",))
    spec = PartitionSpec("ranks")
    local = normals(options.rank)[None]
    everyone = jax.make_array_from_process_local_data(NamedSharding(mesh, spec), local)
    mapped = partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    total = jax.jit(mapped(lambda x: jax.lax.psum(x, "ranks")))(everyone)
    values = np.asarray(total.addressable_shards[0].data)[0, :: NORMALS // 1000]
    options.out.write_text(json.dumps([float(v) for v in values]))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
