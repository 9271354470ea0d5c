"""Variables with which XLA computes the same bits on every host, for RINGJAX_SAME_BITS.

XLA:CPU splits sums by the number of its threads, and loops by the number of usable
cores. One thread is the only number with which no result depends on the host. (XLA:CPU
has a thread for each device at least, so processes with several devices need hosts with
the same number of cores; `ringjax.pieces.start_check` compares them.) On GPUs, XLA
chooses kernels by measuring them, and some kernels add in any order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

THREADS = ("PJRT_NPROC", "NPROC")
"""The variables from which XLA:CPU reads its number of threads, the first one first."""

# Flag of XLA -> the value it gets. XLA accepts flags for GPUs on every host.
_FLAGS = {"xla_gpu_deterministic_ops": "true", "xla_gpu_autotune_level": "0"}
_SYNONYMS = {"": "true", "1": "true", "True": "true", "False": "false"}


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of XLA to set in an environment.

    Raises:
        ValueError: the user has set a variable or a flag of XLA to another value.

    Example:
        >>> variables({})["NPROC"]
        '1'
        >>> variables({"NPROC": "4"})
        Traceback (most recent call last):
        ValueError: RINGJAX_SAME_BITS (--same-bits) needs NPROC=1, but it is 4: unset it
    """
    for name in THREADS:
        if environ.get(name, "1").strip() not in ("", "1"):
            raise _contradiction(f"{name}=1", environ[name])
    return {"NPROC": "1", "XLA_FLAGS": " ".join(_flags(environ.get("XLA_FLAGS", "")))}


def _flags(text: str) -> Iterator[str]:
    yield from text.split()
    if text.strip() and not text.lstrip().startswith("-"):
        raise _contradiction("flags in XLA_FLAGS", f"the name of a file, {text}")
    given = dict(word.lstrip("-").partition("=")[::2] for word in text.split())
    for name, value in _FLAGS.items():
        if name not in given:
            yield f"--{name}={value}"
        elif _SYNONYMS.get(given[name], given[name]) != value:
            raise _contradiction(f"--{name}={value} in XLA_FLAGS", given[name])


def _contradiction(needed: str, value: str) -> ValueError:
    return ValueError(
        f"RINGJAX_SAME_BITS (--same-bits) needs {needed}, but it is {value}: unset it"
    )


def apply() -> None:
    """Sets the variables in this process. XLA reads them when JAX is first used.

    Raises:
        ValueError: a variable has another value.
    """
    os.environ.update(variables(os.environ))
