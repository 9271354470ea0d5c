"""A small transformer learns to write the manual of Python, character by character.

    python jax_char_lm.py                    one rank
    ringrun -np 2 python jax_char_lm.py      two ranks, the same global batch

The text is `pydoc_data.topics`, the topics of Python's `help()`. It has about 460,000
characters and is part of every Python. Needs flax:
``pip install "ringjax[examples]"``.

To go further: ``--steps 3000 --width 192 --layers 4`` writes much better and takes some
minutes, ``--batch 128`` feeds more ranks, ``--text FILE`` learns any text.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import ringjax


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=24, help="sequences of all ranks")
    parser.add_argument("--length", type=int, default=64, help="characters it looks at")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--sample", type=int, default=240, help="characters to write")
    parser.add_argument("--text", type=Path, help="a text file instead of the manual")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_text(path: Path | None) -> str:
    """Reads the text on rank 0 and broadcasts it, because Python versions differ."""
    text = None
    if ringjax.rank() == 0:
        if path is not None:
            text = path.read_text(errors="replace")
        else:
            from pydoc_data.topics import topics

            text = "\n\n".join(topics[name] for name in sorted(topics))
    return ringjax.broadcast_object(text)


class Block(nn.Module):
    """A layer: attention to earlier characters, then a network for each position."""

    heads: int = 4

    @nn.compact
    def __call__(self, x):
        """Applies the layer to activations [..., length, width]."""
        length, width = x.shape[-2:]
        mask = nn.make_causal_mask(jnp.ones(length))
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads)(y, y, mask=mask)
        y = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))
        return x + nn.Dense(width)(y)


class Transformer(nn.Module):
    """Predicts, for each character of a text, the character that follows."""

    letters: int
    length: int
    width: int
    layers: int

    @nn.compact
    def __call__(self, tokens):
        """Returns the logits of the next character at every position."""
        positions = nn.Embed(self.length, self.width)(jnp.arange(tokens.shape[-1]))
        x = nn.Embed(self.letters, self.width)(tokens) + positions
        for _ in range(self.layers):
            x = Block()(x)
        return nn.Dense(self.letters)(nn.LayerNorm()(x))


def bits_per_character(model, params, windows):
    """Returns the mean loss, in bits, of predicting characters from earlier ones."""
    logits = model.apply(params, windows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return losses.mean() / math.log(2)


def windows(tokens: np.ndarray, rng: np.random.Generator, count: int, length: int):
    starts = rng.integers(0, len(tokens) - length - 1, count)
    return tokens[starts[:, None] + np.arange(length + 1)]


def write(model, params, tokens: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Continues `tokens` by `count` characters."""

    @jax.jit
    def next_token(window, key):
        logits = model.apply(params, window[None])[0, -1]
        return jax.random.categorical(key, logits / 0.7)

    written = list(tokens)
    for key in jax.random.split(jax.random.key(seed), count):
        written.append(int(next_token(np.array(written[-model.length :]), key)))
    return np.array(written[len(tokens) :])


def make_step(model, tx):
    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(
            lambda p: bits_per_character(model, p, batch) * math.log(2)
        )(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss / math.log(2)

    return step


def main() -> None:
    arguments = parse_arguments()
    ringjax.init()
    rank, size = ringjax.rank(), ringjax.size()
    text = load_text(arguments.text)
    alphabet = sorted(set(text))
    tokens = np.searchsorted(alphabet, list(text)).astype(np.int32)
    train, test = np.split(tokens, [len(tokens) * 9 // 10])

    model = Transformer(
        len(alphabet), arguments.length, arguments.width, arguments.layers
    )
    params = model.init(jax.random.key(arguments.seed), tokens[None, : model.length])
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, arguments.learning_rate, arguments.steps // 20, arguments.steps
    )
    tx = optax.chain(
        ringjax.allreduce_grads(),
        # Clip after averaging, because clipping is not linear.
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule),
    )
    params = ringjax.broadcast_parameters(params)
    state, step = tx.init(params), make_step(model, tx)
    test_step = jax.jit(lambda p, batch: bits_per_character(model, p, batch))
    share = max(arguments.batch // size, 1)
    if rank == 0:
        count = sum(x.size for x in jax.tree.leaves(params))
        print(
            f"{size} rank(s), {share * size} sequences of {model.length} characters a "
            f"step, {count:,} parameters, {len(text):,} characters of text"
        )

    # All ranks draw equal windows, and each rank trains on its share of them.
    rng, started = np.random.default_rng(arguments.seed), time.perf_counter()
    for number in range(1, arguments.steps + 1):
        batch = windows(train, rng, share * size, model.length)
        params, state, loss = step(params, state, batch[rank::size])
        if number == 1 or number % 50 == 0 or number == arguments.steps:
            unseen = windows(test, np.random.default_rng(0), 16 * size, model.length)
            shown = ringjax.allreduce_metrics(
                {"train": loss, "test": test_step(params, unseen[rank::size])}
            )
            if rank == 0:
                speed = number * share * size * model.length
                speed /= time.perf_counter() - started
                print(
                    f"step {number:5}: train {shown['train']:.3f}  test "
                    f"{shown['test']:.3f} bits/char  {speed:,.0f} characters/s",
                    flush=True,
                )
    if rank == 0:
        start = test[: model.length]
        written = write(model, params, start, arguments.sample, arguments.seed)
        print("it continues the manual:")
        print("".join(alphabet[i] for i in (*start, *written)))


if __name__ == "__main__":
    main()
