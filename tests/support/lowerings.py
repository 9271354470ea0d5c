"""Parses the native calls in the StableHLO text of a lowered function.

Tests in a job of one rank use this module to check programs without running them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import ringjax
from ringjax import runtime
from ringjax.xla import gradient_allreduce as gradients


def chained(leaves: list[Any], seq: Any, cuts: Any = None, **options: Any) -> Any:
    everyone, config = runtime.global_process_set, runtime.config()
    arguments: dict[str, Any] = {
        "op": ringjax.Average,
        "wire": -1,
        "prescale": 1.0,
        "postscale": 1.0,
        "comm": runtime.communicator(everyone, "allreduce_grads").id,
        "timeout": everyone.limit(),
        "cuts": cuts or (tuple(range(len(leaves))),),
        "overlapped": cuts is not None,
        "memory": config.overlap_memory,
        "elastic_memory": config.elastic_overlap_memory if config.elastic else None,
        "name": "grads",
        "names": tuple(f"leaf{i}" for i in range(len(leaves))),
    }
    return gradients.bucketed_allreduce(leaves, seq, **{**arguments, **options})


SEQ = np.zeros(1, np.uint32)
CALL = re.compile(
    r"(?P<name>%\w+)(:(?P<results>\d+))? = stablehlo\.custom_call "
    r"@(?P<target>ringjax_\w+)\((?P<operands>[^)]*)\)(?P<rest>.*)"
)


class Call(NamedTuple):
    """A native call in the text of a lowering."""

    target: str
    operands: list[str]
    order: str  # the last result of the call, its order token
    rest: str


def calls(f: Any, *args: Any, platform: str = "cpu") -> list[Call]:
    """Returns the native calls of `f` in the order of the text."""
    return found_in(lowered(f, *args, platform=platform))


def lowered(f: Any, *args: Any, platform: str = "cpu") -> str:
    traced = jax.jit(f).trace(*args)
    text: str = traced.lower(lowering_platforms=(platform,)).as_text()
    return text


def found_in(text: str) -> list[Call]:
    return [
        Call(
            m["target"],
            m["operands"].split(", "),
            f"{m['name']}#{int(m['results']) - 1}" if m["results"] else m["name"],
            m["rest"],
        )
        for m in CALL.finditer(text)
    ]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of `jaxpr` and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)
