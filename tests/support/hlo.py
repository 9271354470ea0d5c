"""Parses the HLO text that XLA has optimised and scheduled: calls, order, memory.

The parser reads only the parts of the entry computation that the tests of schedules
need, and recognises ringjax's native calls by their names. tests/gpu/schedule.py holds
the checks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>\S+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[\w-]+)"
    r"\((?P<operands>[^()]*)\)(?P<rest>.*)$"
)
CALL = re.compile(r'custom_call_target="ringjax_(\w+)"')
# XLA's own collectives.
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\("
)
HEAVY = re.compile(r"__triton|__cublas|__cudnn| dot\(| convolution\(")
# Opcodes of instructions that only rename memory and move no data.
NAMING = ("get-tuple-element", "tuple", "bitcast", "opt-barrier")


@dataclass(frozen=True)
class Instruction:
    """One instruction, which is one line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str

    @property
    def kind(self) -> str:
        """The native call with its bucket (such as START0), "gemm", or the opcode."""
        if call := CALL.search(self.rest):
            return f"{call[1].upper()}{self.bucket}"
        return "gemm" if HEAVY.search(self.rest) else self.opcode

    @property
    def bucket(self) -> int:
        """The bucket of a native call, which is the low 16 bits of `site`."""
        found = re.search(r"\bsite = (\d+)", self.rest)
        assert found, f"no attribute site in {self.rest}"
        return int(found[1]) & 0xFFFF

    @property
    def aliases(self) -> list[tuple[int, int]]:
        """The pairs (result, operand) that share memory."""
        found = re.search(r"output_to_operand_aliasing=\{(.*?\))\s*\}", self.rest)
        pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", found[1]) if found else []
        return [(int(result or 0), int(operand)) for result, operand in pairs]

    @property
    def bytes(self) -> int:
        """The size of the result if it is an array; 0 for a tuple or a token."""
        if not (found := re.match(r"[a-z]+(\d+)\[([\d,]*)\]", self.shape)):
            return 0
        bits, dimensions = found.groups()
        count = 1
        for dimension in filter(None, dimensions.split(",")):
            count *= int(dimension)
        return count * int(bits) // 8


class Program:
    """The entry computation, with its instructions in the order of execution."""

    def __init__(self, text: str) -> None:
        assert "is_scheduled=true" in text.splitlines()[0]
        self.text = text
        entry = re.search(r"^ENTRY [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
        assert entry
        self.instructions = list(self._parse(entry[1]))
        self._places = {x.name: i for i, x in enumerate(self.instructions)}
        self.users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in instruction.operands:
                self.users.setdefault(operand, []).append(instruction)

    @staticmethod
    def _parse(body: str) -> Iterator[Instruction]:
        for line in re.sub(r"/\*index=\d+\*/", "", body).splitlines():
            found = INSTRUCTION.match(line)
            assert found, f"cannot read {line}"
            name, shape, opcode, operands, rest = found.groups()
            yield Instruction(
                name, shape, opcode, tuple(re.findall(r"%([^\s,]+)", operands)), rest
            )

    def calls(self, prefix: str = "") -> list[Instruction]:
        """Returns the native calls whose kind begins with `prefix`."""
        return [
            x
            for x in self.instructions
            if CALL.search(x.rest) and x.kind.startswith(prefix)
        ]

    def count_everywhere(self) -> int:
        """Counts the native calls in all computations, including loop bodies."""
        return len(CALL.findall(self.text))

    def __str__(self) -> str:
        """Returns the schedule as text, without instructions that launch nothing."""
        silent = (*NAMING, "parameter", "constant")
        kinds = [x.kind for x in self.instructions if x.opcode not in silent]
        out: list[list[Any]] = []
        for kind in kinds:
            kind = "." if kind in ("fusion", "while") else kind
            if out and out[-1][0] == kind:
                out[-1][1] += 1
            else:
                out.append([kind, 1])
        return " ".join(k if n == 1 else f"{k}×{n}" for k, n in out)

    def place(self, name: str) -> int:
        return self._places[name]

    def heavy_between(self, first: Instruction, second: Instruction) -> int:
        """Counts matrix products and convolutions between two instructions."""
        part = slice(self._places[first.name] + 1, self._places[second.name])
        return sum(x.kind == "gemm" for x in self.instructions[part])

    def origin(self, name: str) -> tuple[Instruction, int]:
        """Returns the instruction that wrote `name`, and the index of its result."""
        index = 0
        instruction = self.instructions[self._places[name]]
        while instruction.opcode in NAMING:
            operand = 0
            if instruction.opcode == "get-tuple-element":
                found = re.search(r"index=(\d+)", instruction.rest)
                assert found
                index = int(found[1])
            elif instruction.opcode == "tuple":
                operand, index = index, 0
            name = instruction.operands[operand]
            instruction = self.instructions[self._places[name]]
        return instruction, index

    def readers(self, call: str, result: int) -> list[Instruction]:
        """Returns all instructions that read a result of `call`, under any name."""
        users = self.users.get(call, [])
        assert all(x.opcode == "get-tuple-element" for x in users), users
        named = [x for x in users if re.match(rf", index={result}\b", x.rest)]
        out: list[Instruction] = []
        while named:
            users = self.users.get(named.pop().name, [])
            named += [x for x in users if x.opcode in NAMING]
            out += [x for x in users if x.opcode not in NAMING]
        return out
