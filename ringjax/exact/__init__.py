"""Sums of gradients that have the same bits in any order and on any number of ranks."""

from ringjax.exact.accumulator import Accumulator as Accumulator
from ringjax.exact.sums import Sums as Sums
