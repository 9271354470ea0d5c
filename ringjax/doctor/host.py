"""What runs on each host: `python -m ringjax.doctor.host FD`, started by an agent.

What to do comes on standard input, the answer goes to descriptor FD, one line of JSON.
"look" runs the checks of one host and then answers the calls of the others until it is
ended; "call" calls them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from ringjax.config import Config
from ringjax.doctor import calling, checks, facts
from ringjax.doctor.findings import HostContext, as_json
from ringjax.run import environ


def _look(order: dict[str, Any]) -> dict[str, Any]:
    variables = environ.inherited()
    host = HostContext(**order["host"], environ=variables)
    try:
        interfaces = Config.from_env(variables).network_interfaces
        places = calling.Listener(order["token"], interfaces).places
    except ValueError:  # a check says what is wrong
        places = []
    findings = checks.on_host(host)
    return {
        "facts": facts.collect() | {"places": places},
        "findings": {n: list(map(as_json, found)) for n, found in findings.items()},
    }


def main() -> None:
    """Entry point."""
    result = int(sys.argv[1])
    os.set_inheritable(result, False)
    order = json.load(sys.stdin)
    looks = order["do"] == "look"
    if looks:
        answer = _look(order)
    else:
        answer = {"calls": calling.call_all(order["others"], order["token"])}
    with open(result, "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(answer) + "\n")
    while looks:
        signal.pause()


if __name__ == "__main__":
    main()
