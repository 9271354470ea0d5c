"""The ranks that audit a piece, and the rank at fault if their votes differ."""

from __future__ import annotations

from collections import defaultdict

import pytest

from ringjax.elastic.place import Place
from ringjax.pieces.audit import Audit, duties, outvoted
from ringjax.pieces.shares import pieces_of


@pytest.mark.parametrize("counts", [[3, 3], [2, 2, 2], [5, 0, 1], [1] * 7, [0, 0, 4]])
def test_every_piece_is_audited_by_every_other_place(counts: list[int]) -> None:
    pieces, auditors = sum(counts), defaultdict(set)
    for turn in range(pieces * len(counts)):
        piece, (owner, auditor), referees = duties(turn, counts)
        assert piece in pieces_of(owner, counts)
        assert auditor != owner
        third = set(referees) - {owner, auditor}
        assert third or set(referees) == {owner, auditor}
        auditors[piece].add(auditor)
    for piece in range(pieces):
        [owner] = [p for p in range(len(counts)) if piece in pieces_of(p, counts)]
        # Places without pieces are asked only if there is no other.
        others = {place for place, count in enumerate(counts) if count} - {owner}
        others = others or set(range(len(counts))) - {owner}
        assert auditors[piece] == others


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ("a b b", {0}),
        ("a b a", {1}),
        ("a b c", None),
        ("a b b b", {0}),  # of two ranks, the owner has erred once
        ("a b a a", {1}),
        ("a b a b", None),  # both repeat what they have computed before
        ("a b c d", None),
    ],
)
def test_more_than_half_of_the_votes_decide(
    votes: str, expected: set[int] | None
) -> None:
    voters = [0, 1, 0, 1] if len(votes) > 5 else [0, 1, 2]
    assert outvoted(zip(voters, votes.split(), strict=True)) == expected


def test_audits_are_rare_by_default_and_absent_on_one_rank() -> None:
    def due(every: int | None, count: int, pieces: int = 12) -> list[int]:
        counts = [pieces // count] * count
        place = Place(0, count, None)
        return [n for n in range(100) if Audit(every, n, place, counts).due]

    assert due(None, 2) == [0, 21, 42, 63, 84]  # 2 / (12 * 21) of the time
    assert due(None, 12, 12 * 4) == [0, 32, 64, 96]
    assert due(30, 3) == [0, 30, 60, 90]
    assert due(0, 3) == due(1, 1) == []
