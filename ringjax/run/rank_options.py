"""The options of ringrun that say what a rank is: its devices, its group."""

from __future__ import annotations

import argparse

from ringjax.config import Config
from ringjax.run.option_types import number

# The variables of ringjax.config that the options stand for.
VARIABLES = {
    "group_size": "RINGJAX_GROUP_SIZE",
    "devices_per_rank": "RINGJAX_DEVICES_PER_RANK",
}


def devices(text: str) -> str:
    """As many CUDA devices a rank, for argparse: the words of the setting."""
    try:
        Config.from_env({VARIABLES["devices_per_rank"]: text})
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds them."""
    parser.add_argument(
        "--group-size",
        type=number(int, 1),
        metavar="K",
        help="JAX joins every K processes to one (jax.distributed), over whose devices "
        "it shards; ringjax averages between such groups, and with --min-np they are "
        "lost and join as a whole (1)",
    )
    parser.add_argument(
        "--devices-per-rank",
        type=devices,
        metavar="N",
        help="CUDA devices of each rank, over which JAX shards; ringjax averages each "
        "with the one of its place on the other ranks. all: every one that it sees, "
        "for one rank on each host (1)",
    )
