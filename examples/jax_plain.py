"""Plain JAX and optax, data-parallel: a small network learns to read digits.

`python jax_plain.py`, or `ringrun -np N python jax_plain.py`. Further: jax_digits.py.
"""

import argparse

import jax
import optax
from sklearn.datasets import load_digits

import ringjax

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps
ringjax.init()  # ringjax needs three changes: 1. connect to the other ranks,
share = 1797 // ringjax.size()  # 2. use only this rank's share of the images,
x, y = (v[ringjax.rank() * share :][:share] for v in load_digits(return_X_y=True))
params = [jax.random.normal(jax.random.key(n), (64, n)) / 8 for n in (64, 10)]
tx = optax.chain(ringjax.allreduce_grads(), optax.adam(1e-2))  # 3. average gradients
state = tx.init(params)


@jax.jit
def train_step(params, state):
    def loss_fn(p):
        logits = jax.nn.relu(x / 16 @ p[0]) @ p[1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, state = tx.update(grads, state)
    return optax.apply_updates(params, updates), state, loss


for step in range(1, steps + 1):
    params, state, loss = train_step(params, state)
    if step % 20 == 0 and ringjax.rank() == 0:
        print(f"step {step}: loss {loss:.4f} on the images of rank 0")
