"""The trainings of the chaos tests of `ringjax.pieces`, and ways to share their pieces.

In some steps the gradients are so large or so small that the step must be repeated for
the exponents of its sums.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from support import piece_trainings
from support.launch import ROOT
from support.piece_trainings import RandomShares, cross_entropy

import ringjax
from ringjax.pieces import audit
from ringjax.pieces.shares import Shares, even_counts, pieces_of

STEP_MODULE = sys.modules["ringjax.pieces.step"]  # its name is also that of a function
SCALES = {1: 2.0**-14, 5: 2.0**14}  # of the loss, by the number of the step modulo 8


class Model(NamedTuple):
    """A training before its first step, and its data."""

    step: Any
    training: Any
    load: Callable[[int, int], Any]


def scale_of(number: int) -> np.float32:
    return np.float32(SCALES.get(number % 8, 1.0))


class Digits(linen.Module):
    """Two convolutions, dropout and a dense layer for the handwritten digits."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.relu(linen.Conv(8, (3, 3))(x))
        x = linen.relu(linen.Conv(16, (3, 3), strides=2)(x)).reshape(len(x), -1)
        return linen.Dense(10)(linen.Dropout(0.2, deterministic=False)(x))


def digits() -> Model:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = (data.images[..., None] / 16).astype("f4")
    pieces = ringjax.data.Pieces(len(images), batch=48, pieces=12)
    net = Digits()

    def load(number: int, piece: int) -> Any:
        rows = pieces.rows(number, piece)
        return images[rows], data.target[rows].astype("i4"), scale_of(number)

    def loss_of(params: Any, data: Any, key: jax.Array) -> Any:
        images, labels, scale = data
        logits = net.apply(params, images, rngs={"dropout": key})
        accuracy = (logits.argmax(-1) == labels).mean(dtype=jnp.float32)
        return scale * cross_entropy(logits, labels), accuracy

    step = ringjax.pieces.step(loss_of, optax.adam(2e-3), 12, has_aux=True, audit=3)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return Model(step, step.init(net.init(keys, images[:1]), load), load)


def characters() -> Model:
    from pydoc_data.topics import topics

    path = ROOT / "examples" / "jax_char_lm.py"
    spec = importlib.util.spec_from_file_location("jax_char_lm", path)
    assert spec and spec.loader
    example = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    text = "\n".join(topics[name] for name in sorted(topics))[:20_000]
    alphabet = sorted(set(text))
    tokens = np.searchsorted(alphabet, list(text)).astype(np.int32)
    model = example.Transformer(len(alphabet), length=16, width=32, layers=1)

    def load(number: int, piece: int) -> Any:
        rng = np.random.default_rng([number, piece])
        return example.windows(tokens, rng, 2, 16), scale_of(number)

    def loss_of(params: Any, data: Any, key: jax.Array) -> jax.Array:
        windows, scale = data
        return scale * example.bits_per_character(model, params, windows)

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    step = ringjax.pieces.step(loss_of, tx, 8)
    params = model.init(jax.random.key(0), tokens[None, :16])
    return Model(step, step.init(params, load), load)


def _of_support(name: str) -> Callable[[], Model]:
    return lambda: Model(*piece_trainings.TRAININGS[name](), piece_trainings.load)


MODELS: dict[str, Callable[[], Model]] = {
    "digits": digits,  # convolutions, dropout, aux, frequent audits
    "characters": characters,  # a transformer, and clipping
    "nnx": _of_support("nnx"),  # BatchNorm and MultiSteps
    "loop": _of_support("one program"),  # equinox, bfloat16
}


def digest(training: Any) -> str:
    """Returns the SHA-256 of the whole state of a training."""
    return piece_trainings.digest(training)


# -- shares ----------------------------------------------------------------------------


class EvenShares(Shares):
    """Equal shares of all ranks that are present."""

    def update(self, present: Sequence[int], measured: Sequence[int]) -> None:
        self.counts = even_counts(self._pieces, present)


def in_turn(counts: Sequence[int]) -> list[int]:
    """Returns the pieces, those of one place after those of another, dealt in turn.

    Example:
        >>> in_turn([2, 0, 3])
        [0, 2, 1, 3, 4]
    """
    turns = sorted(
        (turn, place) for place, count in enumerate(counts) for turn in range(count)
    )
    return sorted(range(len(turns)), key=lambda piece: turns[piece][1])


def shuffled(counts: Sequence[int]) -> list[int]:
    """Returns the pieces in an order that depends on the counts only."""
    order = list(range(sum(counts)))
    random.Random(str(counts)).shuffle(order)
    return order


# name -> the class of shares, and the order in which places get pieces
SHARES: dict[str, tuple[type[Shares], Callable[[Sequence[int]], list[int]] | None]] = {
    "measured": (Shares, None),  # as users have it
    "blocks": (EvenShares, None),
    "turn": (EvenShares, in_turn),
    "random": (RandomShares, shuffled),
}
_duties = audit.duties


def share_by(name: str) -> None:
    """Lets all steps share their pieces in this way from the next place on."""
    shares, order = SHARES[name]

    def dealt(place: int, counts: Sequence[int]) -> list[int]:
        found = pieces_of(place, counts)
        return [order(counts)[piece] for piece in found] if order else found

    def duties(turn: int, counts: Sequence[int]) -> audit.Duties:
        # The owner of a piece follows from its place in the order of `dealt`.
        found = _duties(turn, counts)
        return found._replace(piece=order(counts)[found.piece]) if order else found

    vars(STEP_MODULE).update(Shares=shares, pieces_of=dealt)
    vars(audit).update(duties=duties)
