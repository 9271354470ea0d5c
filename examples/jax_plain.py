"""Plain JAX and optax, data-parallel: a small network learns to read digits.

Run it with `python jax_plain.py`, or on N ranks with `ringrun -np N python jax_plain.py`.
Lines with (1)-(4) are all that ringjax needs. Further: jax_digits.py, jax_char_lm.py.
"""
import argparse
import jax, jax.numpy as jnp, optax  # noqa: E401
import ringjax
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps
ringjax.init()  # (1)

images, labels = load_digits(return_X_y=True)
share = len(images) // ringjax.size()  # (2) every rank takes its share of the data
mine = slice(ringjax.rank() * share, (ringjax.rank() + 1) * share)
x, y = jnp.asarray(images[mine] / 16), jnp.asarray(labels[mine])

k1, k2 = jax.random.split(jax.random.key(0))
params = {"w1": jax.random.normal(k1, (64, 64)) / 8, "b1": jnp.zeros(64),
          "w2": jax.random.normal(k2, (64, 10)) / 8, "b2": jnp.zeros(10)}  # fmt: skip
params = ringjax.broadcast_parameters(params)  # (3) all ranks start alike
tx = optax.chain(ringjax.allreduce_grads(), optax.adam(1e-2))  # (4) the one line
state = tx.init(params)

def loss_fn(p):
    logits = jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

@jax.jit
def train_step(params, state):
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

for step in range(1, steps + 1):
    params, state, loss = train_step(params, state)
    if step in (1, steps) or step % 50 == 0:
        loss = ringjax.allreduce_metrics(loss)
        if ringjax.rank() == 0: print(f"step {step}: loss {loss:.4f}")  # noqa: E701
