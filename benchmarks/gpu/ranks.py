"""Several ranks on one GPU: every collective, reruns, a killed rank, psum.

Starts the ranks (world.py, failure.py, psum.py) and makes tables of their output. The
ranks take turns on the device and communicate over sockets of this machine, so the
times have no meaning.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Report
from benchmarks.gpu.section import attempt, section

WORLD_LIMIT = 70.0  # time limit of one job in seconds
LEG = 15.0  # seconds without which no further job is started
NOTICED = 20.0  # seconds until the survivors must have noticed a loss
STORY_LIMIT = 60.0


class LegError(RuntimeError):
    """Error: a job of ranks did not finish; the text shows the log."""


def finish(
    commands: Sequence[Sequence[str]], env: Mapping[str, str], log: Path, limit: float
) -> None:
    """Runs commands at the same time until all have ended.

    Raises:
      LegError: a command failed, or still ran at the limit. All commands are ended.
    """
    with log.open("wb") as file:
        processes = [_start(command, env, file) for command in commands]
        deadline, late = time.monotonic() + limit, False
        try:
            for process in processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end(processes)
    codes = [process.returncode for process in processes]
    if late or any(codes):
        what = f"still ran after {limit:g} s" if late else f"exit codes {codes}"
        raise LegError(f"{what}\n{log.read_text(errors='replace')[-2500:]}")


def _start(
    command: Sequence[str], env: Mapping[str, str], log: Any
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", *command],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends running processes, first by SIGTERM, so that ringrun ends its ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        deadline = time.monotonic() + 4
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))


# -- jobs of the whole check -----------------------------------------------------------


def world(
    size: int, folder: Path, *words: str, steps: int = 50
) -> list[dict[str, dict[str, Any]]]:
    """Runs world.py; returns the results of every rank for every case.

    A failed job that has written results raises no error.
    """
    folder.mkdir(parents=True)
    rank = ["-m", "benchmarks.gpu.world", "--folder", str(folder), *words]
    job = ["-m", "ringjax.run", "-np", str(size), sys.executable, "-P", *rank]
    env = {**os.environ, "GPU_CHECK_STEPS": str(steps)}
    failure = ""
    try:
        finish([job], env, folder / "log", WORLD_LIMIT)
    except LegError as error:
        failure = str(error)
        print(failure, flush=True)
    said: list[dict[str, dict[str, Any]]] = []
    for number in range(size):
        path = folder / f"rank.{number}"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        said.append({line.get("case", "end"): line for line in lines})
    if failure and not any(said):
        raise LegError(failure)
    return said


def tabulate(report: Report, size: int, said: Sequence[Mapping[str, Any]]) -> None:
    """Makes a row for each case. Failures go to the report."""
    ends = [line.get("end", {}) for line in said]
    transport = {end.get("transport", "did not end") for end in ends}
    platforms = {end.get("platform", "?") for end in ends}
    report.table(
        f"Correctness, {size} ranks on {'/'.join(sorted(platforms))}",
        "case",
        "result",
        "s",
    )
    cases = list(dict.fromkeys(name for line in said for name in line if name != "end"))
    for case in cases:
        lines = [line.get(case) for line in said]
        wrong = [
            f"rank {rank}: {line['error'] if line else 'no result'}"
            for rank, line in enumerate(lines)
            if not line or line["error"]
        ]
        digests = {json.dumps(line["detail"]) for line in lines if line}
        if case.startswith("training") and not wrong and len(digests) > 1:
            wrong = ["the ranks hold different bits"]
        slowest = max((line["seconds"] for line in lines if line), default=0.0)
        report.row(case, "FAILED" if wrong else "ok", f"{slowest:.2f}")
        for text in wrong:
            report.fail(f"{size} ranks, {case}, {text[:500]}")
    report.note(
        f"transport: {', '.join(sorted(transport))}; the ranks take turns on one "
        "device and use sockets: the times are no measure of speed"
    )
    if platforms == {"gpu"} and transport != {"nccl"}:
        report.fail(f"{size} ranks computed on the GPU but exchanged by {transport}")
    if "did not end" in transport:
        report.fail(f"{size} ranks: not all came to their end")


def bits(
    first: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]]
) -> dict[str, bool]:
    """Compares the digests of a rerun for every training case."""
    cases = [name for name in again[0] if name.startswith("training")]
    return {
        case: bool(first[0].get(case, {}).get("detail"))
        and first[0][case]["detail"] == again[0][case]["detail"]
        for case in cases
    }


# -- a killed rank ---------------------------------------------------------------------


def lose_a_rank(size: int, folder: Path) -> dict[str, float]:
    """Kills the last rank; returns seconds until the notice and until the new world.

    Raises:
      LegError: the survivors did not notice, did not name the rank, or did not
        continue.
    """
    folder.mkdir(parents=True)
    job, victim = secrets.token_hex(8), size - 1
    logs = [folder / f"rank.{rank}" for rank in range(size)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            env = {
                **os.environ,
                "RINGJAX_RANK": str(rank),
                "RINGJAX_SIZE": str(size),
                "RINGJAX_JOB": job,
                "XDG_RUNTIME_DIR": str(folder),
            }
            with log.open("wb") as file:
                processes.append(_start(["-m", "benchmarks.gpu.failure"], env, file))
        deadline = time.monotonic() + STORY_LIMIT
        # Train twice: the second training lasts until a rank is lost.
        _wait(lambda: all(_text(x).count("training") > 1 for x in logs), deadline, logs)
        killed = time.time()
        processes[victim].kill()
        survivors = [log for rank, log in enumerate(logs) if rank != victim]
        _wait(lambda: all("caught" in _text(x) for x in survivors), deadline, logs)
        noticed = 0.0
        for log in survivors:
            when, _, text = _after(_text(log), "caught ").partition(" ")
            noticed = max(noticed, float(when) - killed)
            if f"rank {victim}" not in text:
                raise LegError(f"the error does not name rank {victim}: {text}")
        if noticed > NOTICED:
            raise LegError(f"the loss was noticed after {noticed:.1f} s only")
        _wait(lambda: all("re-formed" in _text(x) for x in survivors), deadline, logs)
        ends = [_after(_text(log), "re-formed ").split() for log in survivors]
        for process in processes[:victim]:
            if process.wait(20) != 0:
                raise LegError(f"a survivor ended with {process.returncode}")
        return {
            "noticed": noticed,
            "re-formed": max(float(e[0]) for e in ends) - killed,
        }
    finally:
        end(processes)


def _text(path: Path) -> str:
    return path.read_text(errors="replace")


def _after(text: str, mark: str) -> str:
    line = text.partition(f"\n{mark}")[2].splitlines()
    return line[0] if line else ""


def _wait(done: Any, deadline: float, logs: Sequence[Path]) -> None:
    while not done():
        if time.monotonic() > deadline:
            said = "\n".join(f"--- {x.name}\n{_text(x)[-1500:]}" for x in logs)
            raise LegError(f"not after {STORY_LIMIT:g} s\n{said}")
        time.sleep(0.05)


# -- psum ------------------------------------------------------------------------------


def psum(size: int, folder: Path) -> list[float]:
    """Returns the sum of `training.normals` by jax.lax.psum over processes."""
    folder.mkdir(parents=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    words = ["-m", "benchmarks.gpu.psum", "--size", str(size), "--port", str(port)]
    commands = [
        [*words, "--rank", str(rank), "--out", str(folder / f"psum.{rank}")]
        for rank in range(size)
    ]
    finish(commands, os.environ, folder / "log", WORLD_LIMIT)
    values: list[float] = json.loads((folder / "psum.0").read_text())
    return values


def compare_with_psum(report: Report, ours: Any, theirs: Any) -> None:
    """Makes a row: both sum the same numbers, perhaps in another order."""
    if not ours or not theirs:
        report.row("sum, against psum over 2 processes", "not compared", "")
        return
    worst = max(
        abs(a - b) / max(abs(b), 1.0) for a, b in zip(ours, theirs, strict=True)
    )
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    report.row(
        "sum, against psum over 2 processes",
        f"{same} of {len(ours)} elements alike, largest difference {worst:.1e}",
        "",
    )
    if worst > 1e-5:
        report.fail(f"ringjax and psum differ by {worst:.1e}")


# -- all of it -------------------------------------------------------------------------


@dataclass(frozen=True)
class Clock:
    """The time at which this section must have ended."""

    deadline: float

    def short(self, report: Report, what: str) -> bool:
        """Returns whether there is no time for another leg, which is then not run."""
        if time.monotonic() + LEG < self.deadline:
            return False
        if not report.tables:
            report.table("Several ranks", "what", "result", "s")
        report.note(f"{what}: not run, no time left")
        return True


def check_worlds(report: Report, sizes: Sequence[int], work: Path, clock: Clock) -> Any:
    """Checks the collectives for every size; returns the first size's results."""
    first: Any = None
    for size in sizes:
        words, steps = ([], 50) if size < 4 else (["--fewer"], 20)
        folder = work / str(size)
        if clock.short(report, f"{size} ranks"):
            continue
        said = attempt(
            report, f"{size} ranks", world, size, folder, *words, steps=steps
        )
        if said:
            tabulate(report, size, said)
        first = first or said
    return first


def check_rerun(report: Report, first: Any, work: Path) -> None:
    """Repeats the training of the first size."""
    started = time.monotonic()
    size = len(first)
    again = attempt(report, "rerun", world, size, work / "again", "--training")
    seconds = f"{time.monotonic() - started:.0f}"
    if not again or not all(again):
        report.row(f"rerun with {size} ranks", "FAILED", seconds)
        report.fail("the rerun did not come to its end")
        return
    for case, alike in bits(first, again).items():
        shown = "the same bits" if alike else "OTHER BITS"
        report.row(f"{case}, rerun with {size} ranks", shown, seconds)
        if not alike:
            report.fail(f"{case}: a rerun gave other bits")


def check_loss(report: Report, size: int, work: Path) -> None:
    """Checks a killed rank in a world of this size."""
    name = f"{size} ranks, one killed"
    loss = attempt(report, name, lose_a_rank, size, work / f"loss-{size}")
    if loss:
        text = f"noticed and named after {loss['noticed']:.2f} s, trained on"
        report.row(name, text, f"{loss['re-formed']:.1f}")
    else:
        report.row(name, "FAILED", "")


def check_psum(report: Report, first: Any, work: Path) -> None:
    """Sums the same numbers by XLA's own collectives."""
    theirs = attempt(report, "psum", psum, 2, work / "psum")
    ours = first[0].get("sum beside psum", {}).get("detail") if first else None
    compare_with_psum(report, ours, theirs)


def main() -> None:
    """Runs all legs, important legs first. A failed leg does not stop other legs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--losses", type=int, nargs="*", default=[3, 2])
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args()
    work, sizes = options.work, options.sizes
    clock = Clock(time.monotonic() + options.seconds)
    shutil.rmtree(work, ignore_errors=True)
    with section() as report:
        first = check_worlds(report, sizes[:1], work, clock)
        report.table("Several ranks, further", "what", "result", "s")
        if first and not clock.short(report, "rerun"):
            check_rerun(report, first, work)
        for size in options.losses:
            if not clock.short(report, f"{size} ranks, one killed"):
                check_loss(report, size, work)
        if sizes[0] == 2 and not clock.short(report, "psum"):
            check_psum(report, first, work)
        check_worlds(report, sizes[1:], work, clock)


if __name__ == "__main__":
    main()
