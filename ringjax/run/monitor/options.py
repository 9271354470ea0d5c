"""The options of ringrun that are about looking at a job while it runs."""

from __future__ import annotations

import argparse

from ringjax.run.option_types import number

ABOUT = """
Ranks are asked how they are only while one of these is given, or while somebody looks
with `ringjax top`.
"""
# The variables of ringjax.config that the options stand for.
VARIABLES = {
    "report": "RINGJAX_REPORT",
    "metrics": "RINGJAX_METRICS",
    "metrics_token_file": "RINGJAX_METRICS_TOKEN_FILE",
    "metrics_file": "RINGJAX_METRICS_FILE",
}


def add_options(group: argparse._ArgumentGroup) -> None:
    """Adds them."""
    add = group.add_argument
    add(
        "--report",
        type=number(float, 0),
        metavar="SECONDS",
        help="print as often what all ranks wait for (RINGJAX_REPORT)",
    )
    add(
        "--quiet",
        dest="report",
        action="store_const",
        const=0.0,
        help="no such reports, whatever RINGJAX_REPORT says",
    )
    add(
        "--metrics",
        metavar="[ADDRESS:]PORT",
        help="serve metrics to Prometheus, at /metrics; to this host alone unless an "
        "address is given (RINGJAX_METRICS)",
    )
    add(
        "--metrics-token-file",
        metavar="FILE",
        help="what Prometheus has to show there, in a file for its owner alone "
        "(RINGJAX_METRICS_TOKEN_FILE)",
    )
    add(
        "--metrics-file",
        metavar="FILE",
        help="write them to NAME.prom, for node_exporter (RINGJAX_METRICS_FILE)",
    )
