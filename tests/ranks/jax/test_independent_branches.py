"""Programs in which nothing orders ringjax's calls against collectives of XLA.

XLA may run both in any order, so a handler that waits in its thread would deadlock. The
control replaces the handler by one that waits.
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

def watchdog():
    seen = -1
    while seen < done:
        seen = done
        time.sleep(float(os.environ["STEP_TIMEOUT"]))
    print("no step has ended", flush=True)
    os._exit(3)

f = f.lower(x, states).compile()
threading.Thread(target=watchdog, daemon=True).start()
for done in range(1, steps + 1):
    out, states = jax.block_until_ready(f(x, states))
digests = ringjax.allgather_object(hashlib.sha256(np.asarray(out)).hexdigest())
assert len(set(digests)) == 1 and states[0].seq.tolist() == [steps]
"""


def test_independent_branches_do_not_deadlock(
    start_job: StartJob,
) -> None:
    settings = {"STEPS": "20", "STEP_TIMEOUT": "30"}
    job = start_job(3, TOWERS, {**environment(4)(), **settings})
    assert job.wait(90) == 0, job.logs()


def test_control_independent_branches_deadlock_if_the_handler_waits(
    start_job: StartJob,
) -> None:
    """Each device calls and waits separately, so devices deadlock or ranks disagree."""
    settings = {"STEPS": "1000", "STEP_TIMEOUT": "5", "HANDLER": "ringjax_run"}
    job = start_job(2, TOWERS, {**environment(4)(), **settings})
    assert job.wait(90) != 0
    logs = job.logs()
    assert "no step has ended" in logs or "ranks disagree" in logs, logs
