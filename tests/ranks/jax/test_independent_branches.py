"""Programs whose calls nothing orders against collectives of XLA's: no thread may wait.

The control shows what becomes of them if one does.
"""

from __future__ import annotations

from support.launch import StartJob
from support.local_devices import environment

TOWERS = """
import hashlib, os, threading, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import ringjax
from ringjax.xla import multi_device

ringjax.init()
multi_device._TARGETS["run"] = os.environ.get("HANDLER", multi_device._TARGETS["run"])
steps, towers, size = int(os.environ["STEPS"]), 8, 48
mesh = jax.make_mesh((4,), ("d",))
tx = [ringjax.allreduce_grads(name=f"tower {i}") for i in range(towers)]

def each(x, states):
    out, after = [], []
    for i in range(towers):
        v = jnp.tanh(x[i] @ x[i])
        u, state = tx[i].update(v, states[i])
        out.append(u.sum() + jax.lax.psum((v * (i + 1)).sum(), "d"))
        after.append(state)
    return jnp.stack(out)[None], after

specs = dict(in_specs=(P(None, "d"), P()), out_specs=(P("d"), P()))
f = jax.jit(jax.shard_map(each, mesh=mesh, check_vma=False, **specs))
x = np.random.default_rng(0).normal(size=(towers, 4 * size, size))
x = jax.device_put(x, NamedSharding(mesh, P(None, "d")))
states = [t.init(None) for t in tx]
done = 0

def watch():
    seen = -1
    while seen < done:
        seen = done
        time.sleep(float(os.environ["PATIENCE"]))  # more than any step takes
    print("no step has ended", flush=True)
    os._exit(3)

f = f.lower(x, states).compile()
threading.Thread(target=watch, daemon=True).start()
for done in range(1, steps + 1):
    out, states = jax.block_until_ready(f(x, states))
same = ringjax.allgather_object(hashlib.sha256(np.asarray(out)).hexdigest())
assert len(set(same)) == 1 and states[0].seq.tolist() == [steps]
"""


def test_they_end_alike_on_all_ranks(start_job: StartJob) -> None:
    told = {"STEPS": "20", "PATIENCE": "30"}
    job = start_job(3, TOWERS, {**environment(4)(), **told})
    assert job.wait(90) == 0, job.logs()


def test_with_a_handler_that_waits_they_do_not(start_job: StartJob) -> None:
    """Each device calls by itself: they wait for each other, or ranks disagree."""
    told = {"STEPS": "1000", "PATIENCE": "5", "HANDLER": "ringjax_run"}
    job = start_job(2, TOWERS, {**environment(4)(), **told})
    assert job.wait(90) != 0
    logs = job.logs()
    assert "no step has ended" in logs or "ranks disagree" in logs, logs
