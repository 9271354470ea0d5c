"""All checks that need a GPU, in one run: `make gpu-check`.

Builds ringjax, then runs each section in a process of its own with a time limit. A
section that fails or hangs is reported and does not stop the other sections. A section
is another file of this folder, or files of tests/gpu. README.md explains the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import driver
from benchmarks.gpu.section import RESULT, markdown_table, text_table

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 470.0  # time limit for all sections together
TAIL = 3000  # last characters of a failed section's log to print
LOG = 1_000_000  # last characters of any section's log in log.txt
# A section gets no variables of another launcher, and no other settings of ringjax.
_FOREIGN = ("RINGJAX_", "HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_")
# These variables choose the compiler of the device code, and the NCCL library.
_KEPT = ("RINGJAX_CUDA", "RINGJAX_NVCC", "RINGJAX_NCCL")


@dataclass(frozen=True)
class Section:
    """One part of the check.

    Attributes:
      arguments: of Python; {work}, {site} and {seconds} are replaced.
      limit: time limit in seconds.
      reserved: seconds that earlier sections leave to this section, if possible.
      dry: the arguments for a dry run on the CPU; None if there is no dry run.
      needs_build: whether the section imports ringjax.
      needs_gpu: whether the section needs a device.
      env: additional variables.
    """

    name: str
    arguments: tuple[str, ...]
    limit: float
    dry: tuple[str, ...] | None = None
    needs_build: bool = True
    needs_gpu: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    reserved: float = 15.0


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.gpu.{name}", *arguments)


def _tests(
    name: str,
    limit: float,
    reserved: float,
    *files: str,
    dry: bool = True,
    **env: str,
) -> Section:
    """Returns the section of some files of tests/gpu, of which a table is made."""
    paths = [f"tests/gpu/test_{file}.py" for file in files]
    # The machine of a check may not have hypothesis, which these tests do not use.
    plugins = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    arguments = ("-m", "pytest", "-q", *plugins, *paths)
    return Section(
        name,
        arguments,
        limit,
        dry=arguments if dry else None,
        # Every rank is a new interpreter, as for a user.
        env={"RINGJAX_TEST_COLD": "1", **env},
        reserved=reserved,
    )


_CACHE = {"JAX_COMPILATION_CACHE_DIR": "{work}/jax-cache"}
_QUICK = ("--model", "mlp", "--width", "64", "--layers", "3", "--batch", "8")
_BUILD = _module("build", "--site", "{site}", "--work", "{work}")
_STEP = ("--rounds", "3", *_QUICK)
_TIMED = ("--seconds", "{seconds}")
_TRACE = _module("timeline", "--work", "{work}/trace")

SECTIONS = (
    Section(
        "build", _BUILD, 150, _BUILD, needs_build=False, needs_gpu=False, reserved=60
    ),
    Section("machine", _module("machine"), 40, dry=_module("machine")),
    _tests(
        "one rank",
        *(110, 30, "communicator", "jax", "kernels"),
        dry=False,
        # These tests only check results, and autotuning matrix products takes long.
        XLA_FLAGS="--xla_gpu_autotune_level=0",
    ),
    _tests("ranks", 150, 80, "collectives", "training", "lost_rank"),
    _tests("examples", 85, 30, "examples"),
    _tests("elastic", 60, 25, "elastic"),
    _tests("torch", 60, 20, "torch"),
    Section("pack", _module("pack"), 50, reserved=20),
    Section(
        "handlers",
        _module("handlers"),
        50,
        dry=_module("handlers", "--steps", "3", "--scale", "64"),
        reserved=20,
    ),
    Section(
        "step",
        _module("training_step", "--fusion", "hybrid", *_TIMED),
        130,
        dry=_module("training_step", "--fusion", "hybrid", *_STEP),
        env=_CACHE,
        reserved=70,
    ),
    Section(
        "step, packed",
        _module("training_step", "--fusion", "pack", *_TIMED),
        90,
        dry=_module("training_step", "--fusion", "pack", *_STEP),
        env=_CACHE,
        reserved=40,
    ),
    Section("timeline", _TRACE, 50, dry=(*_TRACE, *_QUICK), reserved=20),
    _tests("several", 100, 0, "several_gpus"),
)


@dataclass
class Outcome:
    """How a section ended: "ok", "failed", "timed out" or "not run"."""

    name: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    report: dict[str, Any] = field(default_factory=dict)


def _file(section: str, folder: Path, suffix: str) -> Path:
    stem = "".join(c if c.isalnum() else "-" for c in section)
    return folder / f"{stem}.{suffix}"


def run_section(
    section: Section,
    arguments: Sequence[str],
    limit: float,
    env: Mapping[str, str],
    folder: Path,
) -> Outcome:
    """Runs one section, and ends all its processes at the time limit."""
    result, log = (_file(section.name, folder, suffix) for suffix in ("json", "log"))
    result.unlink(missing_ok=True)
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", *arguments],
            env={**env, RESULT: str(result)},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        timed_out, descendants = False, list[int]()
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            timed_out, descendants = True, find_descendants(process.pid)
            # SIGABRT makes faulthandler write the stacks.
            _signal(process.pid, signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3)
        finally:  # ends the remaining processes, also after Ctrl-C
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for pid in descendants:
                _signal(pid, signal.SIGKILL)
            process.wait()
    outcome = Outcome(section.name, "ok", time.monotonic() - started)
    with contextlib.suppress(OSError, ValueError):
        outcome.report = json.loads(result.read_text())
    if not outcome.report:
        lines = log.read_text(errors="replace").strip().splitlines()
        outcome.reason = lines[-1][:200] if lines else ""
    if timed_out:
        outcome.status, outcome.reason = "timed out", f"after {limit:.0f} s"
    elif process.returncode != 0 or outcome.report.get("failures"):
        outcome.status = "failed"
        outcome.reason = "; ".join(outcome.report.get("failures", [])) or (
            f"exit code {process.returncode}"
        )
    return outcome


def find_descendants(pid: int) -> list[int]:
    """Returns the descendants of a process, also those in sessions of their own."""
    found = [pid]
    for parent in found:  # the list grows during the loop
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, path.read_text().split())
    return found[1:]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def environment(site: Path, dry: bool) -> dict[str, str]:
    """Returns the environment of a section: the built ringjax, then the checkout.

    Python runs with -P and the checkout is last on the path, because the folder ringjax
    of the checkout has no native module.
    """
    env = {
        k: v for k, v in os.environ.items() if k in _KEPT or not k.startswith(_FOREIGN)
    }
    # PYTHONPATH may contain a wheel.
    given = env.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(site)] if (site / "ringjax").is_dir() else []
    paths += [*(p for p in given if p not in ("", str(ROOT))), str(ROOT)]
    return {
        **env,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # If CUDA does not start, JAX must fail and not use the CPU.
        "JAX_PLATFORMS": "cpu" if dry else "cuda",
        "RINGJAX_TEST_DEVICE": "cpu" if dry else "cuda",
    }


def limit_of(section: Section, left: float, later: Sequence[Section]) -> float:
    """Returns the section's limit, or less, so that later sections keep some time.

    If there is not enough time for all sections, earlier sections have priority.

    Args:
      section: the next section.
      left: seconds that are left for this section and all later sections.
      later: the sections that follow.
    """
    spare = left - sum(other.reserved for other in later)
    return min(section.limit, left, max(section.reserved, spare))


def run(options: argparse.Namespace, sections: Sequence[Section]) -> list[Outcome]:
    started = time.monotonic()
    work: Path = options.work
    site, folder = work / "site", work / "sections"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    devices, why_none = driver.count_devices()
    if why_none and not options.dry_run:
        print(f"no CUDA device: {why_none}", flush=True)
    if options.dry_run:
        sections = [section for section in sections if section.dry is not None]
    outcomes: list[Outcome] = []
    built = True
    for index, section in enumerate(sections):
        left = options.seconds - (time.monotonic() - started)
        limit = limit_of(section, left, sections[index + 1 :])
        reason = ""
        if section.needs_build and not built:
            reason = "nothing was built"
        elif section.needs_gpu and not devices and not options.dry_run:
            reason = "no CUDA device"
        elif limit < 1:
            reason = "no time left"
        if reason:
            outcome = Outcome(section.name, "not run", reason=reason)
        else:
            print(f"{section.name}: up to {limit:.0f} s …", flush=True)
            # A section that knows its limit ends earlier and writes its tables.
            seconds = f"{max(limit - 8, 1):.0f}"
            values = {"work": str(work), "site": str(site), "seconds": seconds}
            env = environment(site, options.dry_run)
            env |= {k: v.format(**values) for k, v in section.env.items()}
            template = (section.dry if options.dry_run else section.arguments) or ()
            arguments = [word.format(**values) for word in template]
            outcome = run_section(section, arguments, limit, env, folder)
        if section.name == "build":
            built = outcome.status == "ok"
        outcomes.append(outcome)
        _print_outcome(outcome, folder, time.monotonic() - started)
    return outcomes


def _print_outcome(outcome: Outcome, folder: Path, elapsed: float) -> None:
    reason = f" ({outcome.reason})" if outcome.reason else ""
    print(
        f"[{elapsed:5.0f} s] {outcome.name}: {outcome.status}{reason}, "
        f"{outcome.seconds:.1f} s",
        flush=True,
    )
    if outcome.status in ("failed", "timed out"):
        text = _file(outcome.name, folder, "log").read_text(errors="replace")
        print("\n".join("    | " + line for line in text[-TAIL:].splitlines()))


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Formats the first table, with the outcome of every section."""
    rows = [
        [o.name, o.status, f"{o.seconds:.1f}", o.reason.partition("\n")[0]]
        for o in outcomes
    ]
    missed = [text for o in outcomes for text in o.report.get("missed", [])]
    notes = [f"target missed: {text}" for text in missed]
    head = ["section", "result", "s", "reason"]
    return {"title": "Sections", "head": head, "rows": rows, "notes": notes}


def tables(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Formats the tables of all sections. The summary is last."""
    found = [t for o in outcomes for t in o.report.get("tables", [])]
    return [*found, summary(outcomes)]


def markdown(outcomes: Sequence[Outcome], title: str) -> str:
    every = tables(outcomes)
    parts = [f"## {title}", "", markdown_table(every[-1])]
    parts += [markdown_table(table) for table in every[:-1]]
    return "\n".join(parts)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu.check", description=__doc__.splitlines()[0]
    )
    names = ", ".join(section.name for section in SECTIONS)
    parser.add_argument(
        "--only", action="append", metavar="SECTION", help=f"may be repeated: {names}"
    )
    parser.add_argument("--skip", action="append", default=[], metavar="SECTION")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "gpu-check", help="scratch folder"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=os.environ.get("OUT"),
        help="folder for results.json, results.md and log.txt; default $OUT, or --work",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="on the CPU, with tiny sizes: only shows that the sections run",
    )
    options = parser.parse_args(words)
    known = {section.name for section in SECTIONS}
    for name in [*(options.only or []), *options.skip]:
        if name not in known:
            parser.error(f"no section {name!r}; there are {names}")
    options.work = options.work.resolve()
    options.out = Path(options.out).resolve() if options.out else options.work
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Runs the check. Returns 0 if every section succeeded."""
    options = parse(words)
    chosen = [
        s
        for s in SECTIONS
        if (not options.only or s.name in options.only or s.name == "build")
        and s.name not in options.skip
    ]
    started = time.monotonic()
    now = datetime.datetime.now(datetime.UTC)
    outcomes = run(options, chosen)
    title = f"{now:%Y-%m-%d %H:%M} UTC"
    if options.dry_run:
        title += ", a dry run on the CPU: no number here means anything"
    options.out.mkdir(parents=True, exist_ok=True)
    results = {"title": title, "sections": [asdict(o) for o in outcomes]}
    (options.out / "results.json").write_text(json.dumps(results, indent=1))
    (options.out / "results.md").write_text(markdown(outcomes, title))
    with (options.out / "log.txt").open("w") as file:
        for path in sorted((options.work / "sections").glob("*.log")):
            text = path.read_text(errors="replace")[-LOG:]
            file.write(f"===== {path.stem}\n{text}\n")
    print()
    for table in tables(outcomes):
        print(text_table(table) + "\n")
    print(f"{title}; {time.monotonic() - started:.0f} s; files in {options.out}")
    return int(any(outcome.status != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
