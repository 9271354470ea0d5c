"""Sums of gradients that have the same bits in any order and on any number of ranks.

A step's global batch has a fixed number of pieces. The gradients of a piece are rounded
once, to a multiple of a unit that all ranks agree on, and are added as integers. So the
sum depends neither on the order of the pieces, nor on the ranks that compute them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ringjax.collectives.allreduce import allreduce
from ringjax.collectives.exchange import exchange
from ringjax.exact import fixed_point, native_add
from ringjax.exact.accumulator import Accumulator, Layout, check_layout, flatten
from ringjax.ops import ReduceOp

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import PyTree

MOST_PIECES = 65_536
_INFINITY = 0x7F800000  # the bits of a float32
# A leaf whose example is zeros starts with this exponent. Its first gradients may have
# magnitudes from 2^-24 to 2 for 2,048 pieces; others make exchange repeat the step.
_ZERO_EXPONENT = -8


@dataclass(frozen=True)
class Sums:
    """Sums of the gradients of `pieces` pieces, with the same bits in any order.

    The four methods work inside and outside of jit. An exponent is the floor(log2) of
    the largest magnitude of a leaf in the last step. Values below 2^9 times this power
    of two fit; `exchange` says whether the step has to be repeated with larger or
    smaller exponents, because values did not fit, or had too few bits. The exponents
    belong to the state of the training: keep them in checkpoints.

    Args:
        pieces: the number of pieces of a step on all ranks together, 1 … 65,536.

    Example:
        >>> import jax.numpy as jnp, ringjax
        >>> ringjax.init()
        >>> sums = ringjax.exact.Sums(pieces=2)
        >>> gradients = {"w": jnp.array([1.0, 2.0]), "b": jnp.array(0.5)}
        >>> exponents = sums.exponents(gradients)
        >>> total = sums.zeros(gradients)
        >>> for _ in range(2):
        ...     total = sums.add(total, gradients, exponents)
        >>> mean, exponents, again, _ = sums.exchange(total, exponents)
        >>> mean["w"].tolist(), bool(again)
        ([1.0, 2.0], False)
    """

    pieces: int

    def __post_init__(self) -> None:
        if not 1 <= self.pieces <= MOST_PIECES:
            raise ValueError(
                f"ringjax.exact.Sums: `pieces` is {self.pieces}, expected 1 … "
                f"{MOST_PIECES:,}, the pieces of all ranks together"
            )

    @property
    def _lowest(self) -> int:
        """The lowest exponent; leaves of smaller values use it, too."""
        return fixed_point.LOWEST_UNIT - (
            1 + fixed_point.MARGIN - fixed_point.width(self.pieces)
        )

    def exponents(self, tree: PyTree) -> Array:
        """Returns int32[leaves], the exponents of example gradients."""
        leaves, _ = flatten("exponents", tree)
        all_bits = [fixed_point.magnitude(jnp.asarray(leaf)) for leaf in leaves]
        finite = [jnp.where(bits < _INFINITY, bits, 0) for bits in all_bits]
        tops = _stack([jnp.max(bits, initial=0) for bits in finite], jnp.int32)
        return self._next(tops, jnp.full(tops.shape, _ZERO_EXPONENT, jnp.int32))

    def zeros(self, tree: PyTree) -> Accumulator:
        """Returns the sum of no piece, for gradients like `tree`: arrays or shapes."""
        _, layout = flatten("zeros", tree)
        count = len(layout.shapes)
        return Accumulator(
            words=jnp.zeros((layout.bounds[-1], 2), jnp.uint32),
            counts=jnp.zeros((count, 2), jnp.int32),
            top=jnp.zeros(count, jnp.float32),
            checksum=jnp.zeros(4, jnp.uint32),
            added=jnp.zeros((), jnp.int32),
            layout=layout,
        )

    def add(self, total: Accumulator, tree: PyTree, exponents: Array) -> Accumulator:
        """Adds the gradients of one piece, in any dtype of floats.

        Values that do not fit are left out and counted. The exponents must be equal for
        all pieces of a step.

        Raises:
            TypeError: a leaf has no dtype of floats.
            ValueError: `tree` differs from that of `zeros` in its structure or shapes,
                or `exponents` are those of another tree.
        """
        leaves, layout = flatten("add", tree)
        check_layout(layout, total.layout)
        exponents = jnp.asarray(exponents, jnp.int32)
        if exponents.shape != (len(leaves),):
            raise ValueError(
                "ringjax.exact.Sums.add: `exponents` have the shape "
                f"{exponents.shape}, expected ({len(leaves)},), one for each leaf of "
                "`tree`; begin with those of Sums.exponents(tree)"
            )
        if not leaves:
            return total
        words, counts, top, checksum = native_add.add_leaves(
            (total.words, total.counts, total.top, total.checksum),
            fixed_point.units(exponents, self.pieces),
            [_as_known(leaf) for leaf in leaves],
            fixed_point.width(self.pieces),
        )
        return Accumulator(words, counts, top, checksum, total.added + 1, layout)

    def exchange(
        self, total: Accumulator, exponents: Array, extra: Array | None = None
    ) -> tuple[PyTree, Array, Array, Array]:
        """Adds the sums of all ranks: a collective.

        Args:
            total: the pieces that this rank has added. Zero pieces are right, too.
            exponents: the exponents that `add` has used.
            extra: int32[k], integers to be added over the ranks on the way.

        Returns:
            The mean over the pieces, a tree of float32. A leaf is NaN if a value of it
            was not finite, and all leaves are if the ranks have not added `pieces`
            pieces together. Then the exponents of the next step; a bool, True on all
            ranks if this step has to be repeated with these exponents; and the sums of
            `extra`.
        """
        extra = jnp.zeros(0, jnp.int32) if extra is None else extra
        finite = total.counts[:, 1] == 0
        bits = jnp.where(finite, fixed_point.magnitude(total.top), _INFINITY)
        units = fixed_point.units(exponents, self.pieces)
        native = jax.default_backend() == "cpu" and jax.local_device_count() == 1
        run = self._native if native else self._portable
        means, bits, added, extra = run(total, units, bits, extra)
        next_exponents = self._next(bits, exponents)
        right = (bits < _INFINITY) & (added == self.pieces)
        mean = jax.tree.unflatten(
            total.layout.treedef,
            [
                jnp.where(right[i], means[begin:end], jnp.nan).reshape(shape)
                for i, (begin, end, shape) in enumerate(_leaves(total.layout))
            ],
        )
        return mean, next_exponents, self._misses(exponents, next_exponents), extra

    def _native(
        self, total: Accumulator, units: Array, bits: Array, extra: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Returns the means, largest bits, numbers of pieces, and extra of all ranks.

        One call of the native core, which sends the means as float32, and repeats the
        exchange if the checksums do not fit.
        """
        means, numbers, bits, _, _ = exchange(
            total.words,
            jnp.concatenate([total.added[None], extra]),
            bits,
            units,
            total.checksum,
            sizes=[end - begin for begin, end, _ in _leaves(total.layout)],
            pieces=self.pieces,
            name="exact.exchange",
        )
        return means, bits, numbers[0], numbers[1:]

    def _portable(
        self, total: Accumulator, units: Array, bits: Array, extra: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Does the same by two allreduces, on any device, without checksums."""
        # The largest come first: a rank that is lost later has told its own already,
        # which are those of pieces that the survivors will add.
        bits = _allreduce(bits, ReduceOp.Max)
        with jax.enable_x64(True):
            sums, added, extra = _allreduce(
                (fixed_point.integers(total.words), total.added, extra), ReduceOp.Sum
            )
        means = [
            fixed_point.decode(sums[begin:end], units[i], self.pieces)
            for i, (begin, end, _) in enumerate(_leaves(total.layout))
        ]
        return jnp.concatenate([*means, jnp.zeros(0, "f4")]), bits, added, extra

    def _next(self, bits: Array, exponents: Array) -> Array:
        """Returns the exponents of leaves with these largest magnitudes.

        A leaf of zeros and a leaf with values that are not finite keep theirs.
        """
        found = jnp.maximum(fixed_point.exponent(bits), self._lowest)
        return jnp.where((bits > 0) & (bits < _INFINITY), found, exponents)

    def _misses(self, exponents: Array, found: Array) -> Array:
        """Returns True if a leaf needs an exponent that differs too much from its own.

        Values are too large above the margin. Below, at least 25 bits of the largest
        magnitude of a leaf are left. With the exponents `found`, both are right.
        """
        most = fixed_point.width(self.pieces) - fixed_point.MARGIN - 26
        return jnp.any(
            (found > exponents + fixed_point.MARGIN) | (found < exponents - most)
        )


def _leaves(layout: Layout) -> list[tuple[int, int, tuple[int, ...]]]:
    """Returns the bounds in the flat array, and the shape, of each leaf."""
    pairs = itertools.pairwise(layout.bounds)
    return [(*pair, shape) for pair, shape in zip(pairs, layout.shapes, strict=True)]


def _allreduce(tree: PyTree, op: ReduceOp) -> PyTree:
    return allreduce(tree, op, name="exact.exchange")


def _as_known(leaf: Any) -> Array:
    """Returns floats of 8 or fewer bits as bfloat16, which holds all their values."""
    array: Array = jnp.asarray(leaf)
    known = ("float16", "bfloat16", "float32", "float64")
    return array if array.dtype.name in known else array.astype(jnp.bfloat16)


def _stack(values: list[Array], dtype: Any) -> Array:
    return jnp.stack(values) if values else jnp.zeros(0, dtype)
