"""What a rank of `ringjax.run(fn)` executes: one function, its result to a pipe.

`python -m ringjax.run.task FD`: the function comes on standard input from ringrun, the
result goes to descriptor FD, both inherited from the agent. Nothing is unpickled that
came over a network without authentication.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

RESULT, ERROR = b"R", b"E"


def encode(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bytes:
    """What a rank gets: where this process finds modules, and the function."""
    import cloudpickle

    where = {"prefix": sys.prefix, "path": list(map(os.path.abspath, sys.path))}
    task = cloudpickle.dumps((fn, tuple(args), dict(kwargs)))
    return json.dumps(where).encode() + b"\n" + bytes(task)


def _search(where: Mapping[str, Any]) -> None:
    """Finds modules in the order in which the caller does, if it is this Python."""
    if where["prefix"] == sys.prefix:
        known = filter(os.path.exists, where["path"])
        sys.path[:] = dict.fromkeys([*known, *sys.path])


def decode(blob: bytes) -> Any:
    """The value that a rank returned; raises ValueError if it returned none."""
    if blob[:1] != RESULT:
        raise ValueError("the rank ended without a result")
    import cloudpickle

    return cloudpickle.loads(blob[1:])


def error_text(blob: bytes) -> str:
    """The traceback of a rank that raised, or nothing."""
    return blob[1:].decode(errors="replace") if blob[:1] == ERROR else ""


def _answer(result: int, blob: bytes) -> None:
    with open(result, "wb") as pipe:
        pipe.write(blob)


def main() -> None:
    """Run the function; an exception is reported and goes on to the interpreter."""
    result = int(sys.argv[1])
    os.set_inheritable(result, False)
    import cloudpickle

    with open(os.dup(0), "rb") as file:
        data = file.read()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    try:
        where, _, function_data = data.partition(b"\n")
        _search(json.loads(where))
        function, args, kwargs = cloudpickle.loads(function_data)
        value = function(*args, **kwargs)
        blob = RESULT + cloudpickle.dumps(value)
    except BaseException as error:
        left = isinstance(error, SystemExit) and not error.code
        if not left:
            _answer(result, ERROR + traceback.format_exc().encode())
        raise
    _answer(result, blob)


if __name__ == "__main__":
    main()
