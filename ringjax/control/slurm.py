"""Parses Slurm's notation for lists of nodes, for ranks under srun and for ringrun."""

from __future__ import annotations

_MAX_NODES = 65536
_MAX_DIGITS = 20


def hosts_of(nodelist: str) -> list[str]:
    """Expands Slurm's notation for lists of nodes.

    Raises:
        ValueError: the text is no list of nodes, or names more than 65536 nodes.

    Example:
        >>> hosts_of("gpu[08-10,12]-ib,login")
        ['gpu08-ib', 'gpu09-ib', 'gpu10-ib', 'gpu12-ib', 'login']
    """
    hosts: list[str] = []
    for entry in _split(nodelist):
        names = [""]
        rest = entry
        while rest:
            head, bracket, tail = rest.partition("[")
            inside, closing, rest = tail.partition("]") if bracket else ("", "]", "")
            if not closing or "]" in head:
                raise ValueError(f"node list {nodelist!r}: brackets do not match")
            numbers = _numbers(inside, nodelist) if bracket else [""]
            if len(hosts) + len(names) * len(numbers) > _MAX_NODES:
                raise ValueError(
                    f"node list {nodelist!r}: more than {_MAX_NODES} nodes"
                )
            names = [name + head + number for name in names for number in numbers]
        hosts += names
    return hosts


def _split(nodelist: str) -> list[str]:
    """Splits a node list at the commas outside of brackets."""
    entries, depth = [""], 0
    for character in nodelist.strip():
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            entries.append("")
        else:
            entries[-1] += character
    return [entry.strip() for entry in entries if entry.strip()]


def _numbers(text: str, nodelist: str) -> list[str]:
    """Expands "08-10,12" to ["08", "09", "10", "12"], with the leading zeros."""
    numbers: list[str] = []
    for piece in text.split(","):
        first, dash, last = piece.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first):
            raise ValueError(f"node list {nodelist!r}: {piece!r} is no range")
        if int(last) - int(first) >= _MAX_NODES or len(first) > _MAX_DIGITS:
            raise ValueError(f"node list {nodelist!r}: more than {_MAX_NODES} nodes")
        width = len(first) if first.startswith("0") else 0
        numbers += [f"{n:0{width}}" for n in range(int(first), int(last) + 1)]
    return numbers
