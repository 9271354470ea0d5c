"""The control words of an exchange: the pieces that are in it, the ranks, their times.

They travel beside the accumulator, in the same call, as int32 whose sum over the ranks
says the same to all ranks, even if a rank is lost during the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ringjax.elastic.place import Place
from ringjax.errors import RingjaxError
from ringjax.pieces.training import NAME

Words = np.ndarray[Any, np.dtype[np.int32]]
# The number of words is part of the compiled programs, and must not change when ranks
# join or leave. A job of more places compiles programs of its own.
_MIN_CAPACITY = 64
_VOTES = 16  # words of four checksums


class Control(NamedTuple):
    """Control words, of one rank or summed over all ranks.

    Attributes:
        words: int32[pieces + 16 + 4 * capacity], with the following parts as views.
        done: for each piece, how often it is in the accumulator.
        present: for each place, 1 if its rank takes part.
        microseconds: for each place, the time of one of its pieces; 0 if not known.
        votes: int32[4, 4], checksums of the audited piece; see `audit.py`.
        states: int32[capacity, 2], for each place a hash of its training state.
    """

    words: Words
    done: Words
    present: Words
    microseconds: Words
    votes: Words
    states: Words

    @staticmethod
    def of(words: Words, pieces: int) -> Control:
        """Returns the parts of control words."""
        places = places_in(len(words), pieces)
        done, rest = words[:pieces], words[pieces:]  # np.split takes 17 us
        here, times, rest = rest[:places], rest[places : 2 * places], rest[2 * places :]
        votes, states = rest[:_VOTES].reshape(-1, 4), rest[_VOTES:].reshape(-1, 2)
        return Control(words, done, here, times, votes, states)

    @staticmethod
    def of_rank(pieces: int, place: Place) -> Control:
        """Returns the words of a rank that has computed no piece yet."""
        words = np.zeros(pieces + _VOTES + 4 * capacity(place), np.int32)
        own = Control.of(words, pieces)
        own.present[place.index] = 1
        return own

    def add(self, pieces: Iterable[int]) -> None:
        """Counts pieces that this rank adds."""
        for piece in pieces:
            self.done[piece] += 1

    def vote(self, slot: int, checksum: Any) -> None:
        """Sets the checksum of the audited piece, uint32[4], in a slot of `votes`."""
        self.votes[slot] = np.asarray(checksum).view(np.int32)

    def missing(self, number: int) -> list[int]:
        """Returns the pieces that are in no accumulator, because a rank was lost.

        Raises:
            RingjaxError: a piece was added twice in step `number`.
        """
        done = self.done.tolist()  # numpy takes 30 us for a few numbers
        if twice := [piece for piece, times in enumerate(done) if times > 1]:
            raise RingjaxError(
                f"{NAME}: in step {number}, several ranks have added pieces {twice}; "
                "do all ranks call this step with the same training?"
            )
        return [piece for piece, times in enumerate(done) if times == 0]


def capacity(place: Place) -> int:
    """Returns the number of places for which control words have room."""
    return max(_MIN_CAPACITY, 1 << (place.count - 1).bit_length())


def places_in(words: int, pieces: int) -> int:
    """Returns the number of places for which so many control words have room."""
    return (words - pieces - _VOTES) // 4
