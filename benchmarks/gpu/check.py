"""All checks that need a GPU, in one run: `make gpu-check`.

Builds ringjax, then runs each section in a process of its own with a time limit. A
section that fails or hangs is reported and does not stop the other sections. The other
files in this folder are the sections, and README.md explains the tables.
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
from benchmarks.gpu.report import markdown_table, text_table

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 470.0  # time limit for all sections together
TAIL = 3000  # last characters of a failed section's log to print
LOG = 1_000_000  # last characters of any section's log in log.txt
# No traces of another launcher, and no settings of ringjax but those of the section.
_FOREIGN = ("RINGJAX_", "HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_")
# Which compiler makes the device code, and which NCCL is loaded.
_KEPT = ("RINGJAX_CUDA", "RINGJAX_NVCC", "RINGJAX_NCCL")


@dataclass(frozen=True)
class Section:
    """One part of the check.

    Attributes:
      words: the arguments of Python; {work}, {site} and {seconds} are replaced.
      limit: time limit in seconds.
      least: seconds that earlier sections leave to this section, if possible.
      dry: the words for a dry run on the CPU; None if there is no dry run.
      needs_build: whether the section imports ringjax.
      needs_gpu: whether the section needs a device.
      env: additional variables.
    """

    name: str
    words: tuple[str, ...]
    limit: float
    dry: tuple[str, ...] | None = None
    needs_build: bool = True
    needs_gpu: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    least: float = 15.0


def _module(name: str, *words: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.gpu.{name}", *words)


_CACHE = {"JAX_COMPILATION_CACHE_DIR": "{work}/jax-cache"}
_QUICK = ("--model", "mlp", "--width", "64", "--layers", "3", "--batch", "8")
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")

_TIMED = ("--seconds", "{seconds}")
_BUILD = _module("build", "--site", "{site}", "--work", "{work}")
_RANKS = _module("ranks", "--work", "{work}/ranks", *_TIMED)
_ELASTIC = _module("elastic", "--work", "{work}/elastic", *_TIMED)
_TORCH = _module("torch_tensors", "--work", "{work}/torch")
_SEVERAL = _module("several", "--work", "{work}/several")
_TRACE = _module("timeline", "--work", "{work}/trace")

SECTIONS = (
    Section("build", _BUILD, 150, _BUILD, needs_build=False, needs_gpu=False, least=60),
    Section("machine", _module("machine"), 40, dry=_module("machine")),
    Section(
        "tests/gpu",
        (*_PYTEST, "--timeout=60", str(ROOT / "tests" / "gpu")),
        110,
        dry=(*_PYTEST, str(ROOT / "tests" / "gpu")),
        # The section only checks results, and autotuning matrix products would need
        # more time.
        env={"XLA_FLAGS": "--xla_gpu_autotune_level=0"},
        least=30,
    ),
    Section("ranks", _RANKS, 140, dry=_RANKS, least=80),
    Section("examples", _module("examples"), 85, dry=_module("examples"), least=30),
    Section("elastic", _ELASTIC, 60, dry=_ELASTIC, least=25),
    Section("torch", _TORCH, 60, dry=(*_TORCH, "--cpu"), least=20),
    Section("pack", _module("pack"), 50, least=20),
    Section(
        "handlers",
        _module("handlers"),
        50,
        dry=_module("handlers", "--steps", "3", "--scale", "64"),
        least=20,
    ),
    Section(
        "step",
        _module("training_step", "--fusion", "hybrid", *_TIMED),
        130,
        dry=_module("training_step", "--fusion", "hybrid", *_QUICK, "--rounds", "3"),
        env=_CACHE,
        least=70,
    ),
    Section(
        "step, packed",
        _module("training_step", "--fusion", "pack", *_TIMED),
        90,
        dry=_module("training_step", "--fusion", "pack", *_QUICK, "--rounds", "3"),
        env=_CACHE,
        least=40,
    ),
    Section("timeline", _TRACE, 50, dry=(*_TRACE, *_QUICK), least=20),
    Section("several", _SEVERAL, 100, dry=(*_SEVERAL, "--cpu"), least=0),
)


@dataclass
class Outcome:
    """How a section ended: "ok", "failed", "timed out" or "not run"."""

    name: str
    status: str
    seconds: float = 0.0
    why: str = ""
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def bad(self) -> bool:
        """Whether this section makes the whole check fail."""
        return self.status != "ok"


def run_section(
    section: Section,
    words: Sequence[str],
    limit: float,
    env: Mapping[str, str],
    folder: Path,
) -> Outcome:
    """Runs one section, and ends all its processes at the time limit."""
    stem = "".join(c if c.isalnum() else "-" for c in section.name)
    result, log = folder / f"{stem}.json", folder / f"{stem}.log"
    result.unlink(missing_ok=True)
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", *words],
            env={**env, "RINGJAX_GPU_CHECK_RESULT": str(result)},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        late = False
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            late = True
            # SIGABRT makes faulthandler write the stacks.
            _signal(process, signal.SIGABRT, group=False)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3)
        finally:  # end left-over processes, also after Ctrl-C
            _signal(process, signal.SIGKILL, group=True)
            process.wait()
    outcome = Outcome(section.name, "ok", time.monotonic() - started)
    with contextlib.suppress(OSError, ValueError):
        outcome.report = json.loads(result.read_text())
    if not outcome.report:  # the outcome is in the last line of pytest
        said = log.read_text(errors="replace").strip().splitlines()
        outcome.why = said[-1][:200] if said else ""
    if late:
        outcome.status, outcome.why = "timed out", f"after {limit:.0f} s"
    elif process.returncode != 0 or outcome.report.get("failures"):
        outcome.status = "failed"
        outcome.why = "; ".join(outcome.report.get("failures", [])) or (
            f"exit code {process.returncode}"
        )
    return outcome


def _signal(process: subprocess.Popen[bytes], number: int, *, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        if group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


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
    }


def limit_of(section: Section, left: float, later: Sequence[Section]) -> float:
    """Returns the section's limit, or less, so that later sections keep some time.

    If there is not enough time for all sections, earlier sections have priority.
    """
    spare = left - sum(other.least for other in later)
    return min(section.limit, left, max(section.least, spare))


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
        words = section.dry if options.dry_run else section.words
        reason = ""
        if section.needs_build and not built:
            reason = "nothing was built"
        elif section.needs_gpu and not devices and not options.dry_run:
            reason = "no CUDA device"
        elif limit < 1:
            reason = "no time left"
        if reason:
            outcome = Outcome(section.name, "not run", why=reason)
        else:
            assert words is not None  # a dry run omits sections without words
            print(f"{section.name}: up to {limit:.0f} s …", flush=True)
            # The section then ends itself and writes its tables.
            seconds = f"{max(limit - 8, 1):.0f}"
            places = {"work": str(work), "site": str(site), "seconds": seconds}
            env = environment(site, options.dry_run)
            env |= {k: v.format(**places) for k, v in section.env.items()}
            filled = [word.format(**places) for word in words]
            outcome = run_section(section, filled, limit, env, folder)
        if section.name == "build":
            built = outcome.status == "ok"
        outcomes.append(outcome)
        _tell(outcome, folder, time.monotonic() - started)
    return outcomes


def _tell(outcome: Outcome, folder: Path, elapsed: float) -> None:
    why = f" ({outcome.why})" if outcome.why else ""
    print(
        f"[{elapsed:5.0f} s] {outcome.name}: {outcome.status}{why}, "
        f"{outcome.seconds:.1f} s",
        flush=True,
    )
    if outcome.status in ("failed", "timed out"):
        stem = "".join(c if c.isalnum() else "-" for c in outcome.name)
        log = (folder / f"{stem}.log").read_text(errors="replace")
        print("\n".join("    | " + line for line in log[-TAIL:].splitlines()))


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Formats the first table, with the outcome of every section."""
    rows = [
        [o.name, o.status, f"{o.seconds:.1f}", o.why.splitlines()[0] if o.why else ""]
        for o in outcomes
    ]
    missed = [text for o in outcomes for text in o.report.get("missed", [])]
    notes = [f"target missed: {text}" for text in missed]
    head = ["section", "result", "s", "why"]
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
    return int(any(outcome.bad for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
