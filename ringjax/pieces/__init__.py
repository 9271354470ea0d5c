"""Training in pieces: the same bits from any number of ranks, whatever is lost.

The global batch of every step consists of V fixed pieces. Any rank can compute any
piece, and the sums over pieces are exact, so that the parameters do not depend on the
number of ranks, on the shares of the ranks, or on ranks that are lost or join.
"""

from __future__ import annotations

from ringjax.pieces.step import Step, step
from ringjax.pieces.training import Training

__all__ = ["Step", "Training", "step"]
