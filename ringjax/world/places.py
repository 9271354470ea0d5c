"""Where the program of this rank is most of the time, from looks at its main thread."""

from __future__ import annotations

from collections import Counter

from ringjax.world.whereabouts import doing

LOOK = 0.05  # seconds between two looks at the program
_KEPT = 200  # looks


class Places:
    """Some looks: later ones count for more, as older ones are halved now and then."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def look(self) -> None:
        """Takes note of the line where the program is now."""
        self._seen[doing()] += 1
        if sum(self._seen.values()) >= _KEPT:
            halved = {place: n // 2 for place, n in self._seen.items() if n > 1}
            self._seen = Counter(halved)

    @property
    def usual(self) -> str:
        """Where it was seen most often; empty: nobody has looked."""
        found = self._seen.most_common(1)
        return found[0][0] if found else ""
