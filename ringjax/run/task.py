"""The program of each rank of `ringjax.run(fn)`, which calls the function `fn`.

`python -m ringjax.run.task FD` reads the function from standard input and writes the
function's result to the descriptor FD. Unpickling is safe, because the agent has opened
both descriptors and has received the function over an authenticated connection.
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
    fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> bytes:
    """Encodes a function for a rank, with sys.path and sys.prefix of this process."""
    import cloudpickle

    where = {"prefix": sys.prefix, "path": list(map(os.path.abspath, sys.path))}
    task = cloudpickle.dumps((fn, tuple(args), dict(kwargs)))
    return json.dumps(where).encode() + b"\n" + bytes(task)


def _search(where: Mapping[str, Any]) -> None:
    """Puts the caller's sys.path first, if the caller has the same sys.prefix."""
    if where["prefix"] == sys.prefix:
        known = filter(os.path.exists, where["path"])
        sys.path[:] = dict.fromkeys([*known, *sys.path])


def decode(blob: bytes) -> Any:
    """Decodes the result that a rank has sent.

    Raises ValueError if the rank has sent no result.
    """
    if blob[:1] != RESULT:
        raise ValueError("the rank ended without a result")
    import cloudpickle

    return cloudpickle.loads(blob[1:])


def error_text(blob: bytes) -> str:
    """Returns the traceback if the function has raised an error, otherwise ""."""
    return blob[1:].decode(errors="replace") if blob[:1] == ERROR else ""


def _send_result(result: int, blob: bytes) -> None:
    with open(result, "wb") as pipe:
        pipe.write(blob)


def main() -> None:
    """Calls the function. Sends its result, or the traceback of its error."""
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
            _send_result(result, ERROR + traceback.format_exc().encode())
        raise
    _send_result(result, blob)


if __name__ == "__main__":
    main()
