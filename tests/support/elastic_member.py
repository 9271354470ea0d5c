"""The program of a rank that follows the coordinator but makes no collectives.

The rank starts quickly, because it imports neither jax nor the native core.
"""

from __future__ import annotations

from pathlib import Path

from support import leaks
from support.launch import Job
from support.waiting import LONG

# Follows the coordinator until the file $FOLDER/end exists. Prints a line such as
# "epoch 1 repair: 0/3" (kind of the change, rank, size) for each epoch.
MEMBER = """
import os, signal, sys, time
from pathlib import Path
from ringjax.config import Config
from ringjax.membership.directives import (
    Dismiss, EpochDirective, Fence, ResizePending, Revoke, Stop, Welcome
)
from ringjax.membership.job_credentials import JobCredentials
from ringjax.membership.joined_job import join

config = Config.from_env()
folder = Path(os.environ["FOLDER"])
worker = config.worker
wants_to_leave = []
signal.signal(signal.SIGTERM, lambda *_: wants_to_leave.append(True))

def say(text):
    print(text, flush=True)

def join_job():
    return join(
        JobCredentials(config.rendezvous, bytes.fromhex(config.secret), config.job),
        worker, {},
        config.start_timeout, elastic_timeout=config.elastic_timeout,
    )

def follow(job):
    epoch = -1
    orders = [job.first]
    while not (folder / "end").exists():
        for order in orders:
            match order:
                case Welcome():
                    say("welcome")
                    job.ready()
                    (folder / f"ready {worker}").touch()
                case EpochDirective():
                    epoch = order.epoch
                    place = f"{order.rank}/{len(order.members)}"
                    say(f"epoch {epoch} {order.kind}: {place}")
                case Revoke():
                    job.report(epoch, {})
                case ResizePending():
                    job.pause(epoch, order.number)
                case Dismiss() | Fence() | Stop():
                    say(type(order).__name__)
                    sys.exit(0 if isinstance(order, Dismiss) else 3)
        if wants_to_leave:
            wants_to_leave.clear()
            job.request_leave()
        orders = job.poll(0.02)
    job.leave()
    say("end")

"""
MEMBER_PROGRAM = MEMBER + "follow(join_job())\n"


def ringrun_lines(job: Job) -> list[str]:
    """Returns the lines of ringrun itself, without process ids."""
    found = job.launcher_output().splitlines()
    lines = [line.removeprefix("ringrun: ") for line in found if "ringrun: " in line]
    words = [line.split(", pid ") for line in lines]
    return [
        first + rest[0].lstrip("0123456789") if rest else first
        for first, *rest in words
    ]


def wait_for(job: Job, text: str, times: int = 1) -> None:
    """Waits until ringrun has printed `text` so often."""

    def missing() -> list[str]:
        return [] if job.launcher_output().count(text) >= times else ["not yet"]

    assert not leaks.settle(missing, LONG), f"no {text!r} in\n{job.launcher_output()}"


def finish(job: Job, folder: Path) -> int:
    """Lets all ranks finish, and returns the exit code of ringrun."""
    (folder / "end").touch()
    return job.wait()
